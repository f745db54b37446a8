import random

import pytest

from protocol.columns import unpack_float32, unpack_int32
from protocol.errors import ErrorCode, ProcessError, ProtocolError
from protocol.messages import SamplingParams, StepPlan
from protocol.sampling import sampling
from tests.worker.plan_builder import GREEDY, execute, make_facts, make_join, make_plan
from tests.worker.random_plans import RandomPlans
from worker.checksum import checksum_token
from worker.checksum_runner import ChecksumRunner
from worker.faults import Faults
from worker.runner import StepOutput, StepRunner

WIDE = 2**31 - 1
PROMPT = [11, 12, 13, 14, 15, 16]
FACTS = make_facts(vocab_size=WIDE)  # blocks of 4 positions


def following(token_ids: list[int], count: int, params: SamplingParams = GREEDY) -> list[int]:
    """Return the `count` tokens that follow, by the oracle."""
    context = list(token_ids)
    for _ in range(count):
        context.append(oracle(context, params))
    return context[len(token_ids) :]


def oracle(context: list[int], params: SamplingParams) -> int:
    return checksum_token(context, params.seed, sampling(params).temperature, WIDE)


def run(runner: StepRunner, *plans: StepPlan) -> list[list[int]]:
    return [execute(runner, plan).tokens.tolist() for plan in plans]


PREFILL = make_plan(1, joins=[make_join(0, PROMPT, [9, 4])], chunks=[(0, 0, 6, 1)])


def test_a_prompt_and_its_output_follow_the_oracle() -> None:
    runner: StepRunner = ChecksumRunner(FACTS)
    assert runner.facts is FACTS
    tokens = run(
        runner,
        PREFILL,
        make_plan(2, decode=[0]),
        make_plan(3, decode=None),
        make_plan(4, decode=None, new_blocks=[(0, 2, 0)]),
    )
    assert tokens == [[token] for token in following(PROMPT, 4)]


def test_seeded_sampling_follows_the_oracle() -> None:
    params = SamplingParams(temperature=0.8, seed=-5, max_tokens=10)
    tokens = run(
        ChecksumRunner(FACTS),
        make_plan(1, joins=[make_join(0, PROMPT, [9, 4], params=params)], chunks=[(0, 0, 6, 1)]),
        make_plan(2, decode=[0]),
    )
    assert tokens == [[token] for token in following(PROMPT, 2, params)]


def test_chunks_add_up_to_the_prompt() -> None:
    runner = ChecksumRunner(FACTS)
    first = execute(
        runner, make_plan(1, joins=[make_join(0, PROMPT, [9, 4])], chunks=[(0, 0, 3, 0)])
    )
    assert (first.tokens.tolist(), first.counts.tolist()) == ([], [0])
    assert run(runner, make_plan(2, chunks=[(0, 3, 3, 1)])) == [following(PROMPT, 1)]


def test_tokens_come_in_plan_row_order() -> None:
    runner = ChecksumRunner(FACTS)
    other = [21, 22, 23]
    execute(
        runner,
        make_plan(
            1,
            joins=[make_join(0, PROMPT, [9, 4]), make_join(1, other, [5])],
            chunks=[(1, 0, 3, 1), (0, 0, 6, 1)],
        ),
    )
    joins = [make_join(2, [31, 32], [6]), make_join(3, [41], [7])]
    output = execute(
        runner, make_plan(2, joins=joins, decode=[1, 0], chunks=[(2, 0, 1, 0), (3, 0, 1, 1)])
    )
    assert output.counts.tolist() == [1, 1, 0, 1]
    expected = [following(other, 2)[1], following(PROMPT, 2)[1], following([41], 1)[0]]
    assert output.tokens.tolist() == expected
    assert (output.failures.size, output.logprobs) == (0, None)


def test_rule_3_a_later_step_leaves_an_earlier_output_alone() -> None:
    runner = ChecksumRunner(FACTS)
    first = execute(runner, PREFILL)
    token = first.tokens.tolist()
    execute(runner, make_plan(2, decode=[0]))
    assert first.tokens.tolist() == token


def test_rule_4_a_freed_slot_and_its_blocks_serve_the_very_next_plan() -> None:
    runner = ChecksumRunner(FACTS)
    execute(runner, PREFILL)
    resumed = PROMPT + following(PROMPT, 1)
    (token,) = run(
        runner,
        make_plan(
            2,
            leaves=[0],
            joins=[make_join(0, resumed, [4, 9], generation=1, prompt_len=6)],
            chunks=[(0, 0, 7, 1)],
        ),
    )
    assert token == following(resumed, 1)


