"""One line of numbers per interval while there is something to count."""

from dataclasses import replace

from scheduler.counters import Counters

STATS_INTERVAL_S = 10.0


class StatsLine:
    """Compares the counters with what they were at the last line."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._before = Counters()

    def due(self, now: float, counters: Counters) -> str | None:
        """Return what has been done since the last line, once an interval, None if nothing."""
        seconds = now - self._since
        if seconds < STATS_INTERVAL_S:
            return None
        before, self._before, self._since = self._before, replace(counters), now
        steps = counters.steps - before.steps
        if steps == 0 and counters.finished == before.finished:
            return None
        return (
            f"prefill_tps={(counters.prefill_tokens - before.prefill_tokens) / seconds:.0f} "
            f"decode_tps={(counters.output_tokens - before.output_tokens) / seconds:.0f} "
            f"cached={counters.cached_tokens - before.cached_tokens} "
            f"steps={steps} step_ms={seconds * 1e3 / max(1, steps):.1f} "
            f"finished={counters.finished - before.finished} "
            f"preempted={counters.preemptions - before.preemptions}"
        )
