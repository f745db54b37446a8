import msgspec
import pytest

from protocol.columns import unpack_int32, unpack_rows
from protocol.connection import Outgoing
from protocol.messages import (
    MAX_FRAME_BYTES,
    MAX_MODEL_LEN,
    MAX_STOP_TOKEN_IDS,
    Join,
    SamplingParams,
    StepPlan,
)
from scheduler import planned_step, planner, running
from scheduler.policy import UNMEASURED_TOKENS, LatencyPolicy, ThroughputPolicy
from scheduler.step_cost import ENOUGH, StepCost, StepWork, chunk_pairs
from tests.scheduler.simulation import add_message, simulate


def prompt(request_id, num_tokens):
    return [(request_id * 13 + i) % 40 for i in range(num_tokens)]


def chunks_of(plan):
    return unpack_rows(plan.chunks, 4)


def test_decode_rows_take_their_part_of_the_budget_first():
    simulation = simulate(policy=ThroughputPolicy(budget=5), max_in_flight=1)
    for request_id in range(2):
        simulation.add(add_message(request_id, prompt(request_id, 2)))
    simulation.plan()
    simulation.answer()
    simulation.add(add_message(2, prompt(2, 9)))
    plan = simulation.plan()
    assert (unpack_int32(plan.decode), chunks_of(plan)) == ([0, 1], [(2, 0, 3, 0)])


def test_two_shares_of_one_sequence_are_one_chunk():
    simulation = simulate(policy=LatencyPolicy(budget=8), max_in_flight=1)
    simulation.add(add_message(0, prompt(0, 20)))
    assert chunks_of(simulation.plan()) == [(0, 0, 8, 0)]


def test_the_second_share_goes_to_the_shortest_that_waits():
    simulation = simulate(policy=LatencyPolicy(budget=8), max_in_flight=1)
    for request_id, num_tokens in enumerate([20, 15, 3]):
        simulation.add(add_message(request_id, prompt(request_id, num_tokens)))
    # Four for the oldest, three for the shortest, and the one that is left for the next shortest.
    assert chunks_of(simulation.plan()) == [(0, 0, 4, 0), (1, 0, 3, 1), (2, 0, 1, 0)]


def test_what_is_admitted_goes_before_what_came_later():
    simulation = simulate(policy=ThroughputPolicy(budget=6), max_in_flight=1)
    simulation.add(add_message(0, prompt(0, 9)))
    simulation.plan()
    simulation.answer()
    simulation.add(add_message(1, prompt(1, 4)))
    assert chunks_of(simulation.plan()) == [(0, 6, 3, 1), (1, 0, 3, 0)]


def test_a_higher_priority_goes_before_what_is_admitted():
    simulation = simulate(policy=ThroughputPolicy(budget=6), max_in_flight=1)
    simulation.add(add_message(0, prompt(0, 12)))
    simulation.plan()
    simulation.answer()
    simulation.add(add_message(1, prompt(1, 4), priority=1))
    assert chunks_of(simulation.plan()) == [(1, 0, 4, 1), (0, 6, 2, 0)]


def test_nobody_overtakes_a_sequence_that_waits_for_blocks():
    simulation = simulate(num_blocks=8, block_size=4, max_in_flight=1)
    simulation.add(add_message(0, prompt(0, 12), max_tokens=4))
    simulation.plan()
    simulation.answer()
    simulation.add(add_message(1, prompt(1, 24), max_tokens=1))
    simulation.add(add_message(2, prompt(2, 1), max_tokens=1))
    assert simulation.plan().joins == []
    simulation.run()
    assert [unpack_int32(j.token_ids)[0] for p in simulation.plans for j in p.joins] == [
        *(0, 13, 26)
    ]


def steps_to_first_token(simulation, request_id, sample=0):
    for step in range(1, 200):
        while simulation.plan():
            pass
        simulation.answer()
        if simulation.received(request_id, sample).tokens:
            return step
    raise AssertionError("no token comes")


def behind_a_long_prompt():
    """A simulation in which a prompt of 20,000 tokens has had three steps of 2,048."""
    simulation = simulate(
        policy=LatencyPolicy(),
        num_blocks=4_000,
        block_size=16,
        slots=32,
        max_model_len=30_000,
        max_waiting_tokens=10**6,
    )
    simulation.add(add_message(0, prompt(0, 20_000), max_tokens=2))
    for _ in range(3):
        simulation.plan()
        simulation.answer()
    return simulation