def test_a_prefix_hit_reads_the_shared_blocks() -> None:
    runner = ChecksumRunner(FACTS)
    execute(runner, PREFILL)
    hit = [*PROMPT[:4], 77]
    join = make_join(1, hit, [9, 5])
    assert run(runner, make_plan(2, joins=[join], chunks=[(1, 4, 1, 1)])) == [following(hit, 1)]


def test_block_copies_move_contents_in_order() -> None:
    runner = ChecksumRunner(FACTS)
    execute(runner, PREFILL)
    fork = [*PROMPT[:5], 77]  # shares block 9, and the first position of block 4
    plan = make_plan(
        2,
        joins=[make_join(1, fork, [9, 6])],
        copies=[(4, 5), (5, 6)],
        chunks=[(1, 5, 1, 1)],
    )
    assert run(runner, plan) == [following(fork, 1)]


def test_a_copied_block_may_be_freed_and_written_in_the_same_plan() -> None:
    runner = ChecksumRunner(FACTS)
    execute(runner, PREFILL)
    fork = [*PROMPT[:5], 77, 78, 79, 80]  # and takes block 4, its source, for its last token
    plan = make_plan(
        2,
        leaves=[0],
        joins=[make_join(1, fork, [9, 6, 4])],
        copies=[(4, 6)],
        chunks=[(1, 5, 4, 1)],
    )
    assert run(runner, plan) == [following(fork, 1)]


def test_a_sequence_leaves_for_the_host_and_comes_back_elsewhere() -> None:
    runner = ChecksumRunner(make_facts(vocab_size=WIDE, host_blocks=3))
    execute(runner, PREFILL)
    other = [50, 51, 52, 53, 54, 55, 56, 57]
    # Another takes its slot and its blocks in the plan that moves them out.
    plan = make_plan(
        2,
        leaves=[0],
        swap_outs=[(9, 2), (4, 0)],
        joins=[make_join(0, other, [9, 4], generation=1)],
        chunks=[(0, 0, 8, 1)],
    )
    assert run(runner, plan) == [following(other, 1)]
    back = [*PROMPT, *following(PROMPT, 1)]
    plan = make_plan(
        3,
        swap_ins=[(2, 5), (0, 6)],
        joins=[make_join(1, back, [5, 6], prompt_len=len(PROMPT))],
        chunks=[(1, len(PROMPT), 1, 1)],
    )
    assert run(runner, plan) == [following(back, 1)]


def test_a_step_out_of_memory_has_moved_blocks_to_the_host() -> None:
    facts = make_facts(vocab_size=WIDE, host_blocks=3)
    runner = ChecksumRunner(facts, faults=Faults(memory_step=2))
    execute(runner, PREFILL)
    other = [50, 51, 52, 53]
    plan = make_plan(
        2,
        leaves=[0],
        swap_outs=[(9, 2), (4, 0)],
        joins=[make_join(0, other, [9], generation=1)],
        chunks=[(0, 0, 4, 1)],
    )
    assert execute(runner, plan).counts.tolist() == [-1]
    back = [*PROMPT, *following(PROMPT, 1)]
    plan = make_plan(
        3,
        swap_ins=[(2, 5), (0, 6)],
        joins=[make_join(1, back, [5, 6], prompt_len=len(PROMPT))],
        chunks=[(1, len(PROMPT), 1, 1)],
    )
    assert run(runner, plan) == [following(back, 1)]


@pytest.mark.parametrize(
    "wrong",
    [
        make_plan(2, joins=[make_join(1, [*PROMPT[:5], 77], [9, 5])], chunks=[(1, 5, 1, 1)]),
        make_plan(2, joins=[make_join(1, [*PROMPT[:4], 77], [4, 5])], chunks=[(1, 4, 1, 1)]),
        make_plan(2, joins=[make_join(1, [99, *PROMPT[1:4], 77], [9, 5])], chunks=[(1, 4, 1, 1)]),
        make_plan(2, joins=[make_join(1, PROMPT, [9, 4])], chunks=[(1, 5, 1, 1)]),
    ],
    ids=["copy forgotten", "wrong block", "wrong prefix", "right after all"],
)
def test_a_wrong_plan_shows_as_a_wrong_token(wrong: StepPlan) -> None:
    runner = ChecksumRunner(FACTS)
    execute(runner, PREFILL)
    is_right = wrong.joins[0].token_ids == make_join(0, PROMPT, []).token_ids
    token_ids = unpack_int32(wrong.joins[0].token_ids)
    assert (run(runner, wrong) == [following(token_ids, 1)]) is is_right


def test_ranks_agree() -> None:
    plans = [PREFILL, make_plan(2, decode=[0])]
    ranks = [ChecksumRunner(make_facts(rank=rank, vocab_size=WIDE), tp=2) for rank in range(2)]
    assert run(ranks[0], *plans) == run(ranks[1], *plans)


