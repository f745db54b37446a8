"""FlashAttention 2 (package `flash_attn`): any GPU since Ampere, blocks in multiples of 256."""

from dataclasses import dataclass

from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

from worker.attention.base import DecodeRows
from worker.attention.paged import DecodeKernel
from worker.batch import ChunkBatch


class FlashAttnKernels:
    """`PagedKernels` of FlashAttention 2."""

    def start_decode(self, rows: DecodeRows) -> DecodeKernel:
        """There is nothing to compute: the library plans each call on the host."""
        return _Decode(lengths=rows.lengths, block_tables=rows.block_tables)

    def attend_fresh(
        self, query: Tensor, keys: Tensor, values: Tensor, chunks: ChunkBatch
    ) -> Tensor:
        """Attend to chunks that start their sequences: [rows, heads or kv_heads, head_dim]."""
        output: Tensor = flash_attn_varlen_func(
            query,
            keys,
            values,
            cu_seqlens_q=chunks.query_starts,
            cu_seqlens_k=chunks.query_starts,
            max_seqlen_q=chunks.max_count,
            max_seqlen_k=chunks.max_count,
            causal=True,
        )
        return output

    def attend_paged(
        self, query: Tensor, keys: Tensor, values: Tensor, chunks: ChunkBatch
    ) -> Tensor:
        """Attend to chunks over the layer's cache. query [rows, heads, head_dim] -> the same"""
        output: Tensor = flash_attn_varlen_func(
            query,
            keys,
            values,
            cu_seqlens_q=chunks.query_starts,
            cu_seqlens_k=chunks.length_starts,
            max_seqlen_q=chunks.max_count,
            max_seqlen_k=chunks.max_length,
            causal=True,
            block_table=chunks.block_tables,
        )
        return output


@dataclass(frozen=True, slots=True)
class _Decode:
    lengths: Tensor
    block_tables: Tensor

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        output: Tensor = flash_attn_with_kvcache(
            query,
            keys,
            values,
            cache_seqlens=self.lengths,
            block_table=self.block_tables,
            causal=False,  # its one query is the last token, which sees all
        )
        return output
