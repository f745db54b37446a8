import pytest

from protocol.errors import ErrorCode
from protocol.messages import FinishReason
from scheduler.policy import ThroughputPolicy
from scheduler.slot_table import RECENT_TOKENS
from tests.scheduler.simulation import add_message, simulate

PROMPT = [1, 2, 3, 4, 5]


def test_a_long_output_is_whole():
    simulation = simulate(num_blocks=500, max_model_len=1000)
    for request_id in range(2):
        simulation.add(add_message(request_id, PROMPT, max_tokens=3 * RECENT_TOKENS + 5))
    simulation.run()
    assert len(simulation.received(0).tokens) == 3 * RECENT_TOKENS + 5
    assert simulation.received(1).tokens == simulation.received(0).tokens
    assert simulation.scheduler.counters.output_tokens == 2 * (3 * RECENT_TOKENS + 5)


@pytest.mark.parametrize("end", ["abort", "timeout", "failure"])
def test_a_sequence_that_ends_early_ends_after_the_tokens_it_has_shown(end):
    simulation = simulate(max_in_flight=2, num_blocks=200, max_model_len=500)
    simulation.add(add_message(0, PROMPT, max_tokens=400, deadline=10.0))
    for _ in range(RECENT_TOKENS + 7):
        simulation.plan()
        simulation.answer()
    if end == "abort":
        simulation.abort(0, 0)
    elif end == "timeout":
        simulation.deliver(simulation.scheduler.expire(10.0))
    else:
        simulation.plan(failing={0: ErrorCode.NUMERIC})
    simulation.run()  # the simulated frontend insists on the indices
    assert len(simulation.received(0).tokens) == RECENT_TOKENS + 7
    simulation.check_outputs()


def test_a_chunk_that_fails_ends_its_sequence_without_registering_its_blocks():
    simulation = simulate(policy=ThroughputPolicy(budget=8), max_in_flight=2)
    simulation.add(add_message(0, list(range(20))))
    simulation.plan()
    simulation.plan(failing={0: ErrorCode.OUT_OF_MEMORY})
    simulation.run()
    assert simulation.received(0).reason == ErrorCode.OUT_OF_MEMORY
    assert simulation.received(0).tokens == []
    assert simulation.scheduler.block_manager.num_indexed == 2
    simulation.scheduler.check_invariants()


def test_rows_of_several_frontends_end_independently():
    simulation = simulate(sources=2, max_in_flight=1)
    for request_id in range(4):
        simulation.add(
            add_message(request_id, PROMPT, seed=request_id, max_tokens=2 + request_id),
            request_id % 2,
        )
    simulation.run()
    for request_id in range(4):
        received = simulation.received(request_id, frontend=request_id % 2)
        assert (len(received.tokens), received.reason) == (2 + request_id, FinishReason.LENGTH)
    simulation.check_outputs()


def test_counters_tell_what_was_done():
    simulation = simulate(max_in_flight=1)
    simulation.add(add_message(0, list(range(9)), max_tokens=3))
    simulation.run()
    simulation.add(add_message(1, list(range(9)), max_tokens=3))
    simulation.run()
    counters = simulation.scheduler.counters
    assert (counters.steps, counters.output_tokens, counters.finished) == (6, 6, 2)
    assert (counters.prefill_tokens, counters.cached_tokens) == (10, 8)
    assert (counters.preemptions, counters.dropped_tokens) == (0, 0)
