import numpy as np
import pytest

from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import Join, SamplingParams, StepPlan
from tests.worker.plan_builder import make_facts, make_join, make_plan
from worker.slots import SlotTable
from worker.step_rows import StepRows

FACTS = make_facts()  # blocks of 4 positions, 16 blocks, 4 slots, 32 tokens, vocabulary 1000


@pytest.fixture
def table() -> SlotTable:
    return SlotTable(
        slots=FACTS.slots,
        num_blocks=FACTS.num_blocks,
        block_size=FACTS.block_size,
        max_model_len=FACTS.max_model_len,
        vocab_size=FACTS.vocab_size,
    )


@pytest.fixture
def decoding(table: SlotTable) -> SlotTable:
    """Slots 0 and 1 decode at positions 4 and 3 next: lengths 5 and 4 after step 2."""
    table.apply(
        make_plan(
            1,
            joins=[make_join(0, [10, 11, 12, 13], [5, 6]), make_join(1, [20, 21, 22], [7])],
            chunks=[(0, 0, 4, 1), (1, 0, 3, 1)],
        )
    )
    table.apply(make_plan(2, decode=[0, 1]))
    return table


def decode_rows(rows: StepRows) -> list[tuple[int, int]]:
    return list(zip(rows.decode_slots.tolist(), rows.decode_positions.tolist(), strict=True))


def refusal(table: SlotTable, plan: StepPlan) -> str:
    with pytest.raises(ProtocolError) as caught:
        table.apply(plan)
    return str(caught.value)


# Rule 1: a plan's rows are its decode rows, then its chunks; the list is the scheduler's.


def test_rule_1_rows_are_decode_rows_then_chunks_in_plan_order(decoding: SlotTable) -> None:
    rows = decoding.apply(
        make_plan(
            3,
            joins=[make_join(3, [1, 2, 3, 4, 5], [1, 2]), make_join(2, [8, 9], [3])],
            new_blocks=[(1, 1, 4)],
            decode=[1, 0],
            chunks=[(3, 0, 2, 0), (2, 0, 2, 1)],
        )
    )
    assert rows.num_rows == 4
    assert decode_rows(rows) == [(1, 4), (0, 5)]
    assert rows.decode_rows.tolist() == [0, 1]
    assert [(chunk.row, chunk.slot, chunk.start, chunk.is_last) for chunk in rows.chunks] == [
        (2, 3, 0, False),
        (3, 2, 0, True),
    ]
    assert [chunk.token_ids.tolist() for chunk in rows.chunks] == [[1, 2], [8, 9]]
    assert rows.sampled_rows.tolist() == [0, 1, 3]
    assert rows.joins == (3, 2)


def test_rule_1_nil_decode_is_exactly_the_previous_list(decoding: SlotTable) -> None:
    decoding.apply(make_plan(3, decode=[1, 0], new_blocks=[(1, 1, 8)]))
    rows = decoding.apply(make_plan(4, decode=None))
    assert decode_rows(rows) == [(1, 5), (0, 6)]


def test_rule_1_nil_after_an_empty_list_is_empty(decoding: SlotTable) -> None:
    decoding.apply(make_plan(3, joins=[make_join(2, [8, 9], [3])], chunks=[(2, 0, 1, 0)]))
    rows = decoding.apply(make_plan(4, decode=None, chunks=[(2, 1, 1, 1)]))
    assert decode_rows(rows) == []


def test_rule_1_a_last_chunk_does_not_add_its_slot_to_the_list(decoding: SlotTable) -> None:
    decoding.apply(
        make_plan(
            3,
            joins=[make_join(2, [8, 9], [3])],
            new_blocks=[(1, 1, 8)],
            decode=None,
            chunks=[(2, 0, 2, 1)],
        )
    )
    rows = decoding.apply(make_plan(4, decode=None))
    assert decode_rows(rows) == [(0, 6), (1, 5)]


def test_rule_1_a_leave_does_not_edit_the_list(decoding: SlotTable) -> None:
    assert refusal(decoding, make_plan(3, leaves=[1], decode=None)) == (
        "step 3: slot 1 decodes but is free"
    )


def test_rule_1_a_plan_without_rows_is_fatal(decoding: SlotTable) -> None:
    assert refusal(decoding, make_plan(3, leaves=[1])).startswith("step 3 has no rows")


# Rule 2: leaves, joins, copies, new blocks, then rows; lengths follow from plans alone.


