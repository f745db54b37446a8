"""A clock that stands still while its process does.

A process that was stopped, by a debugger or together with all others, could not hear what others
said meanwhile, so that time must not count against them.
"""


class RunningClock:
    """Counts the seconds in which its process ran, from 0.

    It has to be read at least every `longest_pause_s`; of a longer pause only that much counts.
    """

    def __init__(self, now: float, *, longest_pause_s: float) -> None:
        self._last = now
        self._longest_pause_s = longest_pause_s
        self._seconds = 0.0

    def read(self, now: float) -> float:
        """Return the seconds counted up to `now`, which is of the monotonic clock."""
        self._seconds += min(now - self._last, self._longest_pause_s)
        self._last = now
        return self._seconds
