import numpy as np

from protocol.columns import pack_float32, pack_int32, unpack_float32, unpack_int32, unpack_int64
from protocol.errors import ErrorCode
from protocol.messages import FinishReason, LogprobColumns
from scheduler.deltas import (
    Ending,
    ending_deltas,
    refusal,
    resumed_deltas,
    select_logprobs,
    step_deltas,
)
from scheduler.slot_table import Audience
from tests.scheduler.simulation import add_message, make_sequence


def audience(picks=None, rows=3):
    return Audience(
        source=b"frontend",
        picks=None if picks is None else np.array(picks),
        requests=np.arange(rows, dtype=np.int64).tobytes(),
        samples=bytes(4 * rows),
        cached_tokens=bytes(4 * rows),
        ones=pack_int32([1] * rows),
        zeros=bytes(4 * rows),
    )


INDEX = np.array([4, 5, 6], np.int32)
TOKENS = np.array([14, 15, 16], np.int32)


def test_a_steps_tokens_become_columns():
    source, deltas = step_deltas(audience(), INDEX, TOKENS, None, None)
    assert source == b"frontend"
    assert unpack_int64(deltas.requests) == [0, 1, 2]
    assert unpack_int32(deltas.first_index) == [4, 5, 6]
    assert unpack_int32(deltas.counts) == [1, 1, 1]
    assert unpack_int32(deltas.token_ids) == [14, 15, 16]
    assert unpack_int32(deltas.reasons) == [0, 0, 0]


def test_a_frontend_hears_of_its_own_rows_only():
    reasons = np.array([0, 1, 2], np.int32)
    _, deltas = step_deltas(audience([0, 2], rows=2), INDEX, TOKENS, reasons, None)
    assert unpack_int32(deltas.first_index) == [4, 6]
    assert unpack_int32(deltas.token_ids) == [14, 16]
    assert unpack_int32(deltas.reasons) == [0, 2]


def test_endings_are_grouped_by_frontend():
    here = make_sequence(0, 3, request_id=7)
    there = make_sequence(1, 3, request_id=8, source=b"other", sample=2)
    here.num_prompt_tokens = 1
    here.cached_tokens = 4
    first, second = ending_deltas(
        [Ending(here, FinishReason.TIMEOUT), Ending(there, ErrorCode.NUMERIC)]
    )
    assert (first.source, unpack_int64(first.deltas.requests)) == (b"frontend", [7])
    assert unpack_int32(first.deltas.first_index) == [2]
    assert unpack_int32(first.deltas.counts) == [0]
    assert unpack_int32(first.deltas.cached_tokens) == [4]
    assert unpack_int32(first.deltas.reasons) == [FinishReason.TIMEOUT]
    assert (second.source, unpack_int32(second.deltas.samples)) == (b"other", [2])
    assert unpack_int32(second.deltas.reasons) == [ErrorCode.NUMERIC]


def test_a_resumed_sequence_repeats_what_its_frontend_lacks():
    one = make_sequence(0, 5, request_id=7)
    one.num_prompt_tokens = 2
    assert resumed_deltas(one, 3, None) == []
    ((source, deltas),) = resumed_deltas(one, 1, None)
    assert source == b"frontend"
    assert unpack_int32(deltas.first_index) == [1]
    assert unpack_int32(deltas.token_ids) == [3, 4]
    assert unpack_int32(deltas.reasons) == [0]
    ((_, ended),) = resumed_deltas(one, 3, FinishReason.LENGTH)
    assert unpack_int32(ended.counts) == [0]
    assert unpack_int32(ended.reasons) == [FinishReason.LENGTH]


def test_a_refusal_is_one_row_without_tokens():
    deltas = refusal(add_message(9, [1], sample=3, next_index=4), ErrorCode.OVERLOADED)
    assert unpack_int64(deltas.requests) == [9]
    assert unpack_int32(deltas.samples) == [3]
    assert unpack_int32(deltas.first_index) == [4]
    assert unpack_int32(deltas.counts) == [0]
    assert unpack_int32(deltas.reasons) == [ErrorCode.OVERLOADED]


LOGPROBS = LogprobColumns(
    rows=pack_int32([0, 2, 3]),
    positions=pack_int32([10, 12, 13]),
    n=pack_int32([1, 2, 3]),
    ids=pack_int32([5, 6, 7, 8, 9, 10]),
    values=pack_float32([-1, -2, -3, -4, -5, -6]),
)


def test_logprobs_of_the_rows_that_stay_are_renumbered():
    selected = select_logprobs(LOGPROBS, np.array([2, 3]), 4)
    assert unpack_int32(selected.rows) == [0, 1]
    assert unpack_int32(selected.positions) == [12, 13]
    assert unpack_int32(selected.n) == [2, 3]
    assert unpack_int32(selected.ids) == [6, 7, 8, 9, 10]
    assert unpack_float32(selected.values) == [-2, -3, -4, -5, -6]


def test_rows_without_logprobs_have_none():
    assert select_logprobs(LOGPROBS, np.array([1]), 4) is None
