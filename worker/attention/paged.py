"""Attention by a library's paged kernels: what FlashAttention 2 and 3 have in common.

Keys and values of a step are stored first, then decode rows and chunks are attended to, each by
one call of the library for all of their rows:

    decode rows             one query each, over the block table
    chunks, all from 0      many queries each, over the step's own keys and values: no blocks read
    chunks, some later      many queries each, over the block table

Where the cache is in fp8, chunks that start their sequences read the block table too. Else a token
would be computed from other keys and values when its prefix comes from the cache than when it does
not.

What lies in a block past a row's length is finite, but for keys of a cache in fp8, so blocks need
no clearing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from worker.attention.base import DecodeRows, LayerAttention, ProjectedHeads, StepAttention
from worker.batch import ChunkBatch, ForwardBatch
from worker.kv_cache import KVCache, KVLayout
from worker.kv_rounding import E4M3, round_to_e4m3


class DecodeKernel(Protocol):
    """Attends to decode rows, layer after layer of one step."""

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        how: LayerAttention,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query [rows, 1, heads, head_dim], the layer's cache twice -> query's shape

        The window is one of those that the kernel was started for. `sinks` are [heads].
        """
        ...


class PagedKernels(Protocol):
    """A library's kernels. A layer's cache is [blocks, block_size, kv_heads, head_dim]."""

    def start_decode(self, rows: DecodeRows, windows: Sequence[int | None], /) -> DecodeKernel:
        """Compute what all layers of a step share, whose windows these are, each once."""
        ...

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
        ...

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
        ...


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, each [blocks, block_size, kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor


class KVWriter(Protocol):
    """Finishes a layer's queries and keys, and writes keys and values to the cache.

    What is not finite is written as the largest number there is. It then fails the sequence that
    attends to it, and no other: kernels read whole blocks and give what lies past a row's length
    the weight 0, which times NaN would be NaN for whoever has the block next.

    A cache in fp8 has no number so large that it would fail anything. Its keys that are not finite
    become NaN: kernels overwrite the scores of what lies past a row's length.
    """

    def __call__(
        self, projected: ProjectedHeads, cache: LayerCache, cache_positions: Tensor
    ) -> None:
        """`cache_positions` [n] int64: where the first n rows' go; later rows' go nowhere."""
        ...


def write_by_torch(projected: ProjectedHeads, cache: LayerCache, cache_positions: Tensor) -> None:
    """`KVWriter` of torch's operators: any device and dtype."""
    projected.finish_()
    written = projected.key_value[: len(cache_positions)]
    if cache.keys.dtype == E4M3:
        # Before the values become finite, which is in place.
        keys = round_to_e4m3(written[:, 0])
        values = round_to_e4m3(written[:, 1].nan_to_num_(nan=torch.finfo(written.dtype).max))
        written = torch.stack((keys, values), dim=1).view(torch.uint8)
        cache = LayerCache(cache.keys.view(torch.uint8), cache.values.view(torch.uint8))
    else:
        written.nan_to_num_(nan=torch.finfo(written.dtype).max)
    cache.keys.flatten(0, 1).index_copy_(0, cache_positions, written[:, 0])
    cache.values.flatten(0, 1).index_copy_(0, cache_positions, written[:, 1])


class PagedAttention:
    """The back end around a library's kernels. Its cache is blocks first."""

    def __init__(
        self,
        cache: KVCache,
        kernels: PagedKernels,
        writer: KVWriter,
        layers: Sequence[LayerAttention],
    ) -> None:
        assert cache.layout is KVLayout.BLOCKS_FIRST, "paged kernels read blocks first"
        assert len(layers) == cache.shape.num_layers, "every layer says how it attends"
        self._kernels = kernels
        self._writer = writer
        self._caches = [LayerCache(*layer) for layer in cache.data]
        self._is_rounded = cache.data.dtype == E4M3
        self._layers = tuple(layers)
        self._windows = tuple(dict.fromkeys(layer.window for layer in layers))

    def start_step(self, batch: ForwardBatch) -> StepAttention:
        """Prepare the two calls of a step."""
        rows = DecodeRows(
            cache_positions=batch.cache_positions,
            lengths=batch.device_lengths,
            block_tables=batch.decode_blocks,
        )
        return _PagedStep(
            caches=self._caches,
            layers=self._layers,
            writer=self._writer,
            cache_positions=batch.cache_positions,
            num_decode=batch.num_decode,
            decode=self._start(rows) if batch.num_decode else None,
            kernels=self._kernels,
            chunks=batch.chunk_batch,
            is_rounded=self._is_rounded,
        )

    def start_decode(self, rows: DecodeRows) -> StepAttention:
        """Prepare a step of decode rows only, all of it on the device."""
        return _PagedStep(
            caches=self._caches,
            layers=self._layers,
            writer=self._writer,
            cache_positions=rows.cache_positions,
            num_decode=len(rows.lengths),
            decode=self._start(rows),
            kernels=self._kernels,
            chunks=None,
            is_rounded=self._is_rounded,
        )

    def start_chunks(self, chunks: ChunkBatch, cache_positions: Tensor) -> StepAttention:
        """Prepare a step of chunks only, all of it on the device."""
        return _PagedStep(
            caches=self._caches,
            layers=self._layers,
            writer=self._writer,
            cache_positions=cache_positions,
            num_decode=0,
            decode=None,
            kernels=self._kernels,
            chunks=chunks,
            is_rounded=self._is_rounded,
        )

    def _start(self, rows: DecodeRows) -> DecodeKernel:
        return self._kernels.start_decode(rows, self._windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PagedStep:
    """`StepAttention` of `PagedAttention`."""

    caches: Sequence[LayerCache]
    layers: Sequence[LayerAttention]
    writer: KVWriter
    cache_positions: Tensor
    """[tokens] int64"""
    num_decode: int
    decode: DecodeKernel | None
    """None if there are no decode rows."""
    kernels: PagedKernels
    chunks: ChunkBatch | None
    """None if there are none."""
    is_rounded: bool
    """The cache has other numbers than the step's keys and values."""

    def attend(self, layer: int, projected: ProjectedHeads) -> Tensor:
        """Store, then attend: one call for decode rows, one for chunks."""
        cache, how, num_tokens = self.caches[layer], self.layers[layer], len(self.cache_positions)
        self.writer(projected, cache, self.cache_positions)
        query, key_value, sinks = projected.query, projected.key_value, projected.sinks
        parts = []
        if self.decode is not None:
            rows = query[: self.num_decode, None]
            parts.append(self.decode(rows, cache.keys, cache.values, how, sinks).flatten(1))
        if (chunks := self.chunks) is not None:
            rows = query[self.num_decode : num_tokens]
            if chunks.is_fresh and not self.is_rounded:
                keys, values = key_value[self.num_decode : num_tokens].unbind(1)
                attended = self.kernels.attend_fresh(rows, keys, values, chunks, how, sinks)
            else:
                attended = self.kernels.attend_paged(
                    rows, cache.keys, cache.values, chunks, how, sinks
                )
            parts.append(attended.flatten(1))
        if num_tokens < len(query):
            # Padding: what comes of it is dropped, but it must be finite.
            parts.append(query.new_zeros(len(query) - num_tokens, query.shape[1] * query.shape[2]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