@pytest.mark.parametrize("priority", [0, 5])
def test_every_short_prompt_behind_a_long_one_starts_at_once(priority):
    # The long one ages by the 8th, and goes on in its half.
    simulation = behind_a_long_prompt()
    for request_id in range(1, 17):
        simulation.add(add_message(request_id, [request_id] * 20, max_tokens=2, priority=priority))
    assert steps_to_first_token(simulation, 16) <= 3
    assert not simulation.received(0).tokens


def test_who_waits_for_anothers_prefix_keeps_nobody_out():
    simulation = behind_a_long_prompt()
    simulation.add(add_message(1, prompt(0, 20_000), max_tokens=2, seed=1, priority=1))
    simulation.add(add_message(2, [7] * 20, max_tokens=2, priority=1))
    assert steps_to_first_token(simulation, 2) <= 3
    simulation.run()
    simulation.check_outputs()


def test_samples_of_many_prompts_start_side_by_side():
    simulation = simulate(
        policy=ThroughputPolicy(),
        num_blocks=8_000,
        block_size=16,
        slots=128,
        max_model_len=1_000,
        max_waiting_requests=1_000,
        max_waiting_tokens=10**6,
    )
    for request_id in range(32):
        for sample in range(4):
            ids = [request_id, *prompt(request_id, 511)]
            simulation.add(add_message(request_id, ids, sample=sample, seed=sample, max_tokens=8))
    assert max(steps_to_first_token(simulation, request_id, 3) for request_id in range(32)) <= 5
    # Each prompt is computed once, and of each further sample one token.
    assert simulation.scheduler.counters.prefill_tokens == 32 * (512 + 3)
    simulation.run()
    simulation.check_outputs()


def test_who_was_too_big_is_looked_at_again_when_others_have_computed_what_it_shares():
    simulation = simulate(
        policy=LatencyPolicy(), num_blocks=24, block_size=16, max_model_len=384, slots=8
    )
    for sample in range(2):
        message = add_message(1, prompt(0, 200), sample=sample, seed=sample, max_tokens=70)
        simulation.add(message)
    simulation.add(add_message(2, [3] * 20, max_tokens=4))
    assert steps_to_first_token(simulation, 1, 1) == 3
    assert simulation.received(2).tokens
    simulation.run()
    simulation.check_outputs()


COST = StepCost(step_s=0.002, token_s=0.001, read_s=0.0, pair_s=0.0)


def answer_in_time(simulation, plan):
    """Commit the only plan under way, after as long as it costs."""
    # The first plan has no decode row, every later one has one.
    num_tokens = (plan.step_id > 1) + sum(count for _, _, count, _ in chunks_of(plan))
    simulation.answer(seconds=COST.seconds(StepWork(num_tokens, 0, 0)))


def learned(target_s):
    """A simulation that knows its cost, with one sequence decoding and nothing else."""
    policy = LatencyPolicy(budget=1_000, itl_target_s=target_s)
    simulation = simulate(
        policy=policy,
        max_in_flight=1,
        num_blocks=3_000,
        max_model_len=8_000,
        prefix_key=None,
        max_waiting_tokens=100_000,
    )
    simulation.add(add_message(0, [1, 2], max_tokens=5_000))
    for request_id in range(1, ENOUGH + 8):
        simulation.add(add_message(request_id, prompt(request_id, 3 * request_id), max_tokens=1))
        answer_in_time(simulation, simulation.plan())
    while chunks_of(plan := simulation.plan()):
        answer_in_time(simulation, plan)
    answer_in_time(simulation, plan)
    return simulation


def test_a_target_bounds_the_prompt_tokens_of_a_step_by_what_steps_cost():
    simulation = learned(0.0505)
    simulation.add(add_message(100, prompt(0, 3_000)))
    plan = simulation.plan()
    # Of 50.5 ms the step takes 2 and the decode row 1.
    assert chunks_of(plan) == [(1, 0, 47, 0)]


def test_prompts_get_a_tenth_of_the_target_at_least():
    simulation = learned(0.0025)
    simulation.add(add_message(100, prompt(0, 3_000)))
    # The decode row's step takes more than all of the 2.5 ms. A token is more than the tenth is,
    # but a chunk has one at least.
    assert chunks_of(simulation.plan()) == [(1, 0, 1, 0)]


def test_a_target_does_not_count_where_nothing_decodes():
    simulation = learned(0.05)
    simulation.abort(0, 0)
    simulation.add(add_message(100, prompt(0, 3_000)))
    assert chunks_of(simulation.plan()) == [(0, 0, 1_000, 0)]


