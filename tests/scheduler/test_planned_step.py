from types import SimpleNamespace

import msgspec
import pytest

from protocol.columns import pack_float32, pack_int32
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import LogprobColumns, SamplingParams, StepResult
from scheduler.planned_step import JOIN_BYTES, Chunk, Failure, PlannedStep, join_bytes
from scheduler.slot_table import SlotTable
from tests.scheduler.simulation import make_sequence

VOCAB_SIZE = 40


@pytest.fixture
def step():
    """Two decode rows, a chunk that is not the last, a last chunk."""
    table = SlotTable(4)
    sequences = [make_sequence(arrival, 3) for arrival in range(4)]
    for sequence in sequences:
        sequence.cached_tokens = 0
        table.take(sequence)
    chunks = [
        Chunk(sequences[2], 2, 0, start=0, count=2),
        Chunk(sequences[3], 3, 0, start=1, count=2, last=True),
    ]
    return PlannedStep(
        1, table.rows([0, 1]), chunks, table.rows([0, 1, 3]), pack_int32([1, 1, 0, 1]), 0
    )


def result(counts, tokens, failures=()):
    return StepResult(
        step_id=1,
        digest=0,
        counts=pack_int32(counts),
        tokens=pack_int32(tokens),
        failures=pack_int32(failures),
    )


def test_a_chunk_ends_after_its_count():
    assert Chunk(make_sequence(0, 9), 0, 0, start=3, count=4).end == 7


def test_rows_are_decode_rows_then_chunks(step):
    assert step.num_rows == 4
    assert step.sampled_rows().tolist() == [0, 1, 3]
    assert [step.use_of_row(row) for row in range(4)] == [(0, 0), (1, 0), (2, 0), (3, 0)]


def test_a_result_without_failures(step):
    good = result([1, 1, 0, 1], [5, 6, 7])
    assert step.failures(good) == []
    assert step.tokens(good, VOCAB_SIZE).tolist() == [5, 6, 7]


def test_failed_rows_have_codes_and_no_tokens(step):
    failed = result([1, -1, -1, 1], [5, 7], [ErrorCode.NUMERIC, ErrorCode.OUT_OF_MEMORY])
    assert step.failures(failed) == [
        Failure(1, ErrorCode.NUMERIC),
        Failure(2, ErrorCode.OUT_OF_MEMORY),
    ]
    assert step.tokens(failed, VOCAB_SIZE).tolist() == [5, 0, 7]


def test_a_step_that_failed_altogether(step):
    failed = result([-1] * 4, [], [ErrorCode.OUT_OF_MEMORY] * 4)
    assert len(step.failures(failed)) == 4
    assert step.tokens(failed, VOCAB_SIZE).tolist() == [0, 0, 0]


@pytest.mark.parametrize("counts", [[1, 1, 0], [1, 1, 1, 1], [1, 2, 0, 1], [1, -2, 0, 1]])
def test_counts_that_no_plan_has(step, counts):
    with pytest.raises(ProtocolError, match="does not have the counts of its plan"):
        step.failures(result(counts, [5, 6, 7]))


@pytest.mark.parametrize("failures", [[], [ErrorCode.NUMERIC] * 2, [1]])
def test_failures_need_one_code_each(step, failures):
    with pytest.raises(ProtocolError, match="each failed row needs one ErrorCode"):
        step.failures(result([1, -1, 0, 1], [5, 7], failures))


@pytest.mark.parametrize("tokens", [[5, 6], [5, 6, 7, 8], [5, 6, VOCAB_SIZE], [5, -1, 7]])
def test_tokens_that_no_row_samples(step, tokens):
    with pytest.raises(ProtocolError, match=r"has . tokens where 3 rows sampled one, or a token"):
        step.tokens(result([1, 1, 0, 1], tokens), VOCAB_SIZE)


def logprobs(rows, widths, num_ids):
    return LogprobColumns(
        rows=pack_int32(rows),
        positions=pack_int32(rows),
        n=pack_int32(widths),
        ids=pack_int32(range(num_ids)),
        values=pack_float32(range(num_ids)),
    )


def test_logprobs_of_the_steps_rows(step):
    step.check_logprobs(logprobs([], [], 0))
    step.check_logprobs(logprobs([0, 3], [1, 2], 3))


@pytest.mark.parametrize(
    ("rows", "widths", "num_ids"),
    [([4], [1], 1), ([-1], [1], 1), ([0], [1], 2), ([0, 1], [2, -1], 1)],
)
def test_logprobs_that_do_not_fit(step, rows, widths, num_ids):
    with pytest.raises(ProtocolError, match="name a row that is not below 4, or their widths"):
        step.check_logprobs(logprobs(rows, widths, num_ids))


def test_a_joins_lists_of_token_ids_count():
    ids = list(range(2**31 - 301, 2**31 - 1))
    params = SamplingParams(
        logit_bias=dict.fromkeys(ids, 0.1),
        allowed_token_ids=ids * 3,
        bad_word_ids=[ids[:32]] * 99,
    )
    sequence = SimpleNamespace(params=params, tokens=[1, 2, 3], block_table=[4])
    encoded = len(msgspec.msgpack.encode(params))
    assert encoded <= join_bytes(sequence) - 16 <= encoded + JOIN_BYTES
    sequence.params = SamplingParams()
    assert join_bytes(sequence) == JOIN_BYTES + 16


@pytest.mark.parametrize(
    ("rows", "positions", "is_right"),
    [
        ([2, 2], [1, 2], True),
        ([2, 3, 2], [1, 2, 2], True),
        ([], [], True),
        ([2], [2], False),
        ([2, 2], [1, 3], False),
        ([2, 2], [1, 1], False),
        ([1], [1], False),
        ([4], [1], False),
        ([2, 2, 2], [1, 2, 3], False),
    ],
)
def test_log_probabilities_of_other_prompt_tokens_are_refused(step, rows, positions, is_right):
    columns = LogprobColumns(
        rows=pack_int32(rows),
        positions=pack_int32(positions),
        n=pack_int32([1] * len(rows)),
        ids=pack_int32([7] * len(rows)),
        values=pack_float32([-1.0] * len(rows)),
    )
    if is_right:
        step.check_prompt_logprobs(columns)
    else:
        with pytest.raises(ProtocolError, match="log-probabilities of step"):
            step.check_prompt_logprobs(columns)