def test_rule_2_leaves_come_before_joins(decoding: SlotTable) -> None:
    rows = decoding.apply(
        make_plan(
            3,
            leaves=[1],
            joins=[make_join(1, [30, 31], [9], generation=1)],
            decode=[0],
            chunks=[(1, 0, 2, 1)],
        )
    )
    assert rows.leaves.tolist() == [1]
    assert decoding.block_tables[1].tolist() == [9, -1, -1, -1, -1, -1, -1, -1]
    assert decoding.generations[1] == 1
    assert decoding.token_ids[1].tolist() == [30, 31]


def test_rule_2_joins_come_before_new_blocks_and_these_before_rows(table: SlotTable) -> None:
    rows = table.apply(
        make_plan(
            1,
            joins=[make_join(0, [1, 2, 3, 4, 5], [3])],
            copies=[(7, 8)],
            new_blocks=[(0, 1, 9)],
            chunks=[(0, 0, 5, 1)],
        )
    )
    assert table.block_tables[0, :3].tolist() == [3, 9, -1]
    assert table.num_blocks_held[0] == 2
    assert rows.copies.tolist() == [[7, 8]]
    assert rows.new_blocks.tolist() == [[0, 1, 9]]


def test_rule_2_a_new_block_may_replace_one_that_is_full(decoding: SlotTable) -> None:
    rows = decoding.apply(make_plan(3, decode=[0], new_blocks=[(1, 0, 9), (0, 2, 3), (0, 0, 9)]))
    assert rows.new_blocks.tolist() == [[1, 0, 9], [0, 2, 3], [0, 0, 9]]
    assert decoding.block_tables[:2, :4].tolist() == [[9, 6, 3, -1], [9, -1, -1, -1]]
    assert decoding.num_blocks_held[:2].tolist() == [3, 1]
    assert refusal(decoding, make_plan(4, decode=[1])).startswith("step 4: slot 1 computes pos")


def test_rule_2_a_join_sets_the_length_to_its_first_chunks_start(table: SlotTable) -> None:
    rows = table.apply(
        make_plan(
            1,
            joins=[make_join(0, [1, 2, 3, 4, 5, 6], [3, 4], prompt_len=5)],
            chunks=[(0, 4, 2, 1)],
        )
    )
    (chunk,) = rows.chunks
    assert (chunk.start, chunk.end, chunk.token_ids.tolist()) == (4, 6, [5, 6])
    assert table.lengths[0] == 6
    assert table.prompt_lens[0] == 5


def test_rule_2_a_chunk_adds_its_count(table: SlotTable) -> None:
    table.apply(make_plan(1, joins=[make_join(0, [1, 2, 3, 4, 5], [3, 4])], chunks=[(0, 0, 3, 0)]))
    assert table.lengths[0] == 3
    table.apply(make_plan(2, chunks=[(0, 3, 2, 1)]))
    assert table.lengths[0] == 5


def test_rule_2_a_decode_row_sits_at_the_length_and_adds_one(decoding: SlotTable) -> None:
    assert decoding.lengths[:2].tolist() == [5, 4]
    rows = decoding.apply(make_plan(3, decode=[0]))
    assert decode_rows(rows) == [(0, 5)]
    assert decoding.lengths[:2].tolist() == [6, 4]


@pytest.mark.parametrize("start", [2, 4])
def test_rule_2_a_chunk_whose_start_is_not_the_length_is_fatal(
    table: SlotTable, start: int
) -> None:
    table.apply(make_plan(1, joins=[make_join(0, list(range(8)), [3, 4])], chunks=[(0, 0, 3, 0)]))
    assert refusal(table, make_plan(2, chunks=[(0, start, 8 - start, 1)])) == (
        f"step 2: slot 0 has a chunk at {start} but its length is 3"
    )


def test_rule_2_a_slot_does_not_decode_before_its_last_chunk(table: SlotTable) -> None:
    table.apply(make_plan(1, joins=[make_join(0, list(range(8)), [3, 4])], chunks=[(0, 0, 3, 0)]))
    assert refusal(table, make_plan(2, decode=[0])) == (
        "step 2: slot 0 decodes with 3 of its 8 tokens computed"
    )


# Rule 5: a slot's generation rises with each use.


