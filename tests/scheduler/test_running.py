import pytest

from protocol.columns import unpack_int32
from protocol.messages import FinishReason
from scheduler.policy import PROGRESS_TOKENS, ThroughputPolicy
from tests.scheduler.simulation import add_message, simulate


def prompt(request_id, num_tokens):
    return [(request_id * 13 + i) % 40 for i in range(num_tokens)]


def joins_by_plan(simulation):
    return [[unpack_int32(join.token_ids)[0] for join in plan.joins] for plan in simulation.plans]


def test_an_admission_leaves_a_block_for_each_running_sequence():
    # Eight blocks: the first takes three, the second three; one must stay free for the first.
    simulation = simulate(num_blocks=7, block_size=4, max_in_flight=1)
    simulation.add(add_message(0, prompt(0, 12), max_tokens=4))
    simulation.add(add_message(1, prompt(1, 12), max_tokens=4))
    simulation.plan()
    assert simulation.scheduler.num_running == 2
    tight = simulate(num_blocks=6, block_size=4, max_in_flight=1)
    tight.add(add_message(0, prompt(0, 12), max_tokens=4))
    tight.add(add_message(1, prompt(1, 12), max_tokens=4))
    tight.plan()
    assert tight.scheduler.num_running == 1
    tight.run()
    tight.check_outputs()


def test_after_a_preemption_an_admission_leaves_twice_as_much():
    simulation = simulate(num_blocks=8, block_size=2, slots=3, prefix_key=None, max_in_flight=1)
    for request_id in range(2):
        simulation.add(add_message(request_id, prompt(request_id, 4), max_tokens=12))
    while not simulation.scheduler.counters.preemptions:
        simulation.plan()
        simulation.answer()
    # The one that runs holds some blocks and shall keep two free; this one would fit otherwise.
    free = simulation.scheduler.num_free_blocks
    assert simulation.scheduler.num_running == 1
    simulation.abort(1, 0)
    simulation.add(add_message(2, prompt(2, 2 * (free - 1)), max_tokens=1))
    simulation.plan()
    assert simulation.scheduler.num_running == 1
    simulation.run()
    simulation.check_outputs()


def test_the_end_of_a_running_sequence_ends_the_caution():
    simulation = simulate(num_blocks=8, block_size=2, slots=3, prefix_key=None, max_in_flight=1)
    for request_id in range(2):
        simulation.add(add_message(request_id, prompt(request_id, 4), max_tokens=12))
    while not simulation.scheduler.counters.preemptions:
        simulation.plan()
        simulation.answer()
    simulation.abort(0, 0)
    simulation.plan()
    assert simulation.scheduler.num_running == 1
    simulation.run()
    assert simulation.received(1).reason == FinishReason.LENGTH


def test_the_newest_gives_way_and_the_oldest_never():
    simulation = simulate(num_blocks=8, block_size=2, slots=4, max_in_flight=2)
    for request_id in range(3):
        simulation.add(add_message(request_id, prompt(request_id, 3), max_tokens=10))
    simulation.run()
    assert simulation.scheduler.counters.preemptions > 0
    firsts = [first for joins in joins_by_plan(simulation) for first in joins]
    assert firsts.count(0) == 1
    simulation.check_outputs()


def test_a_higher_priority_is_not_preempted_for_a_lower_one():
    simulation = simulate(num_blocks=8, block_size=2, slots=4, max_in_flight=2)
    for request_id, priority in enumerate([0, 0, 1]):
        simulation.add(
            add_message(request_id, prompt(request_id, 3), max_tokens=10, priority=priority)
        )
    simulation.run()
    assert simulation.scheduler.counters.preemptions > 0
    firsts = [first for joins in joins_by_plan(simulation) for first in joins]
    assert firsts.count(26) == 1
    simulation.check_outputs()


def test_the_blocks_of_a_preempted_sequence_are_found_again_if_nobody_needed_them():
    simulation = simulate(num_blocks=10, block_size=2, slots=2, max_in_flight=1)
    for request_id in range(2):
        simulation.add(add_message(request_id, prompt(request_id, 6), max_tokens=8))
    simulation.run()
    assert simulation.scheduler.counters.preemptions == 1
    assert simulation.scheduler.counters.resumed_cached_tokens > 0
    simulation.check_outputs()


def test_a_drained_sequence_lends_its_blocks_instead_of_another_being_preempted():
    simulation = simulate(num_blocks=8, block_size=2, slots=2, max_in_flight=2)
    simulation.add(add_message(0, prompt(0, 2), max_tokens=7))
    simulation.add(add_message(1, prompt(1, 5), max_tokens=5))
    lenders = set()
    while simulation.scheduler.num_live:
        while simulation.plan() is not None:
            running = simulation.scheduler.running_sequences()
            lenders |= {each.key.request_id for each in running if not each.block_table}
        simulation.answer()
    assert lenders == {1}
    assert simulation.scheduler.counters.preemptions == 0
    # What it had computed until then is in the cache as far as nobody needed the blocks.
    longer = prompt(1, 5) + simulation.received(1).tokens + [1]
    simulation.add(add_message(2, longer, max_tokens=1))
    simulation.run()
    assert simulation.received(2).cached_tokens == 8
    simulation.check_outputs()


