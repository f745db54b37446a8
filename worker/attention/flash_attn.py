"""FlashAttention 2 (package `flash_attn`): any GPU since Ampere, blocks in multiples of 256."""

from collections.abc import Sequence
from dataclasses import dataclass

from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

from worker.attention.base import DecodeRows, LayerAttention
from worker.attention.paged import DecodeKernel
from worker.attention.sinks import share_with_sinks_
from worker.batch import ChunkBatch


class FlashAttnKernels:
    """`PagedKernels` of FlashAttention 2."""

    def start_decode(self, rows: DecodeRows, _: Sequence[int | None]) -> DecodeKernel:
        """There is nothing to compute: the library plans each call on the host."""
        return _Decode(lengths=rows.lengths, block_tables=rows.block_tables)

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
        return _attend_chunks(
            query,
            keys,
            values,
            how,
            sinks,
            cu_seqlens_q=chunks.query_starts,
            cu_seqlens_k=chunks.query_starts,
            max_seqlen_q=chunks.max_count,
            max_seqlen_k=chunks.max_count,
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
        return _attend_chunks(
            query,
            keys,
            values,
            how,
            sinks,
            cu_seqlens_q=chunks.query_starts,
            cu_seqlens_k=chunks.length_starts,
            max_seqlen_q=chunks.max_count,
            max_seqlen_k=chunks.max_length,
            block_table=chunks.block_tables,
        )


@dataclass(frozen=True, slots=True)
class _Decode:
    lengths: Tensor
    block_tables: Tensor

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        how: LayerAttention,
        sinks: Tensor | None = None,
    ) -> Tensor:
        output: Tensor
        lse: Tensor
        output, lse = flash_attn_with_kvcache(
            query,
            keys,
            values,
            cache_seqlens=self.lengths,
            block_table=self.block_tables,
            softmax_scale=how.scale,
            causal=False,  # its one query is the last token, which sees all
            window_size=_window_size(how),
            return_softmax_lse=True,
        )
        if sinks is None:
            return output
        return share_with_sinks_(output, lse.transpose(1, 2), sinks)  # lse [rows, heads, 1]


def _attend_chunks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    how: LayerAttention,
    sinks: Tensor | None,
    **which: Tensor | int,
) -> Tensor:
    """Call the library's function, to whose arguments `which` adds whose keys are whose."""
    output: Tensor
    lse: Tensor
    output, lse, _ = flash_attn_varlen_func(
        query,
        keys,
        values,
        softmax_scale=how.scale,
        causal=True,
        window_size=_window_size(how),
        return_attn_probs=True,  # of them it only returns the sums
        **which,
    )
    return output if sinks is None else share_with_sinks_(output, lse.T, sinks)  # [heads, rows]


def _window_size(how: LayerAttention) -> tuple[int, int]:
    """Return how many tokens before and after its own a row sees, -1 for all."""
    return (-1, -1) if how.window is None else (how.window - 1, 0)
