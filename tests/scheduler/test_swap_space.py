"""Preempted sequences whose blocks wait on the host (docs/scheduling.md, "Who gives way").

The simulated rank moves what plans say, so a block that moves at the wrong time changes an output.
"""

import pytest

from protocol.columns import unpack_rows
from protocol.errors import ErrorCode
from protocol.messages import FinishReason
from scheduler import step_cost
from scheduler.policy import ThroughputPolicy
from scheduler.step_cost import StepCost
from scheduler.swap_space import SwapSpace
from tests.scheduler.simulation import add_message, simulate

A_STEP_S = 0.001


@pytest.fixture(autouse=True)
def _costs_are_known_at_once(monkeypatch):
    monkeypatch.setattr(step_cost, "ENOUGH", 1)


def crowded(**sizes):
    """Two sequences that need 5 blocks each, where there are 7."""
    sizes = {"num_blocks": 7, "host_blocks": 8, "prefix_key": None} | sizes
    simulation = simulate(block_size=4, slots=2, policy=ThroughputPolicy(64), **sizes)
    for request_id in range(2):
        prompt = [(7 * request_id + i) % 37 for i in range(6)]
        simulation.add(add_message(request_id, prompt, max_tokens=14, seed=request_id))
    return simulation


def never(_plan):
    return False


def run(simulation, *, until=never, seconds=A_STEP_S):
    """Plan and answer to the end, or up to the first plan that is wanted, which is returned."""
    while True:
        plan = simulation.plan()
        if plan is not None and until(plan):
            return plan
        if plan is None and not simulation.answer(seconds):
            return None


def moves_out(plan):
    return unpack_rows(plan.swap_outs, 2)


