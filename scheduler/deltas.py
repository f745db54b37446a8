"""What a frontend is told: rows of new tokens and terminal reasons, as `TokenDeltas` columns."""

from array import array
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol.columns import pack_int32, pack_int64
from protocol.errors import ErrorCode
from protocol.messages import AddSequence, FinishReason, LogprobColumns, TokenDeltas
from scheduler.prefix import TokenArray
from scheduler.sequence import Sequence
from scheduler.slot_table import Audience

Reason = FinishReason | ErrorCode
"""How a sequence ended."""


class Addressed(NamedTuple):
    """Columns of new tokens, and the frontend they are for."""

    source: bytes
    deltas: TokenDeltas


class Ending(NamedTuple):
    """The last row of a sequence that ends outside the normal course of a step."""

    sequence: Sequence
    reason: Reason


def step_deltas(
    audience: Audience,
    first_index: NDArray[np.int32],
    tokens: NDArray[np.int32],
    reasons: NDArray[np.int32] | None,
    logprobs: LogprobColumns | None,
) -> Addressed:
    """Return one frontend's part of a step in which every row has one token.

    The arrays are about all rows of the step; `reasons` None means that nothing ended. `logprobs`
    are already this frontend's.
    """
    picks = audience.picks
    if picks is not None:
        first_index, tokens = first_index[picks], tokens[picks]
        reasons = None if reasons is None else reasons[picks]
    return Addressed(
        audience.source,
        TokenDeltas(
            requests=audience.requests,
            samples=audience.samples,
            first_index=first_index.tobytes(),
            counts=audience.ones,
            token_ids=tokens.tobytes(),
            logprobs=logprobs,
            cached_tokens=audience.cached_tokens,
            reasons=audience.zeros if reasons is None else reasons.tobytes(),
        ),
    )


def ending_deltas(endings: list[Ending]) -> list[Addressed]:
    """Return rows without tokens that say how sequences ended, grouped by frontend."""
    by_source: dict[bytes, list[Ending]] = {}
    for ending in endings:
        by_source.setdefault(ending.sequence.key.source, []).append(ending)
    return [
        Addressed(
            source,
            TokenDeltas(
                requests=pack_int64(ending.sequence.key.request_id for ending in group),
                samples=pack_int32(ending.sequence.key.sample for ending in group),
                first_index=pack_int32(ending.sequence.num_output_tokens for ending in group),
                counts=bytes(4 * len(group)),
                token_ids=b"",
                cached_tokens=pack_int32(ending.sequence.cached_tokens or 0 for ending in group),
                reasons=pack_int32(ending.reason for ending in group),
            ),
        )
        for source, group in by_source.items()
    ]


def resumed_deltas(
    sequence: Sequence, next_index: int, reason: FinishReason | None
) -> list[Addressed]:
    """Return the committed tokens that the frontend of a resumed sequence still lacks."""
    tokens = sequence.tokens[sequence.num_prompt_tokens + next_index :]
    if not tokens and reason is None:
        return []
    deltas = _single(sequence.key.request_id, sequence.key.sample, next_index, tokens, reason or 0)
    return [Addressed(sequence.key.source, deltas)]


def score_deltas(scored: list[tuple[Sequence, LogprobColumns]]) -> list[Addressed]:
    """Return rows without tokens that bring log-probabilities of prompts, one for each sequence."""
    deltas = []
    for sequence, columns in scored:
        key = sequence.key
        row = _single(key.request_id, key.sample, sequence.num_output_tokens, array("i"), 0)
        cached = pack_int32([sequence.cached_tokens or 0])
        row = msgspec.structs.replace(
            row,
            prompt_logprobs=msgspec.structs.replace(columns, rows=bytes(len(columns.rows))),
            cached_tokens=cached,
        )
        deltas.append(Addressed(key.source, row))
    return deltas


def refusal(message: AddSequence, code: ErrorCode) -> TokenDeltas:
    """Return the one row of a sequence that was not taken."""
    return _single(message.request_id, message.sample, message.next_index, array("i"), code)


def _single(
    request_id: int, sample: int, first_index: int, tokens: TokenArray, reason: int
) -> TokenDeltas:
    return TokenDeltas(
        requests=pack_int64([request_id]),
        samples=pack_int32([sample]),
        first_index=pack_int32([first_index]),
        counts=pack_int32([len(tokens)]),
        token_ids=tokens.tobytes(),
        cached_tokens=pack_int32([0]),
        reasons=pack_int32([reason]),
    )


def select_logprobs(
    columns: LogprobColumns, plan_rows: NDArray[np.intp], num_plan_rows: int
) -> LogprobColumns | None:
    """Return the entries of some of a plan's rows, numbered by their place in `plan_rows`."""
    new_row = np.full(num_plan_rows, -1, np.int32)
    new_row[plan_rows] = np.arange(len(plan_rows), dtype=np.int32)
    rows = new_row[np.frombuffer(columns.rows, np.int32)]
    stays = rows >= 0
    if not stays.any():
        return None
    return msgspec.structs.replace(pick_logprobs(columns, stays), rows=rows[stays].tobytes())


def pick_logprobs(columns: LogprobColumns, stays: NDArray[np.bool_]) -> LogprobColumns:
    """Return some of the entries."""
    widths = np.frombuffer(columns.n, np.int32)
    value_stays = np.repeat(stays, widths)
    return LogprobColumns(
        rows=np.frombuffer(columns.rows, np.int32)[stays].tobytes(),
        positions=np.frombuffer(columns.positions, np.int32)[stays].tobytes(),
        n=widths[stays].tobytes(),
        ids=np.frombuffer(columns.ids, np.int32)[value_stays].tobytes(),
        values=np.frombuffer(columns.values, np.float32)[value_stays].tobytes(),
        ranks=np.frombuffer(columns.ranks, np.int32)[stays].tobytes() if columns.ranks else b"",
    )