@pytest.mark.parametrize("generation", [0, 3])
def test_rule_5_a_generation_never_comes_twice(table: SlotTable, generation: int) -> None:
    table.apply(make_plan(1, joins=[make_join(0, [1], [3], generation=3)], chunks=[(0, 0, 1, 1)]))
    again = make_plan(
        2,
        leaves=[0],
        joins=[make_join(0, [1], [3], generation=generation)],
        chunks=[(0, 0, 1, 1)],
    )
    assert refusal(table, again) == (
        f"step 2: slot 0 joins with generation {generation}, not above the last one, 3"
    )


# Rule 8: a sampled token's index is where it will stand in prompt + output.


def test_rule_8_the_index_of_a_sampled_token_is_the_length_after_its_row(
    decoding: SlotTable,
) -> None:
    rows = decoding.apply(
        make_plan(3, joins=[make_join(2, [8, 9], [3])], decode=[0], chunks=[(2, 0, 2, 1)])
    )
    assert rows.sampled_slots.tolist() == [0, 2]
    assert rows.sampled_indices.tolist() == decoding.lengths[[0, 2]].tolist() == [6, 2]


# Groups of decode rows with the same first blocks.


@pytest.fixture
def grouped(table: SlotTable) -> SlotTable:
    """Slots 0 and 1 are a group: both decode, and share their first block."""
    joins = [make_join(0, [10, 11, 12, 13], [5, 6]), make_join(1, [10, 11, 12, 13], [5, 7])]
    table.apply(make_plan(1, joins=joins, chunks=[(0, 0, 4, 1), (1, 0, 4, 1)]))
    table.apply(make_plan(2, decode=[0, 1], groups=[(0, 0, 1), (1, 0, 1)]))
    return table


def test_nil_groups_are_exactly_the_previous_plans(grouped: SlotTable) -> None:
    grouped.apply(make_plan(3, decode=None))
    join = make_join(2, [8, 9], [3])
    grouped.apply(make_plan(4, joins=[join], decode=[1, 0], chunks=[(2, 0, 2, 1)]))
    assert refusal(grouped, make_plan(5, decode=[0, 2])) == (
        "step 5: slot 1 is in a group but has no decode row"
    )


def test_groups_end_with_an_empty_column(grouped: SlotTable) -> None:
    grouped.apply(make_plan(3, decode=[0], groups=[]))
    grouped.apply(make_plan(4, decode=None))


def test_groups_that_the_tables_do_not_have_are_fatal(grouped: SlotTable) -> None:
    plan = make_plan(3, decode=None, groups=[(0, 0, 2), (1, 0, 2)])
    assert refusal(grouped, plan) == (
        "step 3: slot 0 shares blocks that it has not filled, or none"
    )


# Rule 9: a failed slot answers without being computed until it leaves.


def test_rule_9_a_failed_slot_is_answered_uncomputed_until_it_leaves(decoding: SlotTable) -> None:
    decoding.fail(0, ErrorCode.NUMERIC)
    new_block = [(1, 1, 8)]
    rows = decoding.apply(make_plan(3, decode=None, new_blocks=new_block))
    assert rows.failures == {0: ErrorCode.NUMERIC}
    assert (rows.num_rows, rows.decode_rows.tolist(), decode_rows(rows)) == (2, [1], [(1, 4)])
    assert rows.sampled_rows.tolist() == [1]
    assert rows.slots == [1]

    rows = decoding.apply(make_plan(4, decode=None))
    assert rows.failures == {0: ErrorCode.NUMERIC}
    assert decode_rows(rows) == [(1, 5)]

    rows = decoding.apply(
        make_plan(
            5,
            leaves=[0],
            joins=[make_join(0, [1, 2], [5], generation=1)],
            decode=[1],
            chunks=[(0, 0, 2, 1)],
        )
    )
    assert rows.failures == {}
    assert [chunk.slot for chunk in rows.chunks] == [0]


def test_rule_9_a_failed_slots_chunks_are_answered_uncomputed(decoding: SlotTable) -> None:
    joins = [make_join(2, [1, 2, 3], [9]), make_join(3, [4, 5, 6], [10])]
    decoding.apply(make_plan(3, joins=joins, chunks=[(2, 0, 1, 0), (3, 0, 1, 0)]))
    decoding.fail(2, ErrorCode.OUT_OF_MEMORY)
    rows = decoding.apply(make_plan(4, decode=[0], chunks=[(2, 1, 2, 1), (3, 1, 2, 1)]))
    assert rows.failures == {1: ErrorCode.OUT_OF_MEMORY}
    assert [(chunk.row, chunk.slot) for chunk in rows.chunks] == [(2, 3)]
    assert rows.sampled_rows.tolist() == [0, 2]


