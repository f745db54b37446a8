"""Whether an idle engine waits for company before its first step.

A client that has many requests sends them one after another, in less time than a step takes.
Planned at once, the first would have a step of its own, and the others would wait for it.
"""


class Gathering:
    """Gives arrivals at an idle engine a moment to fill a step."""

    def __init__(self, *, budget: int, patience_s: float) -> None:
        """`budget`: tokens of a full step, which has nothing to wait for."""
        self._budget = budget
        self._patience_s = patience_s
        self._until: float | None = None

    @property
    def deadline(self) -> float | None:
        """When waiting ends, by the clock that `waits` is told; None: nobody waits."""
        return self._until

    def waits(self, now: float, *, is_idle: bool, waiting_tokens: int) -> bool:
        """Return whether to plan nothing yet. `is_idle`: nothing runs but what waits."""
        if not is_idle or not 0 < waiting_tokens < self._budget:
            self._until = None
            return False
        if self._until is None:
            self._until = now + self._patience_s
        return now < self._until
