import pytest

from protocol.columns import (
    pack_float32,
    pack_int32,
    unpack_float32,
    unpack_int32,
    unpack_int64,
    unpack_rows,
)
from protocol.errors import ErrorCode, RequestError
from protocol.messages import AbortState, CacheStats, FinishReason, LogprobColumns, StepResult
from scheduler.policy import LatencyPolicy, ThroughputPolicy
from tests.scheduler.simulation import VOCAB_SIZE, add_message, expected_output, simulate

PROMPT = [1, 2, 3, 4, 5]


def output_of(prompt, max_tokens=20, seed=0):
    return expected_output(
        prompt, add_message(0, prompt, max_tokens=max_tokens, seed=seed).params, 64
    )[0]


# Adding


@pytest.mark.parametrize(
    ("message", "code", "sentence"),
    [
        (add_message(0, []), ErrorCode.INVALID_REQUEST, "prompt is empty"),
        (add_message(0, [VOCAB_SIZE]), ErrorCode.INVALID_REQUEST, "holds token id 40"),
        (add_message(0, [-1]), ErrorCode.INVALID_REQUEST, "holds token id -1"),
        (add_message(0, [1] * 64), ErrorCode.CONTEXT_LENGTH_EXCEEDED, "at most 63"),
        (
            add_message(0, PROMPT, stop_token_ids=(VOCAB_SIZE,)),
            ErrorCode.INVALID_REQUEST,
            "stop_token_ids holds 40",
        ),
        (
            add_message(0, PROMPT, resume_ids=(1, 2), next_index=3),
            ErrorCode.INVALID_REQUEST,
            "next_index is 3",
        ),
        (
            add_message(0, PROMPT, max_tokens=1, resume_ids=(1, 2)),
            ErrorCode.INVALID_REQUEST,
            "resume_ids has 2 tokens, of at most 1",
        ),
        (
            add_message(0, PROMPT, resume_ids=(1, VOCAB_SIZE)),
            ErrorCode.INVALID_REQUEST,
            "resume_ids holds an id outside 0 to 39",
        ),
        (
            add_message(0, PROMPT, deadline=float("nan")),
            ErrorCode.INVALID_REQUEST,
            "deadline is not a number",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_and_leaves_no_trace(message, code, sentence):
    simulation = simulate()
    with pytest.raises(RequestError, match=sentence) as caught:
        simulation.add(message)
    assert caught.value.code is code
    assert simulation.scheduler.num_live == simulation.scheduler.waiting_requests == 0
    assert simulation.plan() is None


def test_a_live_duplicate_is_refused():
    simulation = simulate(sources=2)
    simulation.add(add_message(0, PROMPT))
    with pytest.raises(RequestError, match="Request 0 sample 0 is still running"):
        simulation.scheduler.add(b"frontend-0", add_message(0, PROMPT))
    simulation.add(add_message(0, PROMPT), frontend=1)
    simulation.add(add_message(0, PROMPT, sample=1))
    simulation.run()
    simulation.scheduler.add(b"frontend-0", add_message(0, PROMPT))


def test_a_full_queue_refuses_new_sequences_but_not_resumed_ones():
    simulation = simulate(max_waiting_requests=2, max_waiting_tokens=12)
    simulation.add(add_message(0, PROMPT))
    with pytest.raises(RequestError) as by_tokens:
        simulation.add(add_message(1, PROMPT + PROMPT))
    simulation.add(add_message(2, PROMPT))
    with pytest.raises(RequestError) as by_requests:
        simulation.add(add_message(3, [1]))
    assert by_tokens.value.code is by_requests.value.code is ErrorCode.OVERLOADED
    simulation.add(add_message(4, PROMPT, resume_ids=tuple(output_of(PROMPT)[:1]), next_index=1))
    assert simulation.scheduler.waiting_requests == 3
    assert simulation.scheduler.waiting_tokens == 16
    simulation.plan()
    assert simulation.scheduler.waiting_requests == simulation.scheduler.waiting_tokens == 0
    simulation.run()
    simulation.check_outputs()


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "num_output"), [(5, 3, 3), (5, 99, 11), (15, 1, 1), (15, 9, 1)]
)
def test_a_sequence_alone_gets_all_that_the_pool_holds(prompt_tokens, max_tokens, num_output):
    # Four blocks of four: 16 tokens of prompt and output.
    simulation = simulate(num_blocks=4, block_size=4)
    simulation.add(add_message(0, list(range(prompt_tokens)), max_tokens=max_tokens))
    simulation.run()
    assert len(simulation.received(0).tokens) == num_output
    assert simulation.received(0).reason == FinishReason.LENGTH
    simulation.check_outputs()


def test_a_prompt_that_fills_the_pool_is_refused_at_once():
    with pytest.raises(RequestError) as caught:
        simulate(num_blocks=4, block_size=4).add(add_message(0, list(range(16))))
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


def test_a_prompt_exactly_at_capacity_waits_for_the_others_and_runs():
    simulation = simulate(num_blocks=4, block_size=4, max_in_flight=1)
    simulation.add(add_message(0, PROMPT, max_tokens=4))
    simulation.add(add_message(1, list(range(15)), max_tokens=1))
    simulation.run()
    simulation.check_outputs()


# Resuming


def test_a_resumed_sequence_goes_on_where_its_frontend_stopped():
    output = output_of(PROMPT, 8)
    simulation = simulate()
    simulation.add(add_message(0, PROMPT, resume_ids=tuple(output[:3]), next_index=1))
    assert simulation.received(0).tokens == output[:3]
    plan = simulation.plan()
    assert unpack_int32(plan.joins[0].token_ids) == PROMPT + output[:3]
    assert plan.joins[0].prompt_len == len(PROMPT)
    simulation.run()
    simulation.check_outputs()


def test_a_resumed_sequence_that_has_ended_says_so():
    output = output_of(PROMPT, 4)
    simulation = simulate()
    simulation.add(add_message(0, PROMPT, max_tokens=4, resume_ids=tuple(output), next_index=4))
    assert simulation.received(0).reason == FinishReason.LENGTH
    stop = (output[1],)
    simulation.add(
        add_message(1, PROMPT, stop_token_ids=stop, resume_ids=tuple(output[:2]), next_index=0)
    )
    assert simulation.received(1).tokens == output[:2]
    assert simulation.received(1).reason == FinishReason.STOP
    assert simulation.scheduler.num_live == 0


# Ending


def test_a_stop_token_is_part_of_the_output():
    output = output_of(PROMPT)
    simulation = simulate()
    simulation.add(add_message(0, PROMPT, max_tokens=20, stop_token_ids=(output[3],)))
    simulation.run()
    assert simulation.received(0).tokens == output[:4]
    assert simulation.received(0).reason == FinishReason.STOP


def test_a_stop_token_does_not_count_before_min_tokens():
    output = output_of(PROMPT)
    simulation = simulate()
    # Ranks would not draw them, but those simulated do.
    every = tuple(sorted({*output[:4]}))
    simulation.add(add_message(0, PROMPT, max_tokens=9, stop_token_ids=every, min_tokens=4))
    simulation.run()
    assert simulation.received(0).tokens == output[:4]
    assert simulation.received(0).reason == FinishReason.STOP


def test_another_sequences_stop_token_does_not_count():
    output = output_of(PROMPT)
    simulation = simulate()
    simulation.add(add_message(0, PROMPT, max_tokens=6, stop_token_ids=(output[0],)))
    simulation.add(add_message(1, PROMPT, max_tokens=6))
    simulation.run()
    assert len(simulation.received(0).tokens) == 1
    assert simulation.received(1).tokens == output[:6]


def test_abort_tells_what_the_sequence_was():
    simulation = simulate()
    assert simulation.abort(0, 0).state is AbortState.UNKNOWN
    simulation.add(add_message(0, PROMPT, max_tokens=1))
    simulation.run()
    assert simulation.abort(0, 0).state is AbortState.FINISHED
    assert simulation.abort(0, -1).state is AbortState.FINISHED
    assert simulation.abort(0, 1).state is AbortState.UNKNOWN
    simulation.add(add_message(1, PROMPT))
    waiting = simulation.abort(1, 0)
    assert (waiting.state, waiting.blocks_returned) == (AbortState.LIVE, 0)
    assert simulation.abort(1, 0).state is AbortState.FINISHED


def test_abort_of_all_samples_returns_all_their_blocks():
    simulation = simulate(prefix_key=None)
    for sample in range(3):
        simulation.add(add_message(0, PROMPT, sample=sample))
    simulation.add(add_message(1, PROMPT))
    simulation.plan()
    ack = simulation.abort(0, -1)
    assert (ack.request_id, ack.sample, ack.state) == (0, -1, AbortState.LIVE)
    assert ack.blocks_returned == 6
    assert simulation.scheduler.num_live == 1


def test_a_shared_block_is_not_returned_by_one_of_its_holders():
    simulation = simulate()
    simulation.add(add_message(0, list(range(9)), max_tokens=20))
    simulation.plan()
    simulation.answer()
    simulation.add(add_message(1, list(range(9)), max_tokens=20))
    simulation.plan()
    assert simulation.abort(1, 0).blocks_returned == 1


@pytest.mark.parametrize("running", [True, False])
def test_a_deadline_ends_a_sequence_wherever_it_is(running):
    simulation = simulate()
    simulation.add(add_message(0, PROMPT, deadline=50.0))
    assert simulation.scheduler.next_deadline() == 50.0
    if running:
        simulation.plan()
        simulation.plan()
        simulation.answer()
    simulation.deliver(simulation.scheduler.expire(49.9))
    assert simulation.received(0).reason == 0
    simulation.deliver(simulation.scheduler.expire(50.0))
    assert simulation.received(0).reason == FinishReason.TIMEOUT
    assert len(simulation.received(0).tokens) == (1 if running else 0)
    assert simulation.scheduler.next_deadline() is None
    simulation.run()
    assert simulation.scheduler.num_free_blocks == 32


def test_a_frontend_that_is_gone_takes_its_sequences_along():
    simulation = simulate(sources=2)
    for request_id in range(3):
        simulation.add(add_message(request_id, PROMPT))
    simulation.add(add_message(0, PROMPT), frontend=1)
    simulation.plan()
    assert simulation.scheduler.drop_source(b"frontend-0") == 3
    assert simulation.scheduler.drop_source(b"frontend-0") == 0
    simulation.frontends[0].sequences.clear()
    simulation.run()
    simulation.check_outputs()


# Who comes first


def test_higher_priority_runs_first():
    simulation = simulate(slots=1, max_in_flight=1)
    for request_id, priority in enumerate([0, 5, -5, 5]):
        simulation.add(add_message(request_id, [request_id + 1], max_tokens=1, priority=priority))
    ends = []
    while simulation.scheduler.num_live:
        simulation.plan()
        simulation.answer()
        ends += [i for i in range(4) if simulation.received(i).reason and i not in ends]
    assert ends == [1, 3, 0, 2]


def test_a_low_priority_is_not_starved_by_a_stream_of_high_ones():
    simulation = simulate(slots=1, max_in_flight=1)
    simulation.add(add_message(0, [1], max_tokens=1, priority=-1))
    for request_id in range(1, 40):
        simulation.add(add_message(request_id, [2], max_tokens=1))
        simulation.plan()
        simulation.answer()
        if simulation.received(0).reason:
            break
    assert request_id == 9


def test_throughput_fills_a_step_with_prompts_in_order():
    simulation = simulate(policy=ThroughputPolicy(budget=12), max_in_flight=1)
    for request_id in range(3):
        simulation.add(add_message(request_id, [7 * request_id + i for i in range(7)]))
    assert unpack_rows(simulation.plan().chunks, 4) == [(0, 0, 7, 1), (1, 0, 5, 0)]
    simulation.answer()
    second = simulation.plan()
    assert unpack_int32(second.decode) == [0]
    assert unpack_rows(second.chunks, 4) == [(1, 5, 2, 1), (2, 0, 7, 1)]


def test_a_running_stream_gets_a_token_in_every_step_while_prompts_keep_coming():
    simulation = simulate(policy=LatencyPolicy(budget=16), max_in_flight=1, num_blocks=200)
    simulation.add(add_message(0, PROMPT, max_tokens=50))
    simulation.plan()
    simulation.answer()
    for request_id in range(1, 40):
        simulation.add(add_message(request_id, [request_id % 40] * 40, max_tokens=1))
        plan = simulation.plan()
        simulation.answer()
        chunk_tokens = sum(count for _, _, count, _ in unpack_rows(plan.chunks, 4))
        assert 0 < chunk_tokens <= 15
        assert len(simulation.received(0).tokens) == request_id + 1


def test_a_short_prompt_does_not_wait_for_a_long_ones_prefill():
    simulation = simulate(
        policy=LatencyPolicy(budget=16),
        max_in_flight=1,
        num_blocks=600,
        max_model_len=2000,
        max_waiting_tokens=10_000,
    )
    for request_id in range(2):
        simulation.add(add_message(request_id, [request_id] * 1000, max_tokens=1))
    simulation.plan()
    simulation.answer()
    simulation.add(add_message(2, PROMPT, max_tokens=1))
    simulation.plan()
    simulation.answer()
    assert simulation.received(2).reason == FinishReason.LENGTH


@pytest.mark.parametrize("policy", [LatencyPolicy(), ThroughputPolicy()])
def test_a_short_prompt_behind_half_a_million_tokens(policy):
    simulation = simulate(
        policy=policy,
        num_blocks=8_000,
        block_size=64,
        max_model_len=510_000,
        max_waiting_tokens=1_000_000,
        prefix_key=None,
    )
    simulation.add(add_message(0, [1] * 500_000, max_tokens=1))
    while simulation.plan() is not None:
        pass
    simulation.add(add_message(1, [2] * 20, max_tokens=1))
    simulation.answer()
    chunks = unpack_rows(simulation.plan().chunks, 4)
    # Where gaps are to be short it is whole in the next step; else it waits, as it was told.
    is_next = (1, 0, 20, 1) in chunks
    assert is_next is isinstance(policy, LatencyPolicy)


def test_every_slot_may_have_a_row_so_a_small_budget_limits_the_slots():
    simulation = simulate(policy=ThroughputPolicy(budget=2), slots=8, max_in_flight=1)
    for request_id in range(5):
        simulation.add(add_message(request_id, [request_id]))
    simulation.plan()
    assert simulation.scheduler.num_running == 2
    simulation.run()
    simulation.check_outputs()


# The prefix cache


def test_the_same_prompt_of_whole_blocks_twice_gives_the_same_answer():
    simulation = simulate(block_size=4)
    for request_id in range(2):
        simulation.add(add_message(request_id, list(range(16)), max_tokens=6))
        simulation.run()
    assert simulation.received(1).cached_tokens == 12
    assert simulation.received(1).tokens == simulation.received(0).tokens
    simulation.check_outputs()


def test_a_conversation_finds_its_own_answer_in_the_cache():
    simulation = simulate(block_size=4)
    simulation.add(add_message(0, PROMPT, max_tokens=12))
    simulation.run()
    longer = PROMPT + simulation.received(0).tokens + [1, 2, 3]
    simulation.add(add_message(1, longer, max_tokens=4))
    simulation.run()
    assert simulation.received(1).cached_tokens == 16
    simulation.check_outputs()


def test_a_cache_domain_does_not_see_another_ones_blocks():
    simulation = simulate()
    for request_id, domain in enumerate([b"a", b"b", b"a"]):
        simulation.add(add_message(request_id, list(range(12)), cache_domain=domain))
        simulation.run()
    assert [simulation.received(i).cached_tokens for i in range(3)] == [0, 0, 8]


def test_without_the_prefix_cache_nothing_is_found():
    simulation = simulate(prefix_key=None)
    for request_id in range(2):
        simulation.add(add_message(request_id, list(range(12))))
        simulation.run()
    assert simulation.received(1).cached_tokens == 0
    assert simulation.scheduler.block_manager.num_indexed == 0


def test_a_block_reused_after_eviction_is_not_found_by_its_old_content():
    simulation = simulate(num_blocks=4, block_size=4)
    prompts = [[start + i for i in range(9)] for start in (0, 10, 20)]
    for request_id, prompt in enumerate([*prompts, prompts[0]]):
        simulation.add(add_message(request_id, prompt, max_tokens=4))
        simulation.run()
        simulation.scheduler.check_invariants()
    simulation.check_outputs()


def test_the_audit_names_a_block_whose_content_was_swapped():
    simulation = simulate()
    simulation.add(add_message(0, list(range(12))))
    simulation.run()
    manager = simulation.scheduler.block_manager
    manager._content[0], manager._content[1] = manager._content[1], manager._content[0]
    assert [problem.split(" is ")[0] for problem in simulation.scheduler.audit()] == [
        *["block 0", "block 1"] * 2
    ]
    with pytest.raises(AssertionError, match="block 0 is in the index under a key"):
        simulation.scheduler.check_invariants()


# Out of blocks


def test_long_generations_in_a_tiny_pool_are_whole():
    simulation = simulate(num_blocks=8, block_size=2, slots=4)
    for request_id in range(4):
        simulation.add(add_message(request_id, [request_id, 1], max_tokens=13, seed=request_id))
    simulation.run()
    assert simulation.scheduler.counters.preemptions > 0
    assert [len(simulation.received(i).tokens) for i in range(4)] == [13] * 4
    simulation.check_outputs()


def test_a_preempted_sequence_reports_the_cached_tokens_of_its_first_admission():
    simulation = simulate(num_blocks=6, block_size=2, slots=2)
    simulation.add(add_message(0, [1, 2], max_tokens=8))
    simulation.add(add_message(1, [3, 4], max_tokens=8))
    simulation.run()
    assert simulation.scheduler.counters.preemptions > 0
    assert simulation.received(1).cached_tokens == 0
    simulation.check_outputs()


# The prefix cache in numbers


def test_the_cache_counts_lookups_hits_and_blocks():
    simulation = simulate(num_blocks=12, block_size=4, slots=4)
    prompt = list(range(12))
    simulation.add(add_message(0, prompt, max_tokens=2))
    simulation.plan()
    simulation.answer()
    simulation.add(add_message(1, [*prompt, 7], max_tokens=2))  # 3 blocks that another holds
    simulation.run()
    simulation.add(add_message(2, prompt, max_tokens=2))  # 2 blocks that nobody holds any more
    simulation.run()
    simulation.add(add_message(3, [9] * 47, max_tokens=1))  # all blocks there are
    simulation.run()
    assert simulation.scheduler.cache_stats() == CacheStats(
        lookup_tokens=12 + 13 + 12 + 47,
        cached_tokens=12 + 8,
        shared_blocks=3,
        revived_blocks=3,  # and another 1 in exchange for a copy of it
        evicted_blocks=3,
        indexed_blocks=11,
        free_blocks=12,
        cached_blocks=11,
    )


def test_what_ran_before_does_not_make_the_hit_rate_better():
    simulation = simulate(num_blocks=6, block_size=2, slots=2)
    simulation.add(add_message(0, [1, 2], max_tokens=8))
    simulation.add(add_message(1, [3, 4], max_tokens=8))
    simulation.run()
    stats = simulation.scheduler.cache_stats()
    assert (stats.lookup_tokens, stats.cached_tokens, stats.hit_rate) == (4, 0, 0.0)
    assert simulation.scheduler.counters.preemptions > 0
    assert stats.resumed_lookup_tokens > stats.resumed_cached_tokens > 0
    # Nor does a sequence that its frontend gives anew with what it has produced.
    (first, second, *_) = simulation.received(0).tokens
    simulation.add(add_message(2, [1, 2], max_tokens=8, resume_ids=(first, second), next_index=2))
    simulation.run()
    resumed = simulation.scheduler.cache_stats()
    assert (resumed.lookup_tokens, resumed.cached_tokens) == (4, 0)
    assert resumed.resumed_lookup_tokens == stats.resumed_lookup_tokens + 4
    simulation.check_outputs()


def test_nothing_from_before_a_reset_is_found_after_it():
    simulation = simulate(num_blocks=32, block_size=4)
    prompt = list(range(20))
    simulation.add(add_message(0, prompt, max_tokens=2))
    simulation.run()
    assert simulation.reset_prefix_cache() == 5
    simulation.add(add_message(1, prompt, max_tokens=2))
    simulation.run()
    assert simulation.received(1).cached_tokens == 0
    simulation.add(add_message(2, prompt, max_tokens=2))
    simulation.run()
    assert simulation.received(2).cached_tokens == 16
    simulation.check_outputs()


def test_what_runs_at_a_reset_goes_on_and_leaves_nothing_in_the_index():
    simulation = simulate(num_blocks=32, block_size=4, policy=ThroughputPolicy(budget=8))
    prompt = list(range(20))
    simulation.add(add_message(0, prompt, max_tokens=20))
    simulation.plan()  # the second chunk is computed after the reset, from the first
    simulation.answer()
    assert simulation.reset_prefix_cache() == 2
    simulation.run()
    assert simulation.scheduler.cache_stats().indexed_blocks == 0
    assert simulation.scheduler.num_free_blocks == 32
    simulation.add(add_message(1, prompt, max_tokens=2))
    simulation.run()
    assert simulation.received(1).cached_tokens == 0
    simulation.check_outputs()


def test_a_sequence_preempted_after_a_reset_is_cached_like_a_new_one():
    simulation = simulate(num_blocks=6, block_size=2, slots=2)
    simulation.add(add_message(0, [1, 2], max_tokens=8))
    simulation.add(add_message(1, [3, 4], max_tokens=8))
    simulation.plan()
    simulation.reset_prefix_cache()
    simulation.run()
    stats = simulation.scheduler.cache_stats()
    assert simulation.scheduler.counters.preemptions > 0
    assert (stats.resumed_cached_tokens, stats.indexed_blocks) == (0, 4)
    simulation.check_outputs()


def test_a_later_sample_takes_nothing_over_from_one_that_ran_at_a_reset():
    simulation = simulate(num_blocks=32, block_size=4)
    prompt = list(range(10))
    for sample in range(2):
        simulation.add(add_message(0, prompt, max_tokens=12, sample=sample, seed=sample))
        simulation.plan()
        simulation.answer()
        simulation.reset_prefix_cache()
    simulation.add(add_message(0, prompt, max_tokens=12, sample=2, seed=2))
    simulation.plan()
    simulation.answer()
    # But from one that has started since the newest reset, whoever else there is.
    simulation.add(add_message(0, prompt, max_tokens=12, sample=3, seed=3))
    simulation.run()
    cached = [simulation.received(0, sample).cached_tokens for sample in range(4)]
    assert cached == [0, 0, 0, 9]
    simulation.check_outputs()


def test_nobody_waits_for_what_will_not_be_registered():
    simulation = simulate(
        num_blocks=400, block_size=4, max_model_len=800, policy=ThroughputPolicy(budget=64)
    )
    prompt = [1] * 600
    simulation.add(add_message(0, prompt, max_tokens=2))
    simulation.plan()
    simulation.add(add_message(1, prompt, max_tokens=2, seed=1))
    simulation.plan()
    assert simulation.scheduler.num_running == 1
    simulation.reset_prefix_cache()
    for _ in range(9):
        simulation.answer()
        simulation.plan()
    assert simulation.scheduler.num_running == 2


def test_without_a_cache_nothing_is_found():
    simulation = simulate(prefix_key=None)
    simulation.add(add_message(0, [1] * 9, max_tokens=2))
    simulation.run()
    stats = simulation.scheduler.cache_stats()
    assert stats == CacheStats(lookup_tokens=9, free_blocks=32)
    assert stats.hit_rate == 0.0
    assert CacheStats().hit_rate is None
    assert simulation.reset_prefix_cache() == 0


# Logprobs


def test_logprobs_reach_each_frontend_under_its_own_rows():
    simulation = simulate(sources=2)
    for request_id, frontend in enumerate([0, 1, 0]):
        simulation.add(add_message(request_id, [request_id + 1], max_tokens=9), frontend)
    simulation.plan()
    result = StepResult(
        step_id=1,
        digest=0,
        tokens=pack_int32([7, 8, 9]),
        counts=pack_int32([1, 1, 1]),
        logprobs=LogprobColumns(
            rows=pack_int32([1, 2]),
            positions=pack_int32([1, 1]),
            n=pack_int32([1, 2]),
            ids=pack_int32([8, 9, 4]),
            values=pack_float32([-1.0, -2.0, -3.0]),
        ),
    )
    by_source = dict(simulation.scheduler.commit(result))
    first, second = by_source[b"frontend-0"], by_source[b"frontend-1"]
    assert unpack_int64(first.requests) == [0, 2]
    assert unpack_int32(first.logprobs.rows) == [1]
    assert unpack_int32(first.logprobs.ids) == [9, 4]
    assert unpack_float32(first.logprobs.values) == [-2.0, -3.0]
    assert unpack_int32(second.logprobs.rows) == [0]
    assert unpack_int32(second.logprobs.ids) == [8]


# Where sequences wait


def test_each_frontend_hears_where_its_own_sequences_wait():
    simulation = simulate(slots=1, sources=2, max_in_flight=1)
    for request_id in range(4):
        simulation.add(add_message(request_id, [request_id + 1], max_tokens=1), request_id % 2)
    simulation.add(add_message(2, [9], sample=1, max_tokens=1))
    simulation.plan()
    reports = dict(simulation.scheduler.queue_positions())
    told = {
        source: (unpack_int64(report.requests), unpack_int32(report.positions))
        for source, report in reports.items()
    }
    assert told == {b"frontend-0": ([2, 2], [2, 4]), b"frontend-1": ([1, 3], [1, 3])}
    simulation.answer()
    simulation.plan()
    (other, own) = simulation.scheduler.queue_positions()
    assert (other[0], unpack_int32(other[1].positions)) == (b"frontend-1", [0, 2])
    assert (own[0], unpack_int32(own[1].positions)) == (b"frontend-0", [1, 3])