def test_rule_9_lengths_go_on_by_plans_for_failed_slots_too(decoding: SlotTable) -> None:
    decoding.fail(0, ErrorCode.NUMERIC)
    decoding.apply(make_plan(3, decode=[0]))
    assert decoding.lengths[0] == 6


def test_rule_9_the_first_failure_names_the_code(decoding: SlotTable) -> None:
    decoding.fail(0, ErrorCode.NUMERIC)
    decoding.fail(0, ErrorCode.OUT_OF_MEMORY)
    assert decoding.apply(make_plan(3, decode=[0])).failures == {0: ErrorCode.NUMERIC}


# What no plan may say.

JOIN_2 = make_join(2, [8, 9], [3])


def join_2_with(**changes: object) -> Join:
    arguments: dict[str, object] = {"slot": 2, "token_ids": [8, 9], "blocks": [3]}
    return make_join(**(arguments | changes))


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (make_plan(3, leaves=[2], decode=[0]), "slot 2 leaves but is free"),
        (make_plan(3, leaves=[1, 1], decode=[0]), "slot 1 leaves but is free"),
        (make_plan(3, leaves=[4], decode=[0]), "slot 4 leaves; slots are 0 to 3"),
        (make_plan(3, leaves=[-1], decode=[0]), "slot -1 leaves; slots are 0 to 3"),
        (
            make_plan(3, joins=[make_join(0, [1], [3])], chunks=[(0, 0, 1, 1)]),
            "slot 0 joins but is in use",
        ),
        (
            make_plan(3, joins=[JOIN_2, JOIN_2], chunks=[(2, 0, 2, 1)]),
            "slot 2 joins but is in use",
        ),
        (
            make_plan(3, joins=[make_join(4, [1], [3])], chunks=[(4, 0, 1, 1)]),
            "slot 4 joins; slots are 0 to 3",
        ),
        (make_plan(3, joins=[JOIN_2], decode=[0]), "slot 2 joins without its first chunk"),
        (
            make_plan(3, joins=[JOIN_2], chunks=[(2, -1, 3, 1)]),
            "slot 2 joins with its first chunk at -1",
        ),
        (
            make_plan(
                3,
                joins=[join_2_with(params=SamplingParams(temperature=1.0))],
                chunks=[(2, 0, 2, 1)],
            ),
            "slot 2 joins without a seed for its sampling",
        ),
        (
            make_plan(3, joins=[join_2_with(prompt_len=3)], chunks=[(2, 0, 2, 1)]),
            "slot 2 joins with 2 tokens; legal are its prompt's 3 to max_model_len 32",
        ),
        (
            make_plan(3, joins=[join_2_with(token_ids=[1] * 33)], chunks=[(2, 0, 33, 1)]),
            "slot 2 joins with 33 tokens; legal are its prompt's 33 to max_model_len 32",
        ),
        (
            make_plan(3, joins=[join_2_with(token_ids=[8, 1000])], chunks=[(2, 0, 2, 1)]),
            "slot 2 joins with a token id outside 0 to 999",
        ),
        (
            make_plan(3, joins=[join_2_with(token_ids=[-1, 8])], chunks=[(2, 0, 2, 1)]),
            "slot 2 joins with a token id outside 0 to 999",
        ),
        (
            make_plan(3, joins=[join_2_with(blocks=[3] * 9)], chunks=[(2, 0, 2, 1)]),
            "slot 2 joins with 9 blocks of 8 at most",
        ),
        (
            make_plan(3, joins=[join_2_with(blocks=[16])], chunks=[(2, 0, 2, 1)]),
            "the block table of slot 2 names a block outside 0 to 15",
        ),
        (
            make_plan(3, copies=[(0, 16)], decode=[0]),
            "a block copy names a block outside 0 to 15",
        ),
        (
            make_plan(3, swap_outs=[(16, 0)], decode=[0]),
            "a move to or from the host names a block outside 0 to 15",
        ),
        (
            make_plan(3, swap_outs=[(0, 0)], decode=[0]),
            "a move names a host block that is not below 0",
        ),
        (
            make_plan(3, swap_ins=[(-1, 0)], decode=[0]),
            "a move names a host block that is not below 0",
        ),
        (
            make_plan(3, new_blocks=[(2, 0, 3)], decode=[0]),
            "slot 2 gets a new block but is free",
        ),
        (
            make_plan(3, new_blocks=[(4, 0, 3)], decode=[0]),
            "slot 4 gets a new block; slots are 0 to 3",
        ),
        (
            make_plan(3, new_blocks=[(0, 1, 3)], decode=[0]),
            "slot 0 gets another block at index 1 but its length is 5",
        ),
        (
            make_plan(3, new_blocks=[(0, -1, 3)], decode=[0]),
            "slot 0 gets a new block at index -1 but holds 2",
        ),
        (
            make_plan(3, new_blocks=[(0, 3, 3)], decode=[0]),
            "slot 0 gets a new block at index 3 but holds 2",
        ),
        (
            make_plan(3, new_blocks=[(0, 2, -1)], decode=[0]),
            "slot 0 gets block -1; blocks are 0 to 15",
        ),
        (
            make_plan(3, new_blocks=[(0, index, 9) for index in range(2, 9)], decode=[0]),
            "slot 0 gets more than 8 blocks",
        ),
        (make_plan(3, decode=[4]), "slot 4 decodes; slots are 0 to 3"),
        (make_plan(3, decode=[-1]), "slot -1 decodes; slots are 0 to 3"),
        (make_plan(3, decode=[0, 0]), "slot 0 decodes twice"),
        (make_plan(3, decode=[0, 2]), "slot 2 decodes but is free"),
        (
            make_plan(3, decode=[0, 1]),
            "slot 1 computes position 4 but holds 1 blocks of 4, and max_model_len is 32",
        ),
        (make_plan(3, chunks=[(2, 0, 1, 1)]), "slot 2 has a chunk but is free"),
        (make_plan(3, chunks=[(4, 0, 1, 1)]), "slot 4 has a chunk; slots are 0 to 3"),
        (
            make_plan(3, decode=[0], chunks=[(0, 6, 1, 1)]),
            "slot 0 has a chunk of 1 at 6 but knows 4 tokens",
        ),
        (
            make_plan(3, joins=[JOIN_2], chunks=[(2, 0, 0, 0)]),
            "slot 2 has a chunk of 0 at 0 but knows 2 tokens",
        ),
        (
            make_plan(3, joins=[JOIN_2], chunks=[(2, 0, 3, 1)]),
            "slot 2 has a chunk of 3 at 0 but knows 2 tokens",
        ),
        (
            make_plan(3, joins=[JOIN_2], chunks=[(2, 0, 1, 1)]),
            "slot 2 has a chunk to 1 of 2 tokens marked last=1",
        ),
        (
            make_plan(3, joins=[JOIN_2], chunks=[(2, 0, 2, 0)]),
            "slot 2 has a chunk to 2 of 2 tokens marked last=0",
        ),
        (
            make_plan(3, joins=[join_2_with(token_ids=[1] * 5)], chunks=[(2, 0, 5, 1)]),
            "slot 2 computes position 4 but holds 1 blocks of 4, and max_model_len is 32",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_fatal_and_named(
    decoding: SlotTable, plan: StepPlan, sentence: str
) -> None:
    assert refusal(decoding, plan) == f"step 3: {sentence}"


def test_a_slot_has_one_row_a_step(decoding: SlotTable) -> None:
    decoding.apply(make_plan(3, joins=[join_2_with(token_ids=[1] * 4)], chunks=[(2, 0, 1, 0)]))
    assert refusal(decoding, make_plan(4, chunks=[(2, 1, 1, 0), (2, 2, 2, 1)])) == (
        "step 4: slot 2 has two chunks"
    )


def test_no_position_reaches_max_model_len() -> None:
    table = SlotTable(slots=1, num_blocks=4, block_size=4, max_model_len=6, vocab_size=10)
    table.apply(make_plan(1, joins=[make_join(0, [1] * 5, [0, 1])], chunks=[(0, 0, 5, 1)]))
    table.apply(make_plan(2, decode=[0]))
    assert refusal(table, make_plan(3, decode=[0])) == (
        "step 3: slot 0 computes position 6 but holds 2 blocks of 4, and max_model_len is 6"
    )


def test_a_slot_that_left_holds_nothing(decoding: SlotTable) -> None:
    decoding.apply(make_plan(3, leaves=[1], decode=[0]))
    assert decoding.params[1] is None
    assert decoding.token_ids[1].size == 0
    assert (decoding.lengths[1], decoding.num_blocks_held[1]) == (0, 0)
    assert np.all(decoding.block_tables[1] == -1)
