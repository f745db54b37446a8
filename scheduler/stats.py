"""One line of numbers per interval while there is something to count."""

from dataclasses import dataclass, replace

STATS_INTERVAL_S = 10.0


@dataclass(slots=True)
class Counters:
    """What the scheduler has done since it started, as numbers that only grow."""

    steps: int = 0
    """Plans committed."""
    prefill_tokens: int = 0
    """Known tokens planned in chunks."""
    lookup_tokens: int = 0
    """Prompt tokens of first admissions: these were looked up."""
    cached_tokens: int = 0
    """Those of them that were found instead of being computed."""
    resumed_lookup_tokens: int = 0
    """Known tokens that admissions of what had run before looked up."""
    resumed_cached_tokens: int = 0
    """Those of them that were found. Kept apart: mostly they are the sequence's own."""
    shared_blocks: int = 0
    """Blocks that were found held by another sequence."""
    revived_blocks: int = 0
    """Blocks that were found free, but with their content."""
    evicted_blocks: int = 0
    """Blocks whose content was forgotten because they were needed."""
    quarantines: int = 0
    """Blocks taken out of use because something about them did not fit together."""
    output_tokens: int = 0
    """Tokens committed."""
    dropped_tokens: int = 0
    """Tokens that came for a sequence which had left its slot."""
    preemptions: int = 0
    swapped_out: int = 0
    """Blocks moved to the host."""
    swapped_in: int = 0
    """Blocks moved back."""
    finished: int = 0
    """Sequences that had their terminal reason, aborted ones included."""


class StatsLine:
    """Compares the counters with what they were at the last line.

    The rates are over the whole interval; `step_ms` is over the time in which a plan was
    unanswered, so that an engine which is idle now and then does not look slow.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        self._before = Counters()
        self._last_look = now
        self._was_computing = False
        self._computing_s = 0.0

    def due(self, now: float, counters: Counters, *, is_computing: bool) -> str | None:
        """Return what has been done since the last line, once an interval, None if nothing.

        Called whenever the loop comes round; `is_computing` says whether a plan is unanswered
        from now until the next call.
        """
        if self._was_computing:
            self._computing_s += now - self._last_look
        self._last_look, self._was_computing = now, is_computing
        seconds = now - self._since
        if seconds < STATS_INTERVAL_S:
            return None
        before, self._before, self._since = self._before, replace(counters), now
        computing_s, self._computing_s = self._computing_s, 0.0
        steps = counters.steps - before.steps
        if steps == 0 and counters.finished == before.finished:
            return None
        return (
            f"prefill_tps={(counters.prefill_tokens - before.prefill_tokens) / seconds:.0f} "
            f"decode_tps={(counters.output_tokens - before.output_tokens) / seconds:.0f} "
            f"looked_up={counters.lookup_tokens - before.lookup_tokens} "
            f"cached={counters.cached_tokens - before.cached_tokens} "
            f"resumed_cached={counters.resumed_cached_tokens - before.resumed_cached_tokens} "
            f"shared={counters.shared_blocks - before.shared_blocks} "
            f"revived={counters.revived_blocks - before.revived_blocks} "
            f"evicted={counters.evicted_blocks - before.evicted_blocks} "
            f"steps={steps} step_ms={computing_s * 1e3 / max(1, steps):.1f} "
            f"finished={counters.finished - before.finished} "
            f"preempted={counters.preemptions - before.preemptions} "
            f"swapped={counters.swapped_out - before.swapped_out}"
            f"/{counters.swapped_in - before.swapped_in}"
        )
