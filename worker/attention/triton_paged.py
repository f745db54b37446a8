"""Our own paged kernels, in Triton: any CUDA GPU, any dtype, blocks in multiples of 16."""

import torch
from torch import Tensor

from worker.attention.base import DecodeRows
from worker.attention.paged import DecodeKernel
from worker.batch import ChunkBatch
from worker.kernels import decode_attention, decode_tuning, prefill_attention
from worker.kv_cache import KVCacheShape


class TritonKernels:
    """`PagedKernels` of our own."""

    def __init__(
        self, shape: KVCacheShape, num_heads: int, dtype: torch.dtype, *, num_processors: int
    ) -> None:
        self._shape = shape
        self._num_heads = num_heads
        self._dtype = dtype
        self._num_processors = num_processors

    def start_decode(self, rows: DecodeRows) -> DecodeKernel:
        """Decide how rows are split, and take memory for it."""
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
        )

    def attend_fresh(
        self, query: Tensor, keys: Tensor, values: Tensor, chunks: ChunkBatch
    ) -> Tensor:
        """Attend to chunks that start their sequences: [rows, heads or kv_heads, head_dim]."""
        return prefill_attention.attend_chunks(
            query,
            keys,
            values,
            chunks.query_starts,
            tuning=self._prefill_tuning(query, chunks),
        )

    def attend_paged(
        self, query: Tensor, keys: Tensor, values: Tensor, chunks: ChunkBatch
    ) -> Tensor:
        """Attend to chunks over the layer's cache. query [rows, heads, head_dim] -> the same"""
        return prefill_attention.attend_paged_chunks(
            query,
            keys,
            values,
            chunks.query_starts,
            chunks.lengths,
            chunks.block_tables,
            tuning=self._prefill_tuning(query, chunks),
        )

    def _prefill_tuning(self, query: Tensor, chunks: ChunkBatch) -> prefill_attention.PrefillTuning:
        return prefill_attention.choose_tuning(
            len(query), len(chunks.lengths), self._shape.head_dim, self._dtype
        )