def test_before_a_cost_is_known_a_target_means_small_chunks():
    policy = LatencyPolicy(budget=1_000, itl_target_s=0.05)
    simulation = simulate(
        policy=policy,
        max_in_flight=1,
        num_blocks=1_000,
        max_model_len=3_600,
        prefix_key=None,
        max_waiting_tokens=100_000,
    )
    simulation.add(add_message(0, [1, 2], max_tokens=50))
    simulation.plan()
    simulation.answer()
    simulation.add(add_message(1, prompt(0, 3_000)))
    assert chunks_of(simulation.plan()) == [(1, 0, UNMEASURED_TOKENS, 0)]


def test_steps_grow_to_twice_the_pairs_whose_cost_is_known():
    simulation = learned(10.0)
    simulation.add(add_message(100, prompt(0, 3_000)))
    steps = []
    for _ in range(4):
        plan = simulation.plan()
        steps.append(chunks_of(plan)[0][1:3])
        answer_in_time(simulation, plan)
    assert steps == [(0, 103), (103, 75), (178, 93), (271, 125)]
    pairs = [chunk_pairs(start, count) for start, count in steps]
    one_more = [chunk_pairs(start, count + 1) for start, count in steps]
    for known, taken, too_many in zip(pairs[:-1], pairs[1:], one_more[1:], strict=True):
        assert taken <= 2 * known < too_many


def test_a_plan_takes_no_more_joins_than_its_frame_can_hold(monkeypatch):
    monkeypatch.setattr(planner, "MAX_JOIN_BYTES", 1024)
    simulation = simulate(max_in_flight=1)
    for request_id in range(4):
        simulation.add(add_message(request_id, prompt(request_id, 6), max_tokens=3))
    assert [len(simulation.plan().joins), simulation.answer()] == [2, True]
    assert len(simulation.plan().joins) == 2


def test_the_largest_plan_fits_its_frame():
    """All but the last join just below the limit, the last as long as a sequence can be."""

    def join(num_tokens, num_blocks):
        params = SamplingParams(
            seed=2**62, max_tokens=MAX_MODEL_LEN, stop_token_ids=[2**31 - 1] * MAX_STOP_TOKEN_IDS
        )
        return Join(
            slot=65_535,
            generation=2**31 - 1,
            token_ids=bytes(4 * num_tokens),
            prompt_len=num_tokens,
            params=params,
            block_table=bytes(4 * num_blocks),
        )

    shortest = planner.MAX_JOIN_BYTES // (planned_step.JOIN_BYTES + 8)
    plan = StepPlan(
        step_id=2**40,
        leaves=bytes(4 * 65_536),
        joins=[join(1, 1)] * shortest + [join(MAX_MODEL_LEN, MAX_MODEL_LEN)],
        copies=bytes(8 * shortest),
        new_blocks=bytes(12 * (65_536 + running.MAX_REPLACED)),
        decode=bytes(4 * 65_536),
        chunks=bytes(16 * 65_536),
        groups=bytes(12 * 65_536),
    )
    assert len(Outgoing(1).frame(plan)) < MAX_FRAME_BYTES


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_step_ids_count_by_one_from_one(max_in_flight):
    simulation = simulate(max_in_flight=max_in_flight)
    for request_id in range(3):
        simulation.add(add_message(request_id, prompt(request_id, 5)))
        simulation.run()
    assert [plan.step_id for plan in simulation.plans] == list(range(1, len(simulation.plans) + 1))
    assert simulation.scheduler.last_step_id == len(simulation.plans)


def test_a_step_scores_as_many_prompt_tokens_as_its_result_can_hold(monkeypatch):
    monkeypatch.setattr(planner, "MAX_SCORED_TOKENS", 10)
    simulation = simulate(max_in_flight=1)
    for request_id, scores in enumerate((0, None, 0)):
        message = add_message(request_id, prompt(request_id, 16), max_tokens=1)
        params = msgspec.structs.replace(message.params, prompt_logprobs=scores)
        simulation.add(msgspec.structs.replace(message, params=params))
    # The others do not wait for it; a join has a token at least.
    plan = simulation.plan()
    assert chunks_of(plan) == [(0, 0, 10, 0), (1, 0, 16, 1), (2, 0, 1, 0)]
    assert [join.params.prompt_logprobs for join in plan.joins] == [0, None, 0]
