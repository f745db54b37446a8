"""Requests that fill the pool to its last position, several at once, push one another out."""

import pytest

from protocol.messages import FinishReason
from scheduler.policy import PROGRESS_TOKENS, LatencyPolicy, ThroughputPolicy
from tests.scheduler.simulation import add_message, simulate

BLOCK_SIZE, NUM_BLOCKS = 16, 8
CAPACITY = BLOCK_SIZE * NUM_BLOCKS


def run(count, prompt_tokens, policy, max_in_flight, prefix_key, priority=lambda _: 0):
    """Run requests of exactly the pool's capacity to their end; return (simulation, steps)."""
    simulation = simulate(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        slots=8,
        max_model_len=CAPACITY,
        policy=policy,
        max_in_flight=max_in_flight,
        prefix_key=prefix_key,
    )
    for request_id in range(count):
        prompt = [(5 * request_id + i) % 37 for i in range(prompt_tokens)]
        simulation.add(
            add_message(
                request_id,
                prompt,
                max_tokens=CAPACITY - prompt_tokens,
                seed=request_id,
                priority=priority(request_id),
            )
        )
    simulation.run(max_steps=20 * CAPACITY * count)
    for request_id in range(count):
        received = simulation.received(request_id)
        assert len(received.tokens) == CAPACITY - prompt_tokens
        assert received.reason == FinishReason.LENGTH
    simulation.check_outputs()
    simulation.scheduler.check_invariants()
    assert simulation.scheduler.num_free_blocks == NUM_BLOCKS
    return simulation, len(simulation.plans)


@pytest.mark.parametrize("prefix_key", [None, b"key"])
@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("policy", [ThroughputPolicy(budget=64), LatencyPolicy(budget=16)])
@pytest.mark.parametrize("prompt_tokens", [1, 16, 17, CAPACITY - 1])
@pytest.mark.parametrize("count", [1, 5])
def test_they_all_end_with_the_outputs_they_would_have_had(
    count, prompt_tokens, policy, max_in_flight, prefix_key
):
    simulation, steps = run(count, prompt_tokens, policy, max_in_flight, prefix_key)
    num_outputs = count * (CAPACITY - prompt_tokens)
    # A resumed sequence commits PROGRESS_TOKENS before it gives way again, while others can.
    assert simulation.scheduler.counters.preemptions <= num_outputs // PROGRESS_TOKENS
    # One after the other they would take a step a token, and some for the prompt: pushing one
    # another out costs less than it brings.
    alone = CAPACITY - prompt_tokens + -(-prompt_tokens // (policy.budget // 2))
    assert steps <= count * alone


@pytest.mark.parametrize("policy", [ThroughputPolicy(budget=64), LatencyPolicy(budget=16)])
def test_priorities_change_nothing_of_that(policy):
    simulation, _ = run(6, 17, policy, 2, b"key", priority=lambda number: number % 3)
    assert 0 < simulation.scheduler.counters.preemptions <= 6 * (CAPACITY - 17) // PROGRESS_TOKENS
