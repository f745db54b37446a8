"""What sequences share, rule by rule (docs/scheduling.md, "Sharing blocks").

The simulated rank refuses a block that replaces one of another content or one that is still
written, and its table must be the scheduler's after every plan.
"""

import random

import pytest

from protocol.columns import unpack_int32, unpack_rows
from protocol.errors import ErrorCode
from scheduler import running
from scheduler.policy import LatencyPolicy, ThroughputPolicy
from tests.scheduler.simulation import add_message, simulate

PROMPT = [(5 * i + i * i) % 37 for i in range(20)]


def new_blocks_of(plan):
    return unpack_rows(plan.new_blocks, 3)


def tables_of(simulation):
    """The block tables by request, as the scheduler has them."""
    running = simulation.scheduler.running_sequences()
    return {each.key.request_id: list(each.block_table) for each in running}


# Copies of one content


def test_copies_of_blocks_computed_at_the_same_time_are_merged():
    simulation = simulate(block_size=4, max_in_flight=1)
    for request_id in range(3):
        simulation.add(add_message(request_id, PROMPT[:10], seed=request_id))
    simulation.plan()
    assert tables_of(simulation) == {0: [0, 1, 2], 1: [3, 4, 5], 2: [6, 7, 8]}
    simulation.answer()
    assert tables_of(simulation) == {0: [0, 1, 2], 1: [0, 1, 5], 2: [0, 1, 8]}
    assert simulation.scheduler.num_free_blocks == 32 - 5
    simulation.scheduler.check_invariants()
    plan = simulation.plan()
    assert new_blocks_of(plan) == [(1, 0, 0), (1, 1, 1), (2, 0, 0), (2, 1, 1)]
    simulation.answer()
    assert new_blocks_of(simulation.plan()) == []
    simulation.run()
    simulation.check_outputs()


def test_a_plan_under_way_reads_the_copy_and_the_next_may_give_it_out():
    simulation = simulate(num_blocks=9, block_size=4, max_in_flight=2, slots=3)
    for request_id in range(2):
        simulation.add(add_message(request_id, PROMPT[:8], max_tokens=3))
    simulation.plan()
    simulation.plan()  # decodes, from the copies too
    simulation.answer()
    simulation.add(add_message(2, [30, 31, 32, 33, 34], max_tokens=1))
    plan = simulation.plan()
    # Blocks 2 and 3 were the copies of 0 and 1.
    assert new_blocks_of(plan) == [(1, 0, 0), (1, 1, 1)]
    assert unpack_int32(plan.joins[0].block_table) == [3, 2]
    simulation.run()
    simulation.check_outputs()


def test_what_follows_a_merged_block_is_merged_too():
    simulation = simulate(block_size=4, max_in_flight=2, policy=ThroughputPolicy(budget=16))
    for request_id in range(2):
        simulation.add(add_message(request_id, PROMPT, max_tokens=3))
    while simulation.scheduler.has_rows or simulation.scheduler.waiting_requests:
        simulation.plan()
        simulation.scheduler.check_invariants()
        simulation.answer()
        simulation.scheduler.check_invariants()
    assert simulation.rank.num_replaced > 0
    simulation.run()
    simulation.check_outputs()


def test_the_block_that_is_still_written_is_not_merged():
    # Both have eight tokens, but of the second block only three positions are committed.
    simulation = simulate(block_size=4, max_in_flight=2)
    for request_id in range(2):
        simulation.add(add_message(request_id, PROMPT[:7], max_tokens=8))
    simulation.plan()
    simulation.plan()  # both write position 7
    simulation.answer()
    assert new_blocks_of(simulation.plan())[:1] == [(1, 0, 0)]
    assert simulation.rank.num_replaced == 1
    simulation.run()
    assert simulation.rank.num_replaced == 1
    simulation.check_outputs()


