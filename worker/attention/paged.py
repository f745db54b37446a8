"""Attention by a library's paged kernels: what FlashAttention 2 and 3 have in common.

Keys and values of a step are stored first, then decode rows and chunks are attended to, each by
one call of the library for all of their rows:

    decode rows             one query each, over the block table
    chunks, all from 0      many queries each, over the step's own keys and values: no blocks read
    chunks, some later      many queries each, over the block table

A kernel never reads past a row's length, so blocks need no clearing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from worker.attention.base import DecodeRows, StepAttention
from worker.batch import ChunkRows, ForwardBatch
from worker.kv_cache import KVCache, KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBatch:
    """All chunks of a step, for one call."""

    query_starts: Tensor
    """[chunks + 1] int32, the first row of each chunk among the chunks' rows, then their number."""
    lengths: Tensor
    """[chunks] int32, tokens up to the end of each chunk."""
    length_starts: Tensor
    """[chunks + 1] int32, running sums of the lengths, from 0."""
    block_tables: Tensor
    """[chunks, blocks] int32"""
    max_count: int
    """Rows of the longest chunk."""
    max_length: int
    """The largest of the lengths."""
    is_fresh: bool
    """Every chunk starts its sequence, so that lengths are counts."""


class DecodeKernel(Protocol):
    """Attends to decode rows, layer after layer of one step."""

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """query [rows, 1, heads, head_dim], the layer's cache twice -> query's shape"""
        ...


class PagedKernels(Protocol):
    """A library's kernels. A layer's cache is [blocks, block_size, kv_heads, head_dim]."""

    def start_decode(self, rows: DecodeRows) -> DecodeKernel:
        """Compute what all layers of a step share."""
        ...

    def attend_fresh(
        self, query: Tensor, keys: Tensor, values: Tensor, chunks: ChunkBatch
    ) -> Tensor:
        """Attend to chunks that start their sequences: [rows, heads or kv_heads, head_dim]."""
        ...

    def attend_paged(
        self, query: Tensor, keys: Tensor, values: Tensor, chunks: ChunkBatch
    ) -> Tensor:
        """Attend to chunks over the layer's cache. query [rows, heads, head_dim] -> the same"""
        ...


class PagedAttention:
    """The back end around a library's kernels. Its cache is blocks first."""

    def __init__(self, cache: KVCache, kernels: PagedKernels) -> None:
        assert cache.layout is KVLayout.BLOCKS_FIRST, "paged kernels read blocks first"
        self._kernels = kernels
        self._caches = [LayerCache(*layer) for layer in cache.data]

    def start_step(self, batch: ForwardBatch) -> StepAttention:
        """Gather what the two calls of a step need."""
        device = batch.positions.device
        lengths = torch.from_numpy(batch.decode_lengths).to(device)
        rows = DecodeRows(
            cache_positions=batch.cache_positions,
            lengths=lengths,
            block_tables=batch.decode_blocks.to(torch.int32),
        )
        return _PagedStep(
            caches=self._caches,
            cache_positions=batch.cache_positions,
            num_decode=batch.num_decode,
            decode=self._kernels.start_decode(rows) if batch.num_decode else None,
            kernels=self._kernels,
            chunks=batch_chunks(batch.chunks, device) if batch.chunks else None,
        )

    def start_decode(self, rows: DecodeRows) -> StepAttention:
        """Prepare a step of decode rows only, all of it on the device."""
        return _PagedStep(
            caches=self._caches,
            cache_positions=rows.cache_positions,
            num_decode=len(rows.lengths),
            decode=self._kernels.start_decode(rows),
            kernels=self._kernels,
            chunks=None,
        )


class LayerCache:
    """Keys and values of one layer, each [blocks, block_size, kv_heads, head_dim]."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        self.values = values
        self._flat_keys = keys.flatten(0, 1)
        self._flat_values = values.flatten(0, 1)

    def store(self, cache_positions: Tensor, key_value: Tensor) -> None:
        """Write rows, [rows, 2, kv_heads, head_dim], to cache positions, [rows] int64."""
        self._flat_keys.index_copy_(0, cache_positions, key_value[:, 0])
        self._flat_values.index_copy_(0, cache_positions, key_value[:, 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _PagedStep:
    """`StepAttention` of `PagedAttention`."""

    caches: Sequence[LayerCache]
    cache_positions: Tensor
    """[tokens] int64"""
    num_decode: int
    decode: DecodeKernel | None
    """None if there are no decode rows."""
    kernels: PagedKernels
    chunks: ChunkBatch | None
    """None if there are none."""

    def attend(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """Store, then attend: one call for decode rows, one for chunks."""
        cache, num_tokens = self.caches[layer], len(self.cache_positions)
        cache.store(self.cache_positions, key_value[:num_tokens])
        parts = []
        if self.decode is not None:
            decoded = self.decode(query[: self.num_decode, None], cache.keys, cache.values)
            parts.append(decoded.flatten(1))
        if self.chunks is not None:
            rows = slice(self.num_decode, num_tokens)
            parts.append(self._attend_chunks(cache, self.chunks, query[rows], key_value[rows]))
        if num_tokens < len(query):
            # Padding: what comes of it is dropped, but it must be finite.
            parts.append(query.new_zeros(len(query) - num_tokens, query.shape[1] * query.shape[2]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_chunks(
        self, cache: LayerCache, chunks: ChunkBatch, query: Tensor, key_value: Tensor
    ) -> Tensor:
        if chunks.is_fresh:
            keys, values = key_value.unbind(1)
            return self.kernels.attend_fresh(query, keys, values, chunks).flatten(1)
        return self.kernels.attend_paged(query, cache.keys, cache.values, chunks).flatten(1)


def batch_chunks(chunks: Sequence[ChunkRows], device: torch.device) -> ChunkBatch:
    """Gather chunks, at least one, for one call."""
    counts = [chunk.count for chunk in chunks]
    lengths = [chunk.end for chunk in chunks]
    sums = torch.zeros(2, len(chunks) + 1, dtype=torch.int32)
    sums[:, 1:] = torch.tensor([counts, lengths]).cumsum(1)
    starts = sums.to(device)
    return ChunkBatch(
        query_starts=starts[0],
        lengths=starts[1].diff(),
        length_starts=starts[1],
        block_tables=pad_sequence([chunk.block_table for chunk in chunks], batch_first=True).to(
            torch.int32
        ),
        max_count=max(counts),
        max_length=max(lengths),
        is_fresh=all(chunk.start == 0 for chunk in chunks),
    )
