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

    Time that begins with nobody waiting says nothing about that: less comes then than could be
    admitted.
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
        if before is None or not before[2]:
            return
        seconds = now - before[0]
        remains = math.exp(-seconds / HORIZON_S)
        self._seconds = self._seconds * remains + seconds
        self._tokens = self._tokens * remains + admitted_tokens - before[1]

    def retry_after_s(self, waiting_tokens: int) -> int:
        """Return in how many whole seconds what waits will have been admitted, within bounds."""
        if not waiting_tokens or not self._seconds:
            return SHORTEST_S
        # Where nothing has been admitted for some time, it may take as long again.
        seconds = self._seconds
        if self._tokens:
            seconds *= waiting_tokens / self._tokens
        return min(max(SHORTEST_S, math.ceil(seconds - ROUNDING_S)), LONGEST_S)
