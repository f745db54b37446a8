"""Our own paged kernels, in Triton: any CUDA GPU, any dtype, blocks in multiples of 16.

A cache in fp8 is read as such, and becomes the queries' dtype on its way to the tensor cores, which
changes no number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.attention.base import DecodeRows, LayerAttention
from worker.attention.paged import DecodeKernel
from worker.batch import ChunkBatch
from worker.kernels import decode_attention, decode_tuning, prefill_attention
from worker.kv_cache import KVCacheShape


class TritonKernels:
    """`PagedKernels` of our own."""

    def __init__(
        self, shape: KVCacheShape, num_heads: int, dtype: torch.dtype, *, num_processors: int
    ) -> None:
        """`dtype` is the queries', and what keys and values become where the cache is in fp8."""
        self._shape = shape
        self._num_heads = num_heads
        self._dtype = dtype
        self._num_processors = num_processors

    def start_decode(self, rows: DecodeRows, windows: Sequence[int | None]) -> DecodeKernel:
        """Decide how rows are split, for each window, and take memory for it."""
        by_window = {window: self._start(rows, window) for window in windows}
        return by_window[windows[0]] if len(by_window) == 1 else _ByWindow(by_window)

    def _start(self, rows: DecodeRows, window: int | None) -> decode_attention.SplitDecode:
        shape = self._shape
        tuning = decode_tuning.choose_tuning(
            len(rows.lengths), shape.num_kv_heads, shape.head_dim, self._dtype
        )
        return decode_attention.start_split_decode(
            rows.lengths,
            rows.block_tables,
            num_heads=self._num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=shape.block_size,
            num_processors=self._num_processors,
            tuning=tuning,
            window=window,
        )

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
        return prefill_attention.attend_chunks(
            query,
            keys,
            values,
            chunks.query_starts,
            scale=how.scale,
            window=how.window,
            sinks=sinks,
            tuning=self._prefill_tuning(query, chunks),
        )

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
        return prefill_attention.attend_paged_chunks(
            query,
            keys,
            values,
            chunks.query_starts,
            chunks.lengths,
            chunks.block_tables,
            scale=how.scale,
            window=how.window,
            sinks=sinks,
            tuning=self._prefill_tuning(query, chunks),
        )

    def _prefill_tuning(self, query: Tensor, chunks: ChunkBatch) -> prefill_attention.PrefillTuning:
        return prefill_attention.choose_tuning(
            len(query), len(chunks.lengths), self._shape.head_dim, self._dtype
        )


@dataclass(frozen=True, slots=True)
class _ByWindow:
    """Layers of different windows take turns."""

    kernels: Mapping[int | None, decode_attention.SplitDecode]

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        how: LayerAttention,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return self.kernels[how.window](query, keys, values, how, sinks)
