"""Whether arrivals wait for company before they get a step.

A client that has many requests sends them one after another, in less time than a step takes.
Planned at once, the first would have a step of its own and the others would wait for it; and a step
of one long prompt takes the ranks nearly as long to launch as one of many.
"""


class Gathering:
    """Holds arrivals back until they fill a step, while there is something better to do: wait."""

    def __init__(self, *, budget: int, patience_s: float) -> None:
        """`budget`: tokens of a full step. `patience_s`: of an idle engine; 0: nobody waits."""
        self._budget = budget
        self._patience_s = patience_s
        self._until: float | None = None

    @property
    def deadline(self) -> float | None:
        """When patience ends, by the clock that `waits` is told; None: nobody waits."""
        return self._until

    def waits(self, now: float, *, waiting_tokens: int, has_rows: bool, is_computing: bool) -> bool:
        """Return whether to plan nothing yet.

        `has_rows`: running sequences have something to compute, which then never waits.
        `is_computing`: a plan is unanswered, so that nothing is lost by waiting for its end.
        """
        if has_rows or not 0 < waiting_tokens < self._budget or not self._patience_s:
            self._until = None
            return False
        if self._until is None:
            self._until = now + self._patience_s
        return is_computing or now < self._until
