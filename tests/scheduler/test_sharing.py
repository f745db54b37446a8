"""What sequences share, rule by rule (docs/scheduling.md, "Sharing blocks").

The simulated rank refuses a block that replaces one of another content or one that is still
written, and its table must be the scheduler's after every plan.
"""

import random

import pytest

from protocol.columns import unpack_int32, unpack_rows
from protocol.errors import ErrorCode
from scheduler import prefix_groups, running
from scheduler.policy import LatencyPolicy, ThroughputPolicy
from tests.scheduler.simulation import add_message, expected_output, simulate

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


# Samples of one prompt


def copies_of(plan):
    return unpack_rows(plan.copies, 2)


def chunks_of(plan):
    return unpack_rows(plan.chunks, 4)


def first_sample_decodes(num_tokens=10, **settings):
    """A simulation in which sample 0 has computed its prompt and decodes."""
    simulation = simulate(**{"block_size": 4, "max_in_flight": 1} | settings)
    simulation.add(add_message(0, PROMPT[:num_tokens], max_tokens=20))
    simulation.plan()
    simulation.answer()
    return simulation


def add_sample(simulation, sample, num_tokens=10, **changes):
    settings = {"sample": sample, "seed": sample, "max_tokens": 20} | changes
    simulation.add(add_message(0, PROMPT[:num_tokens], **settings))


@pytest.mark.parametrize("prefix_key", [None, b"key"])
@pytest.mark.parametrize(
    ("num_tokens", "num_shared", "copies"),
    [
        (1, 0, []),  # nothing to take over
        (4, 0, [(0, 2)]),  # three tokens of the first block
        (5, 1, []),  # the first block, as it is
        (10, 2, [(2, 3)]),
        (12, 2, [(2, 4)]),  # the third is full, but one token is always computed
    ],
)
def test_a_sample_shares_full_blocks_and_copies_the_last(
    num_tokens, num_shared, copies, prefix_key
):
    simulation = first_sample_decodes(num_tokens, prefix_key=prefix_key)
    simulation.plan()  # of twelve tokens, the next has a block of its own by now
    simulation.answer()
    add_sample(simulation, 1, num_tokens)
    plan = simulation.plan()
    assert (copies_of(plan), chunks_of(plan)) == (copies, [(1, num_tokens - 1, 1, 1)])
    first, second = simulation.scheduler.running_sequences()
    assert second.block_table[:num_shared] == first.block_table[:num_shared]
    assert not set(second.block_table[num_shared:]) & set(first.block_table)
    simulation.scheduler.check_invariants()
    simulation.run()
    assert simulation.received(0, 1).cached_tokens == num_tokens - 1
    simulation.check_outputs()
    simulation.scheduler.check_invariants()
    assert simulation.scheduler.num_free_blocks == 32


def test_nothing_is_copied_before_its_step_is_committed():
    simulation = simulate(block_size=4, max_in_flight=2)
    for sample in range(2):
        add_sample(simulation, sample)
        plan = simulation.plan()
        assert (copies_of(plan), chunks_of(plan)) == ([], [(sample, 0, 10, 1)])
    simulation.answer()
    add_sample(simulation, 2)
    assert copies_of(simulation.plan()) == [(2, 6)]
    simulation.run()
    simulation.check_outputs()


def test_a_copy_is_copied_only_once_its_own_step_is_committed():
    simulation = first_sample_decodes(max_in_flight=2)
    add_sample(simulation, 1)
    plan = simulation.plan(failing=dict.fromkeys(range(2), ErrorCode.OUT_OF_MEMORY))
    assert copies_of(plan) == [(2, 3)]
    # Sample 0 is gone. Sample 1 holds what a step out of memory has left.
    simulation.abort(0, 0)
    add_sample(simulation, 2)
    plan = simulation.plan()
    assert (copies_of(plan), chunks_of(plan)) == ([], [(0, 8, 2, 1)])
    simulation.run()
    assert simulation.received(0, 1).reason == ErrorCode.OUT_OF_MEMORY
    assert len(simulation.received(0, 2).tokens) == 20
    simulation.check_outputs()