def moves_in(plan):
    return unpack_rows(plan.swap_ins, 2)


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_preempted_sequence_goes_on_with_the_blocks_it_had(max_in_flight):
    simulation = crowded(max_in_flight=max_in_flight)
    out = run(simulation, until=moves_out)
    (victim,) = (each for each in simulation.scheduler._queue.sequences())
    # Of its newest token there are no keys and values; of those under way nothing is known.
    computed = len(victim.tokens) - 1
    assert victim.num_swapped == computed
    assert len(moves_out(out)) == -(-computed // 4)
    assert victim.host_blocks == [host_block for _, host_block in moves_out(out)]
    simulation.scheduler.check_invariants()

    back = run(simulation, until=moves_in)
    assert [host_block for host_block, _ in moves_in(back)] == [b for _, b in moves_out(out)]
    assert unpack_rows(back.chunks, 4) == [(victim.slot, computed, 1, 1)]
    assert [block for _, block in moves_in(back)] == victim.block_table[: len(moves_in(back))]
    run(simulation)
    simulation.check_outputs()
    assert simulation.scheduler.counters.swapped_out == len(moves_out(out))
    assert simulation.scheduler.counters.swapped_in == len(moves_out(out))
    assert simulation.scheduler.swap_space.num_free == 8


def test_nothing_moves_before_it_is_known_to_be_cheaper():
    simulation = crowded()
    assert run(simulation, until=moves_out, seconds=0.0) is None
    assert simulation.scheduler.counters.preemptions > 0
    simulation.check_outputs()


def test_nothing_moves_where_there_is_no_room():
    simulation = crowded(host_blocks=1)
    assert run(simulation, until=moves_out) is None
    assert simulation.scheduler.counters.preemptions > 0
    simulation.check_outputs()


def test_what_ends_on_the_host_gives_its_blocks_back():
    simulation = crowded()
    run(simulation, until=moves_out)
    (victim,) = simulation.scheduler._queue.sequences()
    simulation.abort(victim.key.request_id, 0)
    assert simulation.scheduler.swap_space.num_free == 8
    run(simulation)
    simulation.check_outputs()
    simulation.scheduler.check_invariants()


def test_a_step_out_of_memory_fails_its_rows_and_not_who_left_for_the_host():
    step_id = run(crowded(max_in_flight=1), until=moves_out).step_id
    simulation = crowded(max_in_flight=1)
    run(simulation, until=lambda plan: plan.step_id == step_id - 1)
    simulation.answer(A_STEP_S)
    assert moves_out(simulation.plan({0: ErrorCode.OUT_OF_MEMORY}))
    run(simulation)
    reasons = [simulation.received(request_id).reason for request_id in range(2)]
    assert reasons == [ErrorCode.OUT_OF_MEMORY, FinishReason.LENGTH]
    assert simulation.scheduler.counters.swapped_in > 0
    simulation.check_outputs()


def test_blocks_that_the_prefix_index_still_has_are_not_moved_back():
    simulation = crowded(prefix_key=b"key", num_blocks=8)
    out = run(simulation, until=moves_out)
    back = run(simulation, until=moves_in)
    assert 0 < len(moves_in(back)) < len(moves_out(out))
    run(simulation)
    simulation.check_outputs()
    assert simulation.scheduler.swap_space.num_free == 8


def test_what_is_moved_back_was_not_found_in_the_cache():
    simulation = crowded(prefix_key=b"key", num_blocks=8)
    run(simulation, until=moves_out)
    (victim,) = simulation.scheduler._queue.sequences()
    num_tokens = len(victim.tokens)
    back = run(simulation, until=moves_in)
    stats = simulation.scheduler.cache_stats()
    num_found = -(-num_tokens // 4) - len(moves_in(back))
    assert num_found > 0
    assert (stats.lookup_tokens, stats.cached_tokens) == (12, 0)
    assert (stats.resumed_lookup_tokens, stats.resumed_cached_tokens) == (num_tokens, 4 * num_found)
    assert (stats.shared_blocks, stats.revived_blocks) == (0, num_found)


@pytest.mark.parametrize("is_out_first", [True, False])
def test_what_was_computed_before_a_reset_is_not_found_when_it_is_back(is_out_first):
    simulation = crowded(prefix_key=b"key")
    if not is_out_first:
        run(simulation, until=lambda plan: plan.step_id == 2)
        simulation.reset_prefix_cache()
    run(simulation, until=moves_out)
    (victim,) = simulation.scheduler._queue.sequences()
    if is_out_first:
        simulation.reset_prefix_cache()
    run(simulation, until=moves_in)
    assert victim.rests_on < victim.admission
    run(simulation)
    simulation.check_outputs()
    # Both were running at the reset, or had their blocks from before it.
    assert simulation.scheduler.cache_stats().indexed_blocks == 0


def test_what_may_be_anothers_is_not_moved():
    step_id = run(crowded(), until=moves_out).step_id
    simulation = crowded()
    run(simulation, until=lambda plan: plan.step_id == step_id - 1)
    simulation.is_corrupted = True
    manager = simulation.scheduler.block_manager
    for sequence in simulation.scheduler.running_sequences():
        manager.uses[sequence.block_table[0]] += 1  # as if it had been given to another
    assert run(simulation, until=moves_out) is None
    reasons = {simulation.received(request_id).reason for request_id in range(2)}
    assert reasons == {ErrorCode.INTERNAL}
    assert simulation.scheduler.swap_space.num_free == 8
    simulation.check()
    simulation.scheduler.check_invariants()


COST = StepCost(step_s=1.0, token_s=0.001, read_s=0.0, pair_s=0.0)


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "cost", "pays"),
    [
        (40, 10, COST, False),  # 20 moves of 2 ms are the 40 ms of its tokens
        (41, 10, COST, True),
        (41, 11, COST, False),  # no room
        (41, 10, None, False),
        (0, 0, COST, False),
    ],
)
def test_moving_pays_where_it_is_cheaper_than_computing(num_tokens, num_blocks, cost, pays):
    assert SwapSpace(10, 0.002).pays(num_tokens, num_blocks, cost) is pays


def test_host_blocks_are_free_or_held_once():
    space = SwapSpace(3, 0.0)
    held = space.move_out([7, 5])
    assert space.take_outs() == list(zip([7, 5], held, strict=True))
    assert space.take_outs() == []
    assert space.audit([held]) == []
    assert space.audit([]) == ["of 3 host blocks 1 are free or held, or not once"]
    space.give_back(held)
    assert (space.num_free, space.audit([])) == (3, [])
