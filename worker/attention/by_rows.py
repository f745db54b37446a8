"""Decode rows by one library's kernels where they are few, by another's where they are many.

Both read the same cache. Which one a step uses depends on its number of rows alone, so that a CUDA
graph and the same step run eagerly agree.
"""

from collections.abc import Sequence

from torch import Tensor

from worker.attention.base import DecodeRows, LayerAttention
from worker.attention.paged import DecodeKernel, PagedKernels
from worker.batch import ChunkBatch


class KernelsByRows:
    """`PagedKernels` of two libraries; chunks are the second one's."""

    def __init__(self, few: PagedKernels, many: PagedKernels, *, most_few: int) -> None:
        self._few = few
        self._many = many
        self._most_few = most_few

    def start_decode(self, rows: DecodeRows, windows: Sequence[int | None]) -> DecodeKernel:
        """Up to `most_few` rows are few, padding included."""
        kernels = self._few if len(rows.lengths) <= self._most_few else self._many
        return kernels.start_decode(rows, windows)

    def attend_fresh(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        chunks: ChunkBatch,
        how: LayerAttention,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend to chunks that start their sequences: [rows, heads or kv_heads, head_dim]."""
        return self._many.attend_fresh(query, keys, values, chunks, how, sinks)

    def attend_paged(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        chunks: ChunkBatch,
        how: LayerAttention,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend to chunks over the layer's cache. query [rows, heads, head_dim] -> the same"""
        return self._many.attend_paged(query, keys, values, chunks, how, sinks)