def test_a_copy_of_a_copy_serves_when_the_first_is_gone():
    simulation = first_sample_decodes()
    add_sample(simulation, 1)
    simulation.plan()
    simulation.answer()
    simulation.abort(0, 0)
    add_sample(simulation, 2)
    plan = simulation.plan()
    # The first one's last block is free, and given out at once.
    assert copies_of(plan) == [(3, 2)]
    simulation.run()
    simulation.check_outputs()


def test_the_source_may_leave_and_its_block_be_given_out_in_the_plan_after():
    simulation = first_sample_decodes(max_in_flight=2)
    add_sample(simulation, 1)
    assert copies_of(simulation.plan()) == [(2, 3)]
    simulation.abort(0, 0)
    simulation.add(add_message(1, [30, 31], max_tokens=3))
    plan = simulation.plan()
    assert unpack_int32(plan.joins[0].block_table) == [2]
    simulation.run()
    simulation.check_outputs()


def test_nothing_is_copied_from_a_sample_that_has_given_its_blocks_up():
    simulation = simulate(num_blocks=12, block_size=2, slots=3, max_in_flight=2, prefix_key=None)
    simulation.add(add_message(1, [20, 21], max_tokens=12))
    add_sample(simulation, 0, num_tokens=9, max_tokens=7)
    simulation.plan()
    for _ in range(6):
        simulation.plan()
        simulation.answer()
    # The next plan lends the sample's blocks to the other, and has room for another sample.
    assert len(tables_of(simulation)[0]) == 8
    add_sample(simulation, 1, num_tokens=9, max_tokens=1)
    plan = simulation.plan()
    assert simulation.scheduler.num_running == 3
    assert (copies_of(plan), chunks_of(plan)) == ([], [(2, 0, 9, 1)])
    simulation.run()
    simulation.check_outputs()


@pytest.mark.parametrize(
    "changes",
    [
        {"cache_domain": b"tenant"},
        {"prompt": [30, *PROMPT[1:10]]},
        {"prompt": [*PROMPT[:8], 31, PROMPT[9]]},
        {"request_id": 1},
    ],
    ids=["domain", "first token", "last block", "request"],
)
def test_nothing_is_copied_for_whoever_has_not_the_same(changes):
    simulation = first_sample_decodes(prefix_key=None)
    settings = {"request_id": 0, "prompt": PROMPT[:10], "sample": 1} | changes
    simulation.add(add_message(**settings))
    plan = simulation.plan()
    assert (copies_of(plan), chunks_of(plan)) == ([], [(1, 0, 10, 1)])
    simulation.run()
    simulation.check_outputs()


def test_a_resumed_sample_takes_the_prompt_over_again():
    simulation = first_sample_decodes()
    params = add_message(0, PROMPT[:10], seed=1, max_tokens=20).params
    output, _ = expected_output(PROMPT[:10], params, 64)
    add_sample(simulation, 1, resume_ids=tuple(output[:4]), next_index=4)
    plan = simulation.plan()
    assert (copies_of(plan), chunks_of(plan)) == ([(2, 3)], [(1, 10, 4, 1)])
    simulation.run()
    assert simulation.received(0, 1).cached_tokens == 10
    simulation.check_outputs()