@pytest.mark.parametrize("end", ["abort", "finish"])
def test_a_sequence_that_leaves_takes_its_merged_blocks_out_of_the_next_plan(end):
    simulation = simulate(block_size=4, max_in_flight=1, slots=2)
    simulation.add(add_message(0, PROMPT[:8], max_tokens=8))
    simulation.add(add_message(1, PROMPT[:8], max_tokens=8 if end == "abort" else 1))
    simulation.plan()
    simulation.answer()
    if end == "abort":
        assert tables_of(simulation) == {0: [0, 1], 1: [0, 1]}
        simulation.abort(1, 0)
    # Its slot is taken again in the same plan, with another table.
    simulation.add(add_message(2, [30, 31, 32], max_tokens=3))
    plan = simulation.plan()
    assert [join.slot for join in plan.joins] == [1]
    assert new_blocks_of(plan) == [(0, 2, 3)]
    simulation.run()
    simulation.check_outputs()
    assert simulation.scheduler.num_free_blocks == 32


def test_a_failed_step_merges_nothing():
    simulation = simulate(block_size=4, max_in_flight=1)
    for request_id in range(2):
        simulation.add(add_message(request_id, PROMPT[:8], max_tokens=8))
    simulation.plan(failing={1: ErrorCode.NUMERIC})
    simulation.run()
    assert simulation.rank.num_replaced == 0
    assert simulation.received(1).reason == ErrorCode.NUMERIC
    simulation.check_outputs()


def test_tenants_keep_their_copies():
    simulation = simulate(block_size=4)
    for request_id in range(2):
        message = add_message(request_id, PROMPT[:8], cache_domain=b"%d" % request_id)
        simulation.add(message)
    simulation.run()
    assert simulation.rank.num_replaced == 0
    simulation.check_outputs()


def test_a_plan_replaces_no_more_than_its_frame_can_hold(monkeypatch):
    monkeypatch.setattr(running, "MAX_REPLACED", 3)
    simulation = simulate(block_size=4, max_in_flight=1)
    for request_id in range(2):
        simulation.add(add_message(request_id, PROMPT, max_tokens=8))
    simulation.plan()
    simulation.answer()
    assert new_blocks_of(simulation.plan())[:3] == [(1, 0, 0), (1, 1, 1), (1, 2, 2)]
    assert simulation.rank.num_replaced == 3
    simulation.scheduler.check_invariants()
    simulation.run()
    simulation.check_outputs()


@pytest.mark.slow
@pytest.mark.parametrize("policy", [ThroughputPolicy(budget=24), LatencyPolicy(budget=10)])
def test_of_equal_prompts_that_arrive_together_each_content_is_held_once(policy):
    rng = random.Random(1)
    num_replaced = 0
    for _ in range(40):
        block_size = rng.choice([1, 2, 4])
        simulation = simulate(
            num_blocks=rng.randint(24, 60) // block_size + 2,
            block_size=block_size,
            slots=6,
            policy=policy,
            max_in_flight=rng.choice([1, 2]),
        )
        for request_id in range(24):
            start = rng.randrange(2)
            prompt = PROMPT[start : start + rng.choice([5, 8, 13, 18])]
            max_tokens = rng.choice([1, 2, 6, 12])
            simulation.add(
                add_message(request_id, prompt, max_tokens=max_tokens, seed=rng.randrange(3))
            )
            for _ in range(rng.choice([0, 0, 0, 4])):
                failing = {rng.randrange(4): ErrorCode.NUMERIC} if rng.random() < 0.05 else None
                simulation.plan(failing)
                simulation.scheduler.check_invariants()
                if rng.random() < 0.7:
                    simulation.answer()
                    simulation.scheduler.check_invariants()
            if rng.random() < 0.1:
                simulation.abort(rng.randrange(request_id + 1), 0)
        simulation.run()
        simulation.check_outputs()
        simulation.scheduler.check_invariants()
        assert simulation.scheduler.num_free_blocks == simulation.facts.num_blocks
        num_replaced += simulation.rank.num_replaced
    assert num_replaced > 100
