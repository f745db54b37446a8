"""How long whoever is refused for want of room had better stay away."""

import math

HORIZON_S = 10.0
"""What happened this long ago weighs a third of what happens now."""
SHORTEST_S, LONGEST_S = 1, 60
"""What anybody is ever told."""
ROUNDING_S = 1e-6
"""Of sums; not to be told as a second more."""


class AdmissionRate:
    """Learns how many tokens a second leave the queue while somebody waits in it.

    Time in which nobody waits says nothing about that: less comes then than could be admitted.
    """

    def __init__(self) -> None:
        self._seen: tuple[float, int, int] | None = None
        self._tokens = 0.0
        self._seconds = 0.0

    def observe(self, now: float, *, admitted_tokens: int, waiting_tokens: int) -> None:
        """Take note of a moment: tokens admitted up to now, and those that wait.

        `now` in seconds on any clock that only goes forward.
        """
        before, self._seen = self._seen, (now, admitted_tokens, waiting_tokens)
        if before is None or not before[2] or not waiting_tokens:
            return
        seconds = now - before[0]
        remains = math.exp(-seconds / HORIZON_S)
        self._seconds = self._seconds * remains + seconds
        self._tokens = self._tokens * remains + admitted_tokens - before[1]

    def retry_after_s(self, waiting_tokens: int) -> int:
        """Return in how many whole seconds what waits will have been admitted, within bounds."""
        if not waiting_tokens or not self._seconds:
            return SHORTEST_S
        if waiting_tokens * self._seconds >= LONGEST_S * self._tokens:
            return LONGEST_S
        seconds = waiting_tokens * self._seconds / self._tokens
        return max(SHORTEST_S, math.ceil(seconds - ROUNDING_S))