def test_a_resumed_sequence_is_protected_until_it_has_progressed():
    simulation = simulate(num_blocks=6, block_size=2, slots=2, prefix_key=None)
    simulation.add(add_message(0, [1, 2], max_tokens=8))
    simulation.add(add_message(1, [3, 4], max_tokens=8))
    simulation.plan()
    while not simulation.scheduler.waiting_requests:
        simulation.answer()
        simulation.plan()
    known = simulation.scheduler.waiting_tokens
    while simulation.scheduler.waiting_requests:
        simulation.answer()
        simulation.plan()
    (resumed,) = (
        each for each in simulation.scheduler.running_sequences() if each.key.request_id == 1
    )
    assert resumed.protected_until == known + PROGRESS_TOKENS


@pytest.mark.parametrize("prefix_key", [None, b"key"])
def test_a_sequence_that_does_not_fit_now_is_looked_up_again_when_blocks_come_back(prefix_key):
    simulation = simulate(num_blocks=8, block_size=4, max_in_flight=1, prefix_key=prefix_key)
    simulation.add(add_message(0, prompt(0, 20), max_tokens=6))
    simulation.add(add_message(1, prompt(1, 16), max_tokens=2))
    simulation.run()
    assert joins_by_plan(simulation)[0] == [0]
    simulation.check_outputs()


# Samples of one prompt


def long_prompt(num_tokens, variant):
    return [(i * i + variant * (i + 1)) % 40 for i in range(num_tokens)]


def roomy(max_in_flight=1, prefix_key=b"key"):
    return simulate(
        num_blocks=500,
        block_size=16,
        max_model_len=4000,
        max_in_flight=max_in_flight,
        policy=ThroughputPolicy(budget=4000),
        prefix_key=prefix_key,
        max_waiting_tokens=10_000,
    )


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("prefix_key", [None, b"key"])
def test_the_samples_of_a_prompt_compute_it_once(max_in_flight, prefix_key):
    simulation = roomy(max_in_flight, prefix_key)
    for sample in range(4):
        message = add_message(0, long_prompt(500, 1), sample=sample, seed=sample, max_tokens=3)
        simulation.add(message)
    simulation.run()
    cached = [simulation.received(0, sample).cached_tokens for sample in range(4)]
    assert cached == [0, 499, 499, 499]
    assert simulation.scheduler.counters.prefill_tokens == 500 + 3
    assert simulation.scheduler.counters.cached_tokens == 3 * 499
    simulation.check_outputs()


@pytest.mark.parametrize(
    ("shared", "own", "waits"),
    [
        (256, 200, True),
        (240, 200, False),  # saves too little
        (512, 400, True),
        (512, 600, False),  # has more than that to do itself
    ],
)
def test_a_prompt_waits_for_another_where_that_saves_enough(shared, own, waits):
    simulation = roomy()
    common = long_prompt(shared, 1)
    simulation.add(add_message(0, common + long_prompt(10, 2)))
    simulation.add(add_message(1, common + long_prompt(own, 3)))
    assert len(simulation.plan().joins) == (1 if waits else 2)
    simulation.run()
    assert simulation.received(1).cached_tokens == (shared if waits else 0)
    simulation.check_outputs()


@pytest.mark.parametrize(("num_tokens", "waits"), [(257, True), (256, False)])
def test_a_sample_waits_for_another_where_that_saves_enough(num_tokens, waits):
    simulation = roomy()
    for sample in range(2):
        simulation.add(add_message(0, long_prompt(num_tokens, 1), sample=sample))
    assert len(simulation.plan().joins) == (1 if waits else 2)
    simulation.run()
    assert simulation.received(0, 1).cached_tokens == (256 if waits else 0)
    simulation.check_outputs()


def test_nobody_waits_for_a_sequence_that_is_gone():
    simulation = roomy(max_in_flight=2)
    for sample in range(2):
        simulation.add(add_message(0, long_prompt(500, 1), sample=sample, max_tokens=3))
    assert len(simulation.plan().joins) == 1
    simulation.abort(0, 0)
    assert len(simulation.plan().joins) == 1
    simulation.run()
    simulation.check_outputs()


def test_without_a_prefix_cache_there_is_nothing_to_wait_for():
    simulation = roomy(prefix_key=None)
    for request_id in range(2):
        simulation.add(add_message(request_id, long_prompt(500, 1), max_tokens=3))
    assert len(simulation.plan().joins) == 2
