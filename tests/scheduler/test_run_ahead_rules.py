"""The scheduler's side of the rules of run-ahead, one by one. Each test breaks with its rule."""

import msgspec
import pytest

from protocol.columns import pack_int32, unpack_int32, unpack_rows
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import AbortState, FinishReason, StepResult
from scheduler.policy import ThroughputPolicy
from tests.scheduler.simulation import add_message, expected_output, simulate

PROMPT = [1, 2, 3, 4, 5]


def decode_of(plan):
    return None if plan.decode is None else unpack_int32(plan.decode)


def stop_at(prompt, index, seed=0):
    """The token that this prompt's output has at an index, to be used as its stop token."""
    output, _ = expected_output(prompt, add_message(0, prompt, max_tokens=20).params, 64)
    assert output[index] not in output[:index]
    return output[index]


# Rule 1: rows are decode rows, then chunks; nil only for exactly the previous plan's list


def test_rule_1_decode_is_nil_only_for_exactly_the_previous_list():
    simulation = simulate()
    simulation.add(add_message(0, PROMPT))
    first, second = simulation.plan(), simulation.plan()
    assert (decode_of(first), unpack_rows(first.chunks, 4)) == ([], [(0, 0, 5, 1)])
    assert decode_of(second) == [0]
    simulation.answer()
    assert decode_of(simulation.plan()) is None
    simulation.add(add_message(1, [9, 8]))
    simulation.answer()
    joining = simulation.plan()
    assert (decode_of(joining), unpack_rows(joining.chunks, 4)) == (None, [(1, 0, 2, 1)])
    simulation.answer()
    assert decode_of(simulation.plan()) == [0, 1]


def test_rule_1_the_list_is_sent_whole_after_a_leave():
    simulation = simulate(max_in_flight=1)
    simulation.add(add_message(0, PROMPT, max_tokens=20))
    simulation.add(add_message(1, [7], max_tokens=2))
    plans = []
    while not simulation.received(1).reason:
        plans.append(simulation.plan())
        simulation.answer()
    after_the_leave = simulation.plan()
    assert unpack_int32(after_the_leave.leaves) == [1]
    assert decode_of(after_the_leave) == [0]


def test_rule_1_a_leave_outside_the_list_sends_it_whole_too():
    simulation = simulate(max_in_flight=1, policy=ThroughputPolicy(budget=3))
    simulation.add(add_message(0, [1], max_tokens=20))
    simulation.plan()
    simulation.answer()
    simulation.add(add_message(1, PROMPT))
    assert decode_of(simulation.plan()) == [0]
    simulation.answer()
    assert simulation.abort(1, 0).state is AbortState.LIVE
    after_the_leave = simulation.plan()
    assert unpack_int32(after_the_leave.leaves) == [1]
    assert decode_of(after_the_leave) == [0]


def test_rule_1_the_list_is_sent_whole_after_a_last_chunk():
    simulation = simulate(max_in_flight=2)
    simulation.add(add_message(0, PROMPT, max_tokens=20))
    for _ in range(2):
        simulation.plan()
        simulation.answer()
    # One token is all that this one may have, so neither list nor slots change after it.
    simulation.add(add_message(1, [7], max_tokens=1))
    with_last_chunk, next_plan = simulation.plan(), simulation.plan()
    assert decode_of(with_last_chunk) is None
    assert (decode_of(next_plan), next_plan.leaves) == ([0], b"")


def test_rule_1_a_plan_without_rows_is_not_sent_and_its_leaves_wait():
    simulation = simulate()
    simulation.add(add_message(0, PROMPT, max_tokens=2))
    simulation.run()
    assert simulation.plan() is None
    assert len(simulation.plans) == 2
    simulation.add(add_message(1, [7], max_tokens=2))
    plan = simulation.plan()
    assert (plan.step_id, unpack_int32(plan.leaves)) == (3, [0])
    assert [join.slot for join in plan.joins] == [0]


# Rule 2: lengths follow from plans alone


