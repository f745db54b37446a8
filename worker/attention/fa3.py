"""FlashAttention 3 (module `flash_attn_interface`): Hopper, blocks of any size.

Before a call with varying lengths its kernels need a plan of which processor reads what. It
depends on the lengths and the window alone, so it is made once a step and used by all layers of a
window.

Over a cache in fp8 everything is in fp8: queries are rounded to e4m3, as are the softmax's weights
within the kernels, and the output is bfloat16. Scales are 1, which is what the library takes where
none are given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from flash_attn_interface import get_scheduler_metadata
from torch import Tensor

from worker.attention.base import DecodeRows, LayerAttention
from worker.attention.fa3_splits import chunk_splits, decode_splits
from worker.attention.paged import DecodeKernel
from worker.attention.sinks import share_with_sinks_
from worker.batch import ChunkBatch
from worker.kernels.fp8 import round_to_e4m3
from worker.kv_cache import KVCacheShape
from worker.kv_rounding import E4M3

_PACKS_GROUP = True
"""Whether the query heads of a KV head are one tile in decode rows: they read the same keys."""


class Fa3Kernels:
    """`PagedKernels` of FlashAttention 3."""

    def __init__(
        self, shape: KVCacheShape, num_heads: int, dtype: torch.dtype, *, num_processors: int
    ) -> None:
        """`dtype` is the cache's."""
        self._shape = shape
        self._num_heads = num_heads
        self._dtype = dtype
        self._num_processors = num_processors

    def start_decode(self, rows: DecodeRows, windows: Sequence[int | None]) -> DecodeKernel:
        """Plan the step's decode calls, on the device."""
        plans = {window: self._plan(rows, window) for window in windows}
        return _Decode(lengths=rows.lengths, block_tables=rows.block_tables, plans=plans)

    def _plan(self, rows: DecodeRows, window: int | None) -> "_Plan":
        num_rows, width = rows.block_tables.shape
        capacity = width * self._shape.block_size
        num_splits = decode_splits(
            num_rows,
            self._shape.num_kv_heads,
            _tokens_read(capacity, window),
            self._num_processors,
        )
        metadata: Tensor = get_scheduler_metadata(
            batch_size=num_rows,
            max_seqlen_q=1,
            max_seqlen_k=capacity,  # as the call itself derives it from the table
            num_heads_q=self._num_heads,
            num_heads_kv=self._shape.num_kv_heads,
            headdim=self._shape.head_dim,
            cache_seqlens=rows.lengths,
            qkv_dtype=self._dtype,
            page_size=self._shape.block_size,
            causal=False,
            window_size=_window_size(window),
            num_splits=num_splits,
            pack_gqa=_PACKS_GROUP,
        )
        return _Plan(metadata, num_splits)

    def attend_fresh(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        chunks: ChunkBatch,
        how: LayerAttention,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend to chunks that start their sequences: [rows, heads or kv_heads, head_dim].

        Not over a cache in fp8.
        """
        return _attend(
            query,
            keys,
            values,
            how,
            sinks,
            cu_seqlens_q=chunks.query_starts,
            cu_seqlens_k=chunks.query_starts,
            max_seqlen_q=chunks.max_count,
            max_seqlen_k=chunks.max_count,
            is_causal=True,
            num_splits=1,
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
        width = chunks.block_tables.shape[1]
        num_kv_heads, block_size = self._shape.num_kv_heads, self._shape.block_size
        num_splits = chunk_splits(
            len(query),
            self._num_heads // num_kv_heads,
            num_kv_heads,
            _tokens_read(width * block_size, how.window),
            self._num_processors,
        )
        return _attend(
            query,
            keys,
            values,
            how,
            sinks,
            seqused_k=chunks.lengths,
            page_table=chunks.block_tables,
            cu_seqlens_q=chunks.query_starts,
            max_seqlen_q=chunks.max_count,
            is_causal=True,
            num_splits=num_splits,
        )


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which processor reads what, in layers of one window."""

    metadata: Tensor
    num_splits: int


@dataclass(frozen=True, slots=True)
class _Decode:
    lengths: Tensor
    block_tables: Tensor
    plans: Mapping[int | None, _Plan]
    """By window."""

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        how: LayerAttention,
        sinks: Tensor | None = None,
    ) -> Tensor:
        plan = self.plans[how.window]
        return _attend(
            query,
            keys,
            values,
            how,
            sinks,
            seqused_k=self.lengths,
            page_table=self.block_tables,
            is_causal=False,  # its one query is the last token: nothing comes after it
            scheduler_metadata=plan.metadata,
            num_splits=plan.num_splits,
            pack_gqa=_PACKS_GROUP,
        )


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    how: LayerAttention,
    sinks: Tensor | None,
    **call: Tensor | int | bool,
) -> Tensor:
    """Call the library's operator, whose other arguments `call` names.

    Its Python functions wrap it for gradients, which takes the host longer than a short layer takes
    the GPU.
    """
    if keys.dtype == E4M3:
        query = round_to_e4m3(query)
    if how.window is not None:
        call["window_size_left"], call["window_size_right"] = _window_size(how.window)
    output: Tensor
    lse: Tensor
    output, lse, *_ = torch.ops.flash_attn_3.fwd(
        query, keys, values, softmax_scale=how.scale, **call
    )
    if sinks is None:
        return output
    # [heads, rows], or of decode rows [rows, heads, 1]
    return share_with_sinks_(output, lse.transpose(-2, -1), sinks)


def _window_size(window: int | None) -> tuple[int, int]:
    """Return how many tokens before and after its own a row sees, -1 for all.

    0 and all after its own are the same where a row is the last or the call is causal.
    """
    return (-1, -1) if window is None else (window - 1, 0)


def _tokens_read(capacity: int, window: int | None) -> int:
    """Return the most tokens that a row reads, about."""
    return capacity if window is None else min(capacity, window)
