"""What sequences have produced, on the way from the engine client to a surface.

A queue holds at most one delta for each sequence: what comes while its reader is busy is merged.
So a slow reader gets larger pieces, not a longer queue, and all memory is the output's own.
"""

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.columns import unpack_float32, unpack_int32
from protocol.messages import ErrorInfo, FinishReason, LogprobColumns


class TokenLogprobs(NamedTuple):
    """The log-probabilities at one token's position: its own first, then the most likely ones."""

    ids: list[int]
    values: list[float]


def logprobs_by_row(columns: LogprobColumns) -> dict[int, list[TokenLogprobs]]:
    """Return the entries of each row, in the order of its tokens."""
    by_row: dict[int, list[TokenLogprobs]] = {}
    ids, values = unpack_int32(columns.ids), unpack_float32(columns.values)
    start = 0
    for row, count in zip(unpack_int32(columns.rows), unpack_int32(columns.n), strict=True):
        end = start + count
        by_row.setdefault(row, []).append(TokenLogprobs(ids[start:end], values[start:end]))
        start = end
    return by_row


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