def test_rule_2_a_join_comes_with_its_first_chunk_and_chunks_follow_each_other():
    simulation = simulate(max_in_flight=1, policy=ThroughputPolicy(budget=4))
    simulation.add(add_message(0, list(range(10)), max_tokens=1))
    simulation.run()
    assert [unpack_rows(plan.chunks, 4) for plan in simulation.plans] == [
        [(0, 0, 4, 0)],
        [(0, 4, 4, 0)],
        [(0, 8, 2, 1)],
    ]
    assert [len(plan.joins) for plan in simulation.plans] == [1, 0, 0]


def test_rule_2_a_cached_prefix_is_where_the_first_chunk_starts():
    simulation = simulate()
    simulation.add(add_message(0, list(range(10)), max_tokens=1))
    simulation.run()
    simulation.add(add_message(1, [*range(8), 20, 21, 22], max_tokens=1))
    plan = simulation.plan()
    assert unpack_rows(plan.chunks, 4) == [(0, 8, 3, 1)]
    assert unpack_int32(plan.joins[0].block_table)[:2] == [0, 1]


def test_rule_2_the_block_of_a_position_comes_before_or_with_its_row():
    simulation = simulate(block_size=4, max_in_flight=2)
    simulation.add(add_message(0, [1, 2, 3], max_tokens=8))
    simulation.run()
    # Positions 4 and 8 are computed by the third and the seventh plan.
    assert [unpack_rows(plan.new_blocks, 3) for plan in simulation.plans] == [
        *([], [], [(0, 1, 1)], []),
        *([], [], [(0, 2, 2)], []),
    ]


# Rule 3: the worker feeds its own token on


def test_rule_3_rows_are_planned_before_their_token_is_known():
    simulation = simulate(max_in_flight=2)
    simulation.add(add_message(0, PROMPT))
    assert simulation.plan() is not None
    assert simulation.plan() is not None
    assert simulation.received(0).tokens == []
    assert simulation.plan() is None, "two plans are unanswered already"
    simulation.run()
    simulation.check_outputs()


def test_rule_3_one_plan_in_flight_is_the_same_code():
    simulation = simulate(max_in_flight=1)
    simulation.add(add_message(0, PROMPT))
    assert simulation.plan() is not None
    assert simulation.plan() is None
    simulation.run()
    simulation.check_outputs()


# Rule 4: a freed block or slot may be given out in the very next plan


def test_rule_4_slot_and_blocks_are_given_out_again_at_once():
    simulation = simulate(num_blocks=2, block_size=4, slots=1, prefix_key=None)
    simulation.add(add_message(0, PROMPT, max_tokens=20))
    simulation.add(add_message(1, [6, 7, 8, 9, 10, 11], max_tokens=1))
    simulation.plan()
    simulation.plan()
    simulation.abort(0, 0)
    simulation.answer()
    plan = simulation.plan()
    assert unpack_int32(plan.leaves) == [0]
    assert [(join.slot, join.generation) for join in plan.joins] == [(0, 1)]
    assert sorted(unpack_int32(plan.joins[0].block_table)) == [0, 1]
    simulation.run()
    simulation.check_outputs()


# Rule 5: generations, and no row beyond the last permitted token


@pytest.mark.parametrize("end", ["finish", "abort"])
def test_rule_5_tokens_of_an_old_generation_are_dropped(end):
    simulation = simulate(max_in_flight=2)
    token = stop_at(PROMPT, 2)
    simulation.add(add_message(0, PROMPT, max_tokens=20, stop_token_ids=(token,)))
    if end == "abort":
        simulation.plan()
        simulation.plan()
        simulation.abort(0, -1)
    simulation.run()
    dropped = {"finish": 1, "abort": 2}[end]
    assert simulation.scheduler.counters.dropped_tokens == dropped
    simulation.check_outputs()


def test_rule_5_a_preempted_sequences_tokens_on_their_way_are_dropped():
    simulation = simulate(num_blocks=6, block_size=2, slots=2, prefix_key=None)
    simulation.add(add_message(0, [1, 2], max_tokens=8))
    simulation.add(add_message(1, [3, 4], max_tokens=8))
    simulation.run()
    assert simulation.scheduler.counters.preemptions > 0
    assert simulation.scheduler.counters.dropped_tokens > 0
    simulation.check_outputs()