@pytest.mark.slow
@pytest.mark.parametrize("prefix_key", [None, b"key"])
def test_samples_under_pressure_have_the_tokens_of_requests_of_their_own(prefix_key):
    rng = random.Random(2)
    num_copies = num_preemptions = 0
    for _ in range(40):
        block_size = rng.choice([1, 3, 4, 8])
        simulation = simulate(
            num_blocks=rng.randint(30, 50) // block_size + 2,
            block_size=block_size,
            slots=5,
            policy=ThroughputPolicy(budget=rng.choice([7, 64])),
            max_in_flight=rng.choice([1, 2]),
            prefix_key=prefix_key,
        )
        for request_id in range(8):
            length = rng.randint(1, 18)
            for sample in range(rng.randint(1, 4)):
                message = add_message(
                    request_id,
                    PROMPT[request_id % 2 :][:length],
                    sample=sample,
                    seed=sample,
                    max_tokens=rng.choice([1, 5, 12]),
                )
                simulation.add(message)
                for _ in range(rng.choice([0, 2])):
                    code = rng.choice([ErrorCode.NUMERIC, ErrorCode.OUT_OF_MEMORY])
                    rows = {ErrorCode.NUMERIC: [0], ErrorCode.OUT_OF_MEMORY: range(8)}[code]
                    simulation.plan(dict.fromkeys(rows, code) if rng.random() < 0.05 else None)
                    simulation.scheduler.check_invariants()
                    if rng.random() < 0.7:
                        simulation.answer()
                        simulation.scheduler.check_invariants()
            if rng.random() < 0.2:
                simulation.abort(rng.randrange(request_id + 1), rng.randrange(-1, 3))
        simulation.run()
        simulation.check_outputs()
        simulation.scheduler.check_invariants()
        assert simulation.scheduler.num_free_blocks == simulation.facts.num_blocks
        num_copies += sum(len(plan.copies) // 8 for plan in simulation.plans)
        num_preemptions += simulation.scheduler.counters.preemptions
    assert num_copies > 80
    assert num_preemptions > 50


# Groups of decode rows


def groups_of(plan):
    return None if plan.groups is None else unpack_rows(plan.groups, 3)


@pytest.fixture
def small_groups(monkeypatch):
    """Groups from eight tokens on."""
    monkeypatch.setattr(prefix_groups, "GROUP_TOKENS", 8)


def test_decode_rows_behind_one_prompt_are_told_as_a_group_once(small_groups):
    simulation = simulate(block_size=4, max_in_flight=1, slots=6)
    simulation.add(add_message(0, PROMPT[:9], max_tokens=30))
    simulation.plan()
    simulation.answer()
    for request_id in range(1, 5):
        prompt = [*PROMPT[:8], 30 + request_id]
        simulation.add(add_message(request_id, prompt, max_tokens=3 + request_id))
    joining = simulation.plan()  # four chunks: the only decode row is the first one
    simulation.answer()
    assert groups_of(joining) is None
    told = simulation.plan()
    simulation.answer()
    assert groups_of(told) == [(slot, 0, 2) for slot in range(5)]
    groups = []
    for _ in range(6):
        groups.append(groups_of(simulation.plan()))
        simulation.answer()
    # Requests 1 and 2 have their last rows planned in the plans before.
    assert groups == [None, None, [(slot, 0, 2) for slot in (0, 2, 3, 4)], [], None, None]
    simulation.run()
    simulation.check_outputs()


def test_merged_copies_make_a_group(small_groups):
    simulation = simulate(block_size=4, max_in_flight=2, slots=4)
    for request_id in range(4):
        simulation.add(add_message(request_id, PROMPT[:9], max_tokens=12))
    simulation.plan()
    assert groups_of(simulation.plan()) is None, "all decode, each from its own copy"
    simulation.answer()
    plan = simulation.plan()
    assert len(new_blocks_of(plan)) == 6
    assert groups_of(plan) == [(slot, 0, 2) for slot in range(4)]
    simulation.answer()
    assert groups_of(simulation.plan()) is None
    simulation.run()
    simulation.check_outputs()


def test_an_aborted_or_preempted_member_is_none_in_the_next_plan(small_groups):
    simulation = simulate(block_size=4, max_in_flight=1, slots=5)
    for request_id in range(5):
        simulation.add(add_message(request_id, PROMPT[:9], max_tokens=12))
    for _ in range(2):
        plan = simulation.plan()
        simulation.answer()
    assert groups_of(plan) == [(slot, 0, 2) for slot in range(5)]
    simulation.abort(1, 0)
    assert groups_of(simulation.plan()) == [(slot, 0, 2) for slot in (0, 2, 3, 4)]
    simulation.answer()
    simulation.abort(4, 0)
    assert groups_of(simulation.plan()) == []
    simulation.run()
    simulation.check_outputs()


def test_samples_without_a_prefix_cache_are_a_group_too(small_groups):
    simulation = first_sample_decodes(prefix_key=None)
    for sample in range(1, 4):
        add_sample(simulation, sample)
    plan = simulation.plan()
    simulation.answer()
    assert groups_of(plan) is None
    assert groups_of(simulation.plan()) == [(slot, 0, 2) for slot in range(4)]
    simulation.run()
    simulation.check_outputs()
