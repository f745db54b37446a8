"""When a slot's failure, found in a step's results, counts: at the same step on every rank.

A step's results may come after the next step was launched, sooner on one rank than on another. The
scheduler plans step N + 2 only once all ranks have answered step N. So, whoever found out when:

    step N       fails                                  answered as failed
    step N + 1   computed, for it may be under way      answered as failed
    step N + 2   not computed (`SlotTable.fail`)        answered as failed
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol.errors import ErrorCode
from worker.slots import SlotTable
from worker.step_rows import StepRows

_STEPS_UNDER_WAY = 2


@dataclass(slots=True)
class FailedSlots:
    """Failures by slot and generation, for as long as a launched step may have a row of them."""

    table: SlotTable
    _failures: dict[tuple[int, int], tuple[int, ErrorCode]] = field(default_factory=dict)

    def add(self, step_id: int, slot: int, generation: int, code: ErrorCode) -> None:
        """Note that a slot failed in a step. The first failure of a generation counts."""
        self._failures.setdefault((slot, generation), (step_id, code))

    def take_effect(self, step_id: int) -> None:
        """Tell the table what it has to know before it applies the plan of `step_id`."""
        for (slot, generation), (failed_in, code) in list(self._failures.items()):
            if step_id - failed_in >= _STEPS_UNDER_WAY:
                in_use = self.table.params[slot] is not None
                if in_use and self.table.generations[slot] == generation:
                    self.table.fail(slot, code)
            if step_id - failed_in > 2 * _STEPS_UNDER_WAY:
                # The table has it, or the slot has been left; no step under way goes so far back.
                del self._failures[slot, generation]

    def of_rows(self, rows: StepRows, generations: Sequence[int]) -> dict[int, ErrorCode]:
        """Return row and code of a launched step's rows whose slots had failed before it.

        `generations` are those of `rows.slots` when it was launched.
        """
        if not self._failures:
            return {}
        numbers = [*rows.decode_rows.tolist(), *(chunk.row for chunk in rows.chunks)]
        keys = zip(rows.slots, generations, strict=True)
        return {
            row: self._failures[key][1]
            for row, key in zip(numbers, keys, strict=True)
            if key in self._failures
        }
