"""`PagedKernels` written out plainly, so that what surrounds a library's can be tested on CPU."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.attention_cases import plain_attention
from worker.attention.base import DecodeRows, LayerAttention
from worker.attention.paged import DecodeKernel
from worker.batch import ChunkBatch


class PlainKernels:
    def start_decode(self, rows: DecodeRows, windows: Sequence[int | None]) -> DecodeKernel:
        assert len(windows) == len(set(windows)) > 0
        return _Decode(rows, windows)

    def attend_fresh(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        chunks: ChunkBatch,
        how: LayerAttention,
        sinks: Tensor | None,
    ) -> Tensor:
        assert chunks.is_fresh
        starts = chunks.query_starts.tolist()
        contents = torch.stack((keys, values), dim=1)
        parts = [
            plain_attention(query[first:last], contents[first:last], 0, how=how, sinks=sinks)
            for first, last in itertools.pairwise(starts)
        ]
        return torch.cat(parts).view(query.shape)

    def attend_paged(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        chunks: ChunkBatch,
        how: LayerAttention,
        sinks: Tensor | None,
    ) -> Tensor:
        assert chunks.length_starts.diff().tolist() == chunks.lengths.tolist()
        assert chunks.max_length >= int(chunks.lengths.max())
        assert chunks.max_count >= int(chunks.query_starts.diff().max())
        starts = chunks.query_starts.tolist()
        parts = []
        for index, length in enumerate(chunks.lengths.tolist()):
            rows = query[starts[index] : starts[index + 1]]
            if not len(rows):
                continue
            contents = _gather(keys, values, chunks.block_tables[index], length)
            parts.append(plain_attention(rows, contents, length - len(rows), how=how, sinks=sinks))
        return torch.cat(parts).view(query.shape)


@dataclass
class _Decode:
    rows: DecodeRows
    windows: Sequence[int | None]

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        how: LayerAttention,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert how.window in self.windows
        output = torch.zeros_like(query)
        for index, length in enumerate(self.rows.lengths.tolist()):
            if length:
                contents = _gather(keys, values, self.rows.block_tables[index], length)
                attended = plain_attention(query[index], contents, length - 1, how=how, sinks=sinks)
                output[index] = attended.view(output[index].shape)
        return output


def _gather(keys: Tensor, values: Tensor, table: Tensor, length: int) -> Tensor:
    blocks = table[: -(-length // keys.shape[1])].long()
    return torch.stack([pool[blocks].flatten(0, 1)[:length] for pool in (keys, values)], dim=1)
