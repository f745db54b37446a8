"""The reference back end: plain torch, any device and dtype, eager.

Decode rows are gathered from the cache into one contiguous buffer per group of similar lengths,

    gathered [2, rows · kv_heads, length, head_dim]     (one index_select of whole runs)

and attended to in two batched products, with the query heads that share a KV head as the rows of
its matrix. A mask hides what lies past a row's length; since a weight of zero times a foreign NaN
is NaN all the same, a block is zeroed when a step begins to fill it, and the rest of a block when
a chunk goes on in it, which may have been copied from another sequence.

A chunk that starts a sequence attends to its own fresh keys and values; any other gathers its
sequence's blocks and goes in tiles of queries, so that masks stay small.
"""

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from worker.attention.base import LayerAttention, ProjectedHeads, StepAttention
from worker.batch import ChunkRows, ForwardBatch
from worker.kv_cache import KVCache
from worker.step_rows import Int32Array

BACK_END = "torch"

_TILE_ROWS = 512
"""Queries of a chunk that attend at once."""
_MAX_GATHERED_BYTES = 64 << 20
"""Keys and values gathered at once, unless one row has more."""
_WORTH_SPLITTING = 1024
"""Padding positions that cost about as much as the operators of one more group."""


class TorchAttention:
    """Attention by torch's own operators."""

    def __init__(self, cache: KVCache, num_heads: int, layers: Sequence[LayerAttention]) -> None:
        shape = cache.shape
        assert len(layers) == shape.num_layers, "every layer says how it attends"
        self._cache = cache
        self._num_heads = num_heads
        self._pools = [
            layer.view(2 * shape.num_kv_heads, -1, shape.head_dim) for layer in cache.data
        ]
        """Per layer [2 · kv_heads, positions, head_dim]: what tokens are written to."""
        self._runs = [layer.view(-1, shape.block_size * shape.head_dim) for layer in cache.data]
        """Per layer [2 · kv_heads · blocks, block_size · head_dim]: what gathers read."""
        self._block_bytes = shape.block_bytes(cache.data.dtype) // shape.num_layers
        self._gathered = cache.data.new_empty(0, shape.block_size * shape.head_dim)
        self._mask = cache.data.new_empty(_TILE_ROWS, 0)

    def start_step(self, batch: ForwardBatch) -> StepAttention:
        """Compute the indices and masks that all layers of a step share."""
        shape = self._cache.shape
        self._cache.clear_blocks(batch.opened_blocks)
        for chunk in batch.chunks:
            number, offset = divmod(chunk.start, shape.block_size)
            if offset:
                self._cache.clear_tail(int(chunk.block_table[number]), offset)
        groups = split_by_length(
            batch.decode_lengths,
            block_size=shape.block_size,
            max_positions=_MAX_GATHERED_BYTES * shape.block_size // self._block_bytes,
        )
        later = [chunk for chunk in batch.chunks if chunk.start > 0]
        self._reserve(batch, groups, later)
        output = self._cache.data.new_zeros(batch.num_rows, self._num_heads * shape.head_dim)
        return _TorchStep(
            batch=batch,
            pools=self._pools,
            runs=self._runs,
            groups=[self._group(batch, rows, output) for rows in groups],
            chunks=[self._chunk(chunk) for chunk in batch.chunks],
            mask=self._mask,
            output=output,
        )

    def _group(self, batch: ForwardBatch, rows: Int32Array, output: Tensor) -> "_DecodeGroup":
        """Return what it takes to attend to decode rows of similar length together."""
        shape, device = self._cache.shape, output.device
        lengths = torch.from_numpy(batch.decode_lengths[rows].astype(np.int64)).to(device)
        num_blocks = -(-int(batch.decode_lengths[rows].max()) // shape.block_size)
        num_positions = num_blocks * shape.block_size
        row_index = torch.from_numpy(rows.astype(np.int64)).to(device)
        blocks = batch.decode_blocks.index_select(0, row_index)[:, :num_blocks]

        past = torch.arange(num_positions, device=device) >= lengths[:, None]
        mask = output.new_zeros(past.shape).masked_fill_(past, float("-inf"))
        queries_per_kv_head = self._num_heads // shape.num_kv_heads
        mask = mask[:, None, None].expand(-1, shape.num_kv_heads, queries_per_kv_head, -1)

        index = self._run_index(blocks)
        gathered = self._gathered[: len(index)]
        keys, values = gathered.view(2, -1, num_positions, shape.head_dim)
        # One group is all decode rows in order: it writes its part of the output in place.
        is_whole = len(rows) == batch.num_decode
        part = output[: len(rows)] if is_whole else output.new_empty(len(rows), output.shape[1])
        return _DecodeGroup(
            rows=None if is_whole else row_index,
            index=index,
            mask=mask.reshape(len(keys), queries_per_kv_head, num_positions),
            gathered=gathered,
            keys=keys.transpose(1, 2),
            values=values,
            part=part,
            attended=part.view(len(keys), queries_per_kv_head, shape.head_dim),
        )

    def _chunk(self, rows: ChunkRows) -> "_Chunk":
        if rows.start == 0:
            return _Chunk(rows=rows, context=None)
        index = self._run_index(rows.block_table[None])
        gathered = self._gathered[: len(index)]
        num_positions = len(rows.block_table) * self._cache.shape.block_size
        keys, values = gathered.view(2, 1, -1, num_positions, self._cache.shape.head_dim)
        return _Chunk(
            rows=rows, context=_Context(index=index, gathered=gathered, keys=keys, values=values)
        )

    def _run_index(self, blocks: Tensor) -> Tensor:
        """Return the runs that hold blocks [rows, n]: keys, then values, by row, head, block."""
        heads = torch.arange(2 * self._cache.shape.num_kv_heads, device=blocks.device)
        num_pooled = self._cache.num_blocks + 1
        return (heads.view(2, 1, -1, 1) * num_pooled + blocks[None, :, None, :]).flatten()

    def _reserve(
        self, batch: ForwardBatch, groups: Sequence[Int32Array], later: Sequence[ChunkRows]
    ) -> None:
        """Grow the buffers that steps share; fresh memory each step costs page faults."""
        shape = self._cache.shape
        num_blocks = [len(chunk.block_table) for chunk in later] + [
            len(rows) * -(-int(batch.decode_lengths[rows].max()) // shape.block_size)
            for rows in groups
        ]
        num_runs = 2 * shape.num_kv_heads * max(num_blocks, default=0)
        if len(self._gathered) < num_runs:
            self._gathered = self._gathered.new_empty(num_runs, self._gathered.shape[1])
        width = max((chunk.end for chunk in later), default=0)
        if self._mask.shape[1] < width:
            mask = self._mask.new_full((_TILE_ROWS, width), float("-inf"))
            self._mask = mask.triu_(width - _TILE_ROWS + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecodeGroup:
    """Decode rows of similar length, attended to together; `length` is the longest's, in blocks."""

    rows: Tensor | None
    """[rows] int64 which decode rows; None: all of them in order."""
    index: Tensor
    """[2 · rows · kv_heads · blocks] int64, the runs to gather."""
    mask: Tensor
    """[rows · kv_heads, queries per KV head, length] 0, or -inf past a row's length."""
    gathered: Tensor
    """[2 · rows · kv_heads · blocks, block_size · head_dim] the buffer that the next two view."""
    keys: Tensor
    """[rows · kv_heads, head_dim, length]"""
    values: Tensor
    """[rows · kv_heads, length, head_dim]"""
    part: Tensor
    """[rows, heads · head_dim] where the result goes."""
    attended: Tensor
    """The same memory as [rows · kv_heads, queries per KV head, head_dim]."""

    def attend(self, runs: Tensor, query: Tensor, output: Tensor) -> None:
        """Write the rows' attention into the output. query [decode rows, heads, head_dim]"""
        if self.rows is not None:
            query = query.index_select(0, self.rows)
        torch.index_select(runs, 0, self.index, out=self.gathered)
        shape = self.attended.shape
        scores = torch.baddbmm(self.mask, query.reshape(shape), self.keys, alpha=shape[2] ** -0.5)
        torch.bmm(torch.softmax(scores, dim=-1), self.values, out=self.attended)
        if self.rows is not None:
            output.index_copy_(0, self.rows, self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Context:
    """A sequence's blocks, gathered for a chunk that does not start it."""

    index: Tensor
    """[2 · kv_heads · blocks] int64, the runs to gather."""
    gathered: Tensor
    """[2 · kv_heads · blocks, block_size · head_dim], the buffer; keys and values view it."""
    keys: Tensor
    """[1, kv_heads, positions, head_dim]"""
    values: Tensor
    """[1, kv_heads, positions, head_dim]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """A chunk and, unless it starts its sequence, what lies before it."""

    rows: ChunkRows
    context: _Context | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _TorchStep:
    """`StepAttention` of `TorchAttention`."""

    batch: ForwardBatch
    pools: Sequence[Tensor]
    runs: Sequence[Tensor]
    groups: Sequence[_DecodeGroup]
    chunks: Sequence[_Chunk]
    mask: Tensor
    output: Tensor
    """[rows, heads · head_dim]; every layer writes all rows but the padding, which stays zero."""

    def attend(self, layer: int, projected: ProjectedHeads) -> Tensor:
        """Store, then attend: decode rows by group, chunks one by one."""
        projected.finish_()
        query, key_value = projected.query, projected.key_value
        written = key_value.flatten(1, 2)[: self.batch.num_tokens]
        self.pools[layer].index_copy_(1, self.batch.cache_positions, written.transpose(0, 1))
        for group in self.groups:
            group.attend(self.runs[layer], query[: self.batch.num_decode], self.output)
        for chunk in self.chunks:
            rows = slice(chunk.rows.first_row, chunk.rows.first_row + chunk.rows.count)
            target = self.output[rows].view(query[rows].shape)
            if chunk.context is None:
                _attend_fresh(query[rows], key_value[rows], target)
            else:
                context = chunk.context
                torch.index_select(self.runs[layer], 0, context.index, out=context.gathered)
                self._attend_later(context, chunk.rows.start, query[rows], target)
        return self.output

    def _attend_later(self, context: _Context, start: int, query: Tensor, target: Tensor) -> None:
        """Attend a chunk, [count, heads, head_dim], that begins at position `start`."""
        width = self.mask.shape[1]
        for first in range(0, len(query), _TILE_ROWS):
            last = min(first + _TILE_ROWS, len(query))
            end = start + last
            attended = _attention(
                query[first:last].transpose(0, 1)[None],
                context.keys[:, :, :end],
                context.values[:, :, :end],
                # Aligned at its lower right corner, one mask serves every tile.
                mask=self.mask[_TILE_ROWS - (last - first) :, width - end :],
            )
            target[first:last] = attended[0].transpose(0, 1)


def _attend_fresh(query: Tensor, key_value: Tensor, target: Tensor) -> None:
    """Attend a chunk that starts its sequence: it needs nothing but itself."""
    keys, values = key_value.transpose(0, 2)[None].unbind(2)
    attended = _attention(query.transpose(0, 1)[None], keys, values, mask=None)
    target.copy_(attended[0].transpose(0, 1))


def _attention(query: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor | None) -> Tensor:
    """Attend through a mask, or causally without one. [1, heads, n, head_dim]"""
    with contextlib.ExitStack() as stack:
        if query.is_cuda:
            # torch's fused CUDA kernels want masks and rows aligned to 16 bytes, and fault on ours.
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )


def split_by_length(
    lengths: Int32Array, *, block_size: int, max_positions: int
) -> list[Int32Array]:
    """Return groups of rows [n] such that padding each to its longest wastes little.

    The rows of a group are read at the length of its longest, so one long row among many short
    ones would have all of them read as long. A group of several rows reads at most
    `max_positions`, padding included.
    """
    order = np.argsort(-lengths, kind="stable").astype(np.int32)
    padded = (-(-lengths[order] // block_size) * block_size).tolist()
    bounds = [0]
    waste = 0
    for index, positions in enumerate(padded):
        longest = padded[bounds[-1]]
        waste += longest - positions
        size = longest * (index + 1 - bounds[-1])
        is_wasteful = waste > _WORTH_SPLITTING and 2 * positions < longest
        if index > bounds[-1] and (is_wasteful or size > max_positions):
            bounds.append(index)
            waste = 0
    bounds.append(len(order))
    if len(bounds) == 2:
        # Keep the rows in order: attention then needs neither gather nor scatter of rows.
        return [np.arange(len(order), dtype=np.int32)] if len(order) else []
    return [order[first:last] for first, last in itertools.pairwise(bounds)]
