"""When a failure counts, against plans in step order."""

from protocol.errors import ErrorCode
from tests.worker.plan_builder import make_join, make_plan
from worker.failed_slots import FailedSlots
from worker.slots import SlotTable
from worker.step_rows import StepRows


class Steps:
    """A table, and the failures of its slots."""

    def __init__(self) -> None:
        self.table = SlotTable(
            slots=3, num_blocks=8, block_size=4, max_model_len=32, vocab_size=100
        )
        self.failed = FailedSlots(self.table)
        self.step_id = 0

    def launch(self, **plan) -> tuple[StepRows, list[int]]:
        self.step_id += 1
        self.failed.take_effect(self.step_id)
        rows = self.table.apply(make_plan(self.step_id, **plan))
        return rows, self.table.generations[rows.slots].tolist()

    def start(self) -> None:
        """Join slots 0 and 1, generations 10 and 20."""
        self.launch(
            joins=[
                make_join(0, [5, 6], [0, 3], generation=10),
                make_join(1, [7, 8], [1], generation=20),
            ],
            chunks=[(0, 0, 2, 1), (1, 0, 2, 1)],
        )


def test_computed_once_more_then_no_more():
    steps = Steps()
    steps.start()
    steps.failed.add(1, 1, 20, ErrorCode.NUMERIC)
    rows, generations = steps.launch(decode=[1, 0])
    assert rows.decode_slots.tolist() == [1, 0]
    assert steps.failed.of_rows(rows, generations) == {0: ErrorCode.NUMERIC}
    rows, generations = steps.launch(decode=[1, 0])
    assert rows.decode_slots.tolist() == [0]
    assert rows.failures == {0: ErrorCode.NUMERIC}
    assert steps.failed.of_rows(rows, generations) == {}


def test_what_was_launched_is_answered_as_failed_however_late():
    steps = Steps()
    steps.start()
    second = steps.launch(decode=[0, 1])
    steps.failed.add(1, 1, 20, ErrorCode.NUMERIC)
    steps.launch(leaves=[1], decode=[0])
    assert steps.failed.of_rows(*second) == {1: ErrorCode.NUMERIC}


def test_the_next_sequence_of_the_slot_has_not_failed():
    steps = Steps()
    steps.start()
    rows, generations = steps.launch(
        leaves=[1],
        decode=[0],
        joins=[make_join(1, [9], [2], generation=30)],
        chunks=[(1, 0, 1, 1)],
    )
    steps.failed.add(1, 1, 20, ErrorCode.NUMERIC)
    assert steps.failed.of_rows(rows, generations) == {}
    rows, generations = steps.launch(decode=[0, 1])
    assert (rows.failures, steps.failed.of_rows(rows, generations)) == ({}, {})


def test_the_first_failure_counts():
    steps = Steps()
    steps.start()
    steps.failed.add(1, 0, 10, ErrorCode.NUMERIC)
    steps.failed.add(1, 0, 10, ErrorCode.OUT_OF_MEMORY)
    rows, generations = steps.launch(decode=[0])
    assert steps.failed.of_rows(rows, generations) == {0: ErrorCode.NUMERIC}
    for _ in range(5):
        rows, generations = steps.launch(decode=[0])
    assert steps.failed.of_rows(rows, generations) == {}
    assert rows.failures == {0: ErrorCode.NUMERIC}