def test_rule_5_a_slots_generation_rises_with_every_use():
    simulation = simulate(slots=1)
    for request_id in range(3):
        simulation.add(add_message(request_id, [request_id], max_tokens=1))
    simulation.run()
    assert [join.generation for plan in simulation.plans for join in plan.joins] == [0, 1, 2]


@pytest.mark.parametrize(("max_tokens", "num_plans"), [(1, 1), (3, 3), (59, 59), (999, 59)])
def test_rule_5_no_row_is_planned_beyond_the_last_permitted_token(max_tokens, num_plans):
    simulation = simulate(max_in_flight=2, max_model_len=64)
    simulation.add(add_message(0, PROMPT, max_tokens=max_tokens))
    simulation.run()
    assert len(simulation.plans) == num_plans
    assert simulation.received(0).reason == FinishReason.LENGTH
    assert simulation.scheduler.counters.dropped_tokens == 0


# Rule 6: results commit in step order


def test_rule_6_results_commit_in_step_order():
    simulation = simulate()
    simulation.add(add_message(0, PROMPT))
    simulation.plan()
    simulation.plan()
    second = simulation.results.pop()
    with pytest.raises(ProtocolError, match=r"A result of step 2 came; expected: 1\."):
        simulation.scheduler.commit(second)
    simulation.answer()
    simulation.results.append(second)
    simulation.run()
    simulation.check_outputs()
    with pytest.raises(ProtocolError, match="expected: none"):
        simulation.scheduler.commit(second)


# Rule 7: what the prefix index may know


def test_rule_7_a_block_is_registered_only_when_its_step_is_committed():
    simulation = simulate(max_in_flight=2)
    simulation.add(add_message(0, list(range(9)), max_tokens=4))
    simulation.plan()
    assert simulation.scheduler.block_manager.num_indexed == 0
    simulation.answer()
    assert simulation.scheduler.block_manager.num_indexed == 2


def test_rule_7_a_failed_step_registers_nothing():
    simulation = simulate(max_in_flight=2)
    simulation.add(add_message(0, list(range(9)), max_tokens=4))
    simulation.plan(failing={0: ErrorCode.OUT_OF_MEMORY})
    simulation.run()
    assert simulation.received(0).reason == ErrorCode.OUT_OF_MEMORY
    assert simulation.scheduler.block_manager.num_indexed == 0


def test_rule_7_an_uncommitted_position_is_not_registered_when_its_sequence_leaves():
    simulation = simulate(block_size=4, max_in_flight=2)
    simulation.add(add_message(0, [1, 2, 3], max_tokens=20))
    simulation.plan()
    simulation.plan()  # computes position 3, the last of the first block
    simulation.answer()
    simulation.abort(0, 0)
    assert simulation.scheduler.block_manager.num_indexed == 0
    simulation.answer()
    assert simulation.scheduler.block_manager.num_indexed == 0


@pytest.mark.parametrize(
    ("prompt_tokens", "cached_tokens"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)]
)
def test_rule_7_a_hit_leaves_at_least_one_token_to_compute(prompt_tokens, cached_tokens):
    simulation = simulate(block_size=4)
    prompt = list(range(prompt_tokens))
    for request_id in range(2):
        simulation.add(add_message(request_id, prompt, max_tokens=3))
        simulation.run()
    assert simulation.received(1).cached_tokens == cached_tokens
    assert simulation.received(1).tokens == simulation.received(0).tokens
    simulation.check_outputs()


def test_rule_7_nobody_writes_into_a_block_of_two_sequences():
    # `Simulation.plan` looks at every block that a plan writes.
    simulation = simulate(block_size=4)
    simulation.add(add_message(0, list(range(9)), max_tokens=12))
    simulation.plan()
    simulation.answer()
    for request_id in (1, 2):
        simulation.add(add_message(request_id, list(range(8 + request_id)), max_tokens=12))
    simulation.run()
    assert simulation.scheduler.counters.cached_tokens == 16
    simulation.check_outputs()