def test_a_plan_that_does_not_fit_is_fatal() -> None:
    with pytest.raises(ProtocolError, match="step 1: slot 0 decodes but is free"):
        execute(ChecksumRunner(FACTS), make_plan(1, decode=[0]))


# Failures


def failures(output: StepOutput) -> tuple[list[int], list[int], list[int]]:
    return output.tokens.tolist(), output.counts.tolist(), output.failures.tolist()


def test_rule_9_a_step_out_of_memory_fails_all_its_rows() -> None:
    runner = ChecksumRunner(FACTS, faults=Faults(memory_step=2))
    execute(runner, PREFILL)
    joins = [make_join(1, [1, 2, 3], [5]), make_join(2, [4, 5], [6])]
    memory = int(ErrorCode.OUT_OF_MEMORY)
    output = execute(
        runner, make_plan(2, joins=joins, decode=[0], chunks=[(1, 0, 2, 0), (2, 0, 2, 1)])
    )
    assert failures(output) == ([], [-1, -1, -1], [memory, memory, memory])
    join = make_join(0, PROMPT, [9, 4], generation=1)
    output = execute(
        runner,
        make_plan(3, leaves=[0], joins=[join], decode=[2], chunks=[(0, 0, 6, 1), (1, 2, 1, 1)]),
    )
    assert failures(output) == (following(PROMPT, 1), [-1, 1, -1], [memory, memory])


def test_rule_9_out_of_memory_ends_a_group_of_ranks() -> None:
    runner = ChecksumRunner(FACTS, tp=2, faults=Faults(memory_step=1))
    with pytest.raises(ProcessError, match="Step 1 ran out of memory"):
        execute(runner, PREFILL)


def test_rule_9_a_numeric_failure_stays_with_its_row() -> None:
    runner = ChecksumRunner(FACTS, faults=Faults(numeric_token=22))
    logprobs = SamplingParams(temperature=0.0, seed=0, logprobs=0)
    output = execute(
        runner,
        make_plan(
            1,
            joins=[make_join(1, [21, 22], [5], params=logprobs), make_join(0, PROMPT, [9, 4])],
            chunks=[(1, 0, 2, 1), (0, 0, 6, 1)],
        ),
    )
    numeric = int(ErrorCode.NUMERIC)
    assert failures(output) == (following(PROMPT, 1), [-1, 1], [numeric])
    assert output.logprobs is None
    output = execute(runner, make_plan(2, decode=[0, 1]))
    assert failures(output) == ([following(PROMPT, 2)[1]], [1, -1], [numeric])


# Logprobs


def test_logprobs_have_an_entry_for_each_row_that_asked() -> None:
    runner = ChecksumRunner(FACTS)
    asking = SamplingParams(temperature=0.0, seed=0, logprobs=2)
    execute(
        runner,
        make_plan(
            1,
            joins=[make_join(0, PROMPT, [9, 4]), make_join(1, [1], [5], params=asking)],
            chunks=[(0, 0, 6, 1), (1, 0, 1, 1)],
        ),
    )
    join = make_join(2, [5, 6, 7], [6], params=asking)
    columns = execute(
        runner, make_plan(2, joins=[join], decode=[0, 1], chunks=[(2, 0, 3, 1)])
    ).logprobs
    assert columns is not None
    assert unpack_int32(columns.rows) == [1, 2]
    assert unpack_int32(columns.positions) == [2, 3]
    assert unpack_int32(columns.n) == [3, 3]
    first, second = following([1], 2)[1], following([5, 6, 7], 1)[0]
    assert unpack_int32(columns.ids) == [
        (token + index) % WIDE for token in (first, second) for index in range(3)
    ]
    assert unpack_float32(columns.values)[:2] == [-(first % 64) / 64, -(1 + (first % 64) / 64)]


def test_a_rank_above_0_reports_no_logprobs() -> None:
    asking = SamplingParams(temperature=0.0, seed=0, logprobs=2)
    plan = make_plan(1, joins=[make_join(0, [1], [5], params=asking)], chunks=[(0, 0, 1, 1)])
    assert execute(ChecksumRunner(make_facts(rank=1), tp=2), plan).logprobs is None


# A random scheduler


def test_every_token_of_random_plans_is_the_oracles() -> None:
    nil_lists = copies = exchanged = 0
    for seed in range(20):
        runner = ChecksumRunner(FACTS)
        plans = RandomPlans(random.Random(seed), FACTS, oracle)
        for expected in plans.plans(60):
            output = execute(runner, expected.plan)
            assert output.tokens.tolist() == expected.tokens, f"seed {seed}"
            assert output.counts.tolist() == expected.counts, f"seed {seed}"
            nil_lists += expected.plan.decode is None
            copies += bool(expected.plan.copies)
        exchanged += plans.num_exchanged
    assert nil_lists > 100
    assert copies > 50
    assert exchanged > 50
