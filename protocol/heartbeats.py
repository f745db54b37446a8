"""The launcher's judgement of its children's heartbeats: whose main loop has stopped coming round.

Only what has come counts, and only while the launcher itself runs: a run that is stopped as a whole
goes on as a whole.
"""

from collections.abc import Sequence

from protocol.child import Child
from protocol.running_clock import RunningClock

HEARTBEAT_LIMIT_S = 20.0
"""Forty heartbeats: no machine is so loaded that a process which wants to run does not for this."""
LONGEST_WAIT_S = 1.0
"""How often the launcher has to look."""


class HeartbeatWatch:
    """Notices that a child which was ready has not reported for too long."""

    def __init__(self, now: float) -> None:
        self._clock = RunningClock(now, longest_pause_s=2 * LONGEST_WAIT_S)
        self._seen: dict[str, tuple[int, float]] = {}
        """By child: its heartbeats so far, and when by our clock the last of them came."""

    def find_stuck(self, children: Sequence[Child], now: float) -> Child | None:
        """Return a child that is ready and stuck; to be called every `LONGEST_WAIT_S`."""
        seconds = self._clock.read(now)
        for child in children:
            count, since = self._seen.get(child.name, (-1, seconds))
            if child.ready is None or child.heartbeats != count:
                self._seen[child.name] = (child.heartbeats, seconds)
            elif seconds - since >= HEARTBEAT_LIMIT_S:
                return child
        return None