# Rule 8: resume from committed tokens only


def test_rule_8_a_preempted_sequence_resumes_from_its_committed_tokens():
    simulation = simulate(num_blocks=6, block_size=2, slots=2, prefix_key=None)
    simulation.add(add_message(0, [1, 2], max_tokens=8))
    simulation.add(add_message(1, [3, 4], max_tokens=8))
    joins = []
    while simulation.scheduler.num_live:
        committed = list(simulation.received(1).tokens)
        plan = simulation.plan()
        joins += [(join, committed) for join in (plan.joins if plan else [])]
        simulation.answer()
    resumed, committed = joins[-1]
    assert len(joins) == 3
    assert 0 < len(committed) < 8
    assert unpack_int32(resumed.token_ids) == [3, 4, *committed]
    assert resumed.prompt_len == 2
    simulation.check_outputs()


# Rule 9: failed rows


def test_rule_9_a_failed_row_ends_its_sequence_and_no_other():
    simulation = simulate(max_in_flight=2)
    simulation.add(add_message(0, PROMPT))
    simulation.add(add_message(1, PROMPT, seed=1))
    simulation.plan()
    simulation.plan(failing={1: ErrorCode.NUMERIC})
    simulation.run()
    assert simulation.received(0).reason == FinishReason.LENGTH
    assert simulation.received(1).reason == ErrorCode.NUMERIC
    assert len(simulation.received(1).tokens) == 1
    simulation.check_outputs()


def test_rule_9_out_of_memory_ends_all_sequences_of_the_step():
    simulation = simulate(max_in_flight=1, policy=ThroughputPolicy(budget=8))
    simulation.add(add_message(0, [1]))
    simulation.plan()
    simulation.answer()
    simulation.add(add_message(1, list(range(20))))
    simulation.plan(failing=dict.fromkeys(range(2), ErrorCode.OUT_OF_MEMORY))
    simulation.run()
    assert simulation.received(0).reason == ErrorCode.OUT_OF_MEMORY
    assert simulation.received(1).reason == ErrorCode.OUT_OF_MEMORY
    assert simulation.scheduler.num_free_blocks == 32


# Rule 10: an abort by the frontend is answered by its AbortAck alone


def test_rule_10_nothing_comes_of_a_sequence_after_its_abort():
    simulation = simulate(max_in_flight=2)
    simulation.add(add_message(0, PROMPT))
    simulation.plan()
    simulation.plan()
    simulation.answer()
    ack = simulation.abort(0, 0)
    assert (ack.state, ack.blocks_returned) == (AbortState.LIVE, 2)
    simulation.run()  # the frontend refuses whatever comes
    assert len(simulation.received(0).tokens) == 1


# Results of a shape that no plan has


def result_of(simulation, **changes):
    return msgspec.structs.replace(simulation.results[0], **changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"counts": pack_int32([1])}, "does not have the counts of its plan"),
        ({"counts": pack_int32([1, 0])}, "does not have the counts of its plan"),
        ({"counts": pack_int32([1, -1]), "tokens": pack_int32([1])}, "needs one ErrorCode"),
        (
            {
                "counts": pack_int32([1, -1]),
                "tokens": pack_int32([1]),
                "failures": pack_int32([7]),
            },
            "needs one ErrorCode",
        ),
        ({"tokens": pack_int32([1])}, "has 1 tokens where 2 rows sampled one"),
        ({"tokens": pack_int32([1, 40])}, "a token that is not below 40"),
        ({"tokens": pack_int32([1, -1])}, "a token that is not below 40"),
    ],
)
def test_a_result_that_does_not_fit_its_plan_is_the_ranks_fault(changes, sentence):
    simulation = simulate()
    simulation.add(add_message(0, PROMPT))
    simulation.add(add_message(1, PROMPT))
    simulation.plan()
    result: StepResult = result_of(simulation, **changes)
    with pytest.raises(ProtocolError, match=sentence):
        simulation.scheduler.commit(result)
