"""What sequences have produced, on the way from the engine client to a surface.

A queue holds at most one delta for each sequence: what comes while its reader is busy is merged.
So a slow reader gets larger pieces, not a longer queue, and all memory is the output's own.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.columns import unpack_float32, unpack_int32, unpack_int64
from protocol.messages import ErrorInfo, FinishReason, LogprobColumns, TokenDeltas


class TokenLogprobs(NamedTuple):
    """The log-probabilities at one token's position: its own first, then the most likely ones."""

    ids: list[int]
    values: list[float]
    """As many; none for a prompt's first token, which nothing comes before."""
    position: int = 0
    """In prompt + output."""
    rank: int = 0
    """1: no token is likelier than its own, 2: one is …; 0: not counted."""


def logprobs_by_row(columns: LogprobColumns | None) -> dict[int, list[TokenLogprobs]]:
    """Return the entries of each row, in the order of its tokens."""
    by_row: dict[int, list[TokenLogprobs]] = {}
    if columns is None:
        return by_row
    ids, values = unpack_int32(columns.ids), unpack_float32(columns.values)
    rows = unpack_int32(columns.rows)
    ranks = unpack_int32(columns.ranks) if columns.ranks else [0] * len(rows)
    start = 0
    for row, position, count, rank in zip(
        rows, unpack_int32(columns.positions), unpack_int32(columns.n), ranks, strict=True
    ):
        end = start + count
        entry = TokenLogprobs(ids[start:end], values[start:end], position, rank)
        by_row.setdefault(row, []).append(entry)
        start = end
    return by_row


class DeltaRow(NamedTuple):
    """What `TokenDeltas` say of one sequence."""

    request_id: int
    sample: int
    first_index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]
    cached_tokens: int
    reason: int


def delta_rows(deltas: TokenDeltas) -> Iterator[DeltaRow]:
    """Return the rows of a scheduler's deltas."""
    token_ids = unpack_int32(deltas.token_ids)
    logprobs = logprobs_by_row(deltas.logprobs)
    prompt_logprobs = logprobs_by_row(deltas.prompt_logprobs)
    rows = zip(
        unpack_int64(deltas.requests),
        unpack_int32(deltas.samples),
        unpack_int32(deltas.first_index),
        unpack_int32(deltas.counts),
        unpack_int32(deltas.cached_tokens),
        unpack_int32(deltas.reasons),
        strict=True,
    )
    start = 0
    for row, (request_id, sample, first_index, count, cached, reason) in enumerate(rows):
        end = start + count
        yield DeltaRow(
            request_id,
            sample,
            first_index,
            token_ids[start:end],
            logprobs.get(row, []),
            prompt_logprobs.get(row, []),
            cached,
            reason,
        )
        start = end


@dataclass(slots=True, eq=False, kw_only=True)
class SampleDelta:
    """What one sample of a request has produced since its last delta."""

    request_id: int
    sample: int
    first_index: int
    """Index of the first of these tokens in the output."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One a token, if the request asks for them."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One a token of the prompt, if the request asks for them, in the sample's first delta."""
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None

    @property
    def is_last(self) -> bool:
        """Whether the sample has ended with this delta."""
        return self.finish_reason is not None or self.error is not None

    def merge(self, later: "SampleDelta") -> None:
        """Take in the same sample's next delta."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.prompt_logprobs += later.prompt_logprobs
        self.finish_reason = later.finish_reason
        self.error = later.error


class DeltaQueue:
    """Deltas of one or more requests for one reader."""

    def __init__(self) -> None:
        self._pending: dict[tuple[int, int], SampleDelta] = {}
        self._positions: dict[int, int] = {}
        self._news = asyncio.Event()

    def put(self, delta: SampleDelta) -> None:
        """Add a delta, or merge it with the one of its sample that still waits."""
        waiting = self._pending.setdefault((delta.request_id, delta.sample), delta)
        if waiting is not delta:
            waiting.merge(delta)
        self._news.set()

    def put_position(self, request_id: int, position: int) -> None:
        """Add a request's newest position in the scheduler's queue."""
        self._positions[request_id] = position
        self._news.set()

    def take_positions(self) -> dict[int, int]:
        """Return the positions that have come since the last call, by request."""
        positions, self._positions = self._positions, {}
        return positions

    def discard(self, request_id: int, sample: int) -> None:
        """Drop the delta of a sample that nobody wants any more."""
        self._pending.pop((request_id, sample), None)

    def nudge(self) -> None:
        """Wake the reader, deltas or not."""
        self._news.set()

    async def take(self) -> list[SampleDelta]:
        """Wait for news and return all deltas; none after a nudge, or if only positions came."""
        await self._news.wait()
        self._news.clear()
        deltas = list(self._pending.values())
        self._pending.clear()
        return deltas
