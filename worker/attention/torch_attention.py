"""The reference back end: plain torch, any device and dtype, eager.

Decode rows are gathered from the cache into one contiguous buffer per group of similar lengths,

    gathered [2, rows · kv_heads, length, head_dim]     (one index_select of whole runs)

and attended to in two batched products, with the query heads that share a KV head as the rows of
its matrix. A mask hides what lies past a row's length; since a weight of zero times a foreign NaN
is NaN all the same, a block is zeroed when a step begins to fill it, and the rest of a block when
a chunk goes on in it, which may have been copied from another sequence.

A chunk that starts a sequence attends to its own fresh keys and values; any other gathers its
sequence's blocks (`worker.attention.torch_tiles`).

Layers of one window share indices and masks. They gather no blocks before those that reach into
the window.

A cache in fp8 is gathered as bytes and then converted. Keys and values are rounded in place before
they are attended to, so that a chunk that starts a sequence sees what later ones will gather.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.attention.base import LayerAttention, ProjectedHeads, StepAttention
from worker.attention.torch_tiles import (
    TileMasks,
    attend_fresh,
    attend_tiles,
    softmax_beside_sinks,
)
from worker.batch import ChunkRows, ForwardBatch
from worker.kv_cache import KVCache
from worker.kv_rounding import E4M3, round_to_e4m3
from worker.step_rows import Int32Array

BACK_END = "torch"

_MAX_GATHERED_BYTES = 64 << 20
"""Keys and values gathered at once, unless one row has more."""
_WORTH_SPLITTING = 1024
"""Padding positions that cost about as much as the operators of one more group."""


class TorchAttention:
    """Attention by torch's own operators."""

    def __init__(
        self,
        cache: KVCache,
        num_heads: int,
        layers: Sequence[LayerAttention],
        dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype` is the model's; None: the cache's, which is not in fp8."""
        dtype = dtype or cache.data.dtype
        assert dtype != E4M3, "nothing is computed in fp8"
        shape = cache.shape
        assert len(layers) == shape.num_layers, "every layer says how it attends"
        self._cache = cache
        self._num_heads = num_heads
        self._layers = tuple(layers)
        self._windows = tuple(dict.fromkeys(layer.window for layer in layers))
        # torch moves 8-bit floats only as bytes.
        is_rounded = cache.data.dtype == E4M3
        data = cache.data.view(torch.uint8) if is_rounded else cache.data
        self._pools = [layer.view(2 * shape.num_kv_heads, -1, shape.head_dim) for layer in data]
        """Per layer [2 · kv_heads, positions, head_dim]: what tokens are written to."""
        self._runs = [layer.view(-1, shape.block_size * shape.head_dim) for layer in data]
        """Per layer [2 · kv_heads · blocks, block_size · head_dim]: what gathers read."""
        self._block_bytes = shape.block_bytes(dtype) // shape.num_layers
        self._gathered = data.new_empty(0, shape.block_size * shape.head_dim, dtype=dtype)
        self._codes = torch.empty_like(self._gathered, dtype=torch.uint8) if is_rounded else None
        self._masks = TileMasks(self._gathered)

    def start_step(self, batch: ForwardBatch) -> StepAttention:
        """Compute the indices and masks that all layers of a step share."""
        shape = self._cache.shape
        self._cache.clear_blocks(batch.opened_blocks)
        for chunk in batch.chunks:
            number, offset = divmod(chunk.start, shape.block_size)
            if offset:
                self._cache.clear_tail(int(chunk.block_table[number]), offset)
        reaches = [self._reach(batch, window) for window in self._windows]
        self._reserve(reaches)
        output = self._gathered.new_zeros(batch.num_rows, self._num_heads * shape.head_dim)
        return _TorchStep(
            batch=batch,
            layers=self._layers,
            pools=self._pools,
            runs=self._runs,
            views={reach.window: self._view(batch, reach, output) for reach in reaches},
            masks=self._masks,
            output=output,
            is_rounded=self._codes is not None,
        )

    def _reach(self, batch: ForwardBatch, window: int | None) -> "_Reach":
        """Return which blocks the step's rows read in layers of a window."""
        size = self._cache.shape.block_size
        lengths, first_blocks = batch.decode_lengths, np.zeros_like(batch.decode_lengths)
        if window is not None:
            first_blocks = np.maximum(lengths - np.int32(min(window, 1 << 30)), 0) // size
            lengths = lengths - first_blocks * size
        return _Reach(
            window=window,
            first_blocks=first_blocks,
            lengths=lengths,
            groups=split_by_length(
                lengths,
                block_size=size,
                max_positions=_MAX_GATHERED_BYTES * size // self._block_bytes,
            ),
            chunk_blocks=[
                None
                if chunk.start == 0
                else range(
                    0 if window is None else max(0, chunk.start + 1 - window) // size,
                    len(chunk.block_table),
                )
                for chunk in batch.chunks
            ],
        )

    def _view(self, batch: ForwardBatch, reach: "_Reach", output: Tensor) -> "_View":
        """Return what layers of a window share."""
        return _View(
            groups=[self._group(batch, reach, rows, output) for rows in reach.groups],
            contexts=[
                None if blocks is None else self._context(chunk, blocks)
                for chunk, blocks in zip(batch.chunks, reach.chunk_blocks, strict=True)
            ],
        )

    def _group(
        self, batch: ForwardBatch, reach: "_Reach", rows: Int32Array, output: Tensor
    ) -> "_DecodeGroup":
        """Return what it takes to attend to decode rows of similar length together."""
        shape, device = self._cache.shape, output.device
        lengths = torch.from_numpy(reach.lengths[rows].astype(np.int64)).to(device)[:, None]
        num_blocks = reach.num_blocks(rows, shape.block_size)
        num_positions = num_blocks * shape.block_size
        row_index = torch.from_numpy(rows.astype(np.int64)).to(device)
        blocks = batch.decode_blocks.index_select(0, row_index)
        if reach.first_blocks[rows].any():
            # Past the table's end it is some block of the row's, and hidden.
            columns = reach.first_blocks[rows, None] + np.arange(num_blocks, dtype=np.int64)
            columns = np.minimum(columns, blocks.shape[1] - 1)
            blocks = blocks.gather(1, torch.from_numpy(columns).to(device))
        else:
            blocks = blocks[:, :num_blocks]

        positions = torch.arange(num_positions, device=device)
        is_hidden = positions >= lengths
        if reach.window is not None:
            is_hidden |= positions < lengths - reach.window
        mask = output.new_zeros(is_hidden.shape).masked_fill_(is_hidden, float("-inf"))
        queries_per_kv_head = self._num_heads // shape.num_kv_heads
        mask = mask[:, None, None].expand(-1, shape.num_kv_heads, queries_per_kv_head, -1)

        runs = self._run_gather(blocks)
        keys, values = runs.gathered.view(2, -1, num_positions, shape.head_dim)
        # One group is all decode rows in order: it writes its part of the output in place.
        is_whole = len(rows) == batch.num_decode
        part = output[: len(rows)] if is_whole else output.new_empty(len(rows), output.shape[1])
        return _DecodeGroup(
            rows=None if is_whole else row_index,
            runs=runs,
            mask=mask.reshape(len(keys), queries_per_kv_head, num_positions),
            keys=keys.transpose(1, 2),
            values=values,
            part=part,
            attended=part.view(len(keys), queries_per_kv_head, shape.head_dim),
        )

    def _context(self, chunk: ChunkRows, blocks: range) -> "_Context":
        """Return a sequence's blocks up to a chunk's end."""
        shape = self._cache.shape
        runs = self._run_gather(chunk.block_table[None, blocks.start :])
        num_positions = len(blocks) * shape.block_size
        keys, values = runs.gathered.view(2, shape.num_kv_heads, num_positions, shape.head_dim)
        return _Context(
            runs=runs,
            keys=keys,
            values=values,
            first_key=blocks.start * shape.block_size,
        )

    def _run_gather(self, blocks: Tensor) -> "_RunGather":
        """Gather the runs that hold blocks [rows, n]: keys, then values, by row, head, block."""
        heads = torch.arange(2 * self._cache.shape.num_kv_heads, device=blocks.device)
        num_pooled = self._cache.num_blocks + 1
        index = (heads.view(2, 1, -1, 1) * num_pooled + blocks[None, :, None, :]).flatten()
        codes = None if self._codes is None else self._codes[: len(index)]
        return _RunGather(index, self._gathered[: len(index)], codes)

    def _reserve(self, reaches: Sequence["_Reach"]) -> None:
        """Grow the buffer that steps share; fresh memory each step costs page faults."""
        shape = self._cache.shape
        num_blocks = [
            len(rows) * reach.num_blocks(rows, shape.block_size)
            for reach in reaches
            for rows in reach.groups
        ] + [len(blocks) for reach in reaches for blocks in reach.chunk_blocks if blocks]
        num_runs = 2 * shape.num_kv_heads * max(num_blocks, default=0)
        if len(self._gathered) < num_runs:
            self._gathered = self._gathered.new_empty(num_runs, self._gathered.shape[1])
            if self._codes is not None:
                self._codes = self._codes.new_empty(self._gathered.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reach:
    """Which blocks a step's rows read in layers of one window. On the host."""

    window: int | None
    first_blocks: Int32Array
    """[decode rows] each row's first, by its number in the sequence."""
    lengths: Int32Array
    """[decode rows] tokens from the beginning of that block on."""
    groups: Sequence[Int32Array]
    """Decode rows that are attended to together."""
    chunk_blocks: Sequence[range | None]
    """Of each chunk, by their numbers in the sequence; None for one that starts its sequence."""

    def num_blocks(self, rows: Int32Array, block_size: int) -> int:
        """Return how many blocks are read of each of these rows: the longest's."""
        return -(-int(self.lengths[rows].max()) // block_size)


@dataclass(frozen=True, slots=True)
class _RunGather:
    """Runs of a layer's cache, side by side."""

    index: Tensor
    """[runs] int64"""
    gathered: Tensor
    """[runs, block_size · head_dim], the buffer"""
    codes: Tensor | None
    """The same of bytes, where the cache is in fp8."""

    def read(self, runs: Tensor) -> None:
        """Fill the buffer from all of a layer's runs."""
        if self.codes is None:
            torch.index_select(runs, 0, self.index, out=self.gathered)
        else:
            torch.index_select(runs, 0, self.index, out=self.codes)
            self.gathered.copy_(self.codes.view(E4M3))


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecodeGroup:
    """Decode rows of similar length, attended to together; `length` is the longest's, in blocks."""

    rows: Tensor | None
    """[rows] int64 which decode rows; None: all of them in order."""
    runs: _RunGather
    """Of 2 · rows · kv_heads · blocks; keys and values view its buffer."""
    mask: Tensor
    """[rows · kv_heads, queries per KV head, length] 0, or -inf past a row's length."""
    keys: Tensor
    """[rows · kv_heads, head_dim, length]"""
    values: Tensor
    """[rows · kv_heads, length, head_dim]"""
    part: Tensor
    """[rows, heads · head_dim] where the result goes."""
    attended: Tensor
    """The same memory as [rows · kv_heads, queries per KV head, head_dim]."""

    def attend(
        self, runs: Tensor, query: Tensor, output: Tensor, scale: float, sinks: Tensor | None
    ) -> None:
        """Write the rows' attention into the output. query [decode rows, heads, head_dim]"""
        if self.rows is not None:
            query = query.index_select(0, self.rows)
        self.runs.read(runs)
        shape = self.attended.shape
        scores = torch.baddbmm(self.mask, query.reshape(shape), self.keys, alpha=scale)
        if sinks is None:
            weights = torch.softmax(scores, dim=-1)
        else:
            by_row = sinks.view(1, -1, shape[1]).expand(len(query), -1, -1)
            weights = softmax_beside_sinks(scores, by_row.reshape(-1, shape[1], 1))
        torch.bmm(weights, self.values, out=self.attended)
        if self.rows is not None:
            output.index_copy_(0, self.rows, self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Context:
    """A sequence's blocks, gathered for a chunk that does not start it."""

    runs: _RunGather
    """Of 2 · kv_heads · blocks; keys and values view its buffer."""
    keys: Tensor
    """[kv_heads, positions, head_dim]"""
    values: Tensor
    """[kv_heads, positions, head_dim]"""
    first_key: int
    """Position of the first key in the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """What a step's rows read in layers of one window."""

    groups: Sequence[_DecodeGroup]
    contexts: Sequence[_Context | None]
    """Of each chunk; None for one that starts its sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TorchStep:
    """`StepAttention` of `TorchAttention`."""

    batch: ForwardBatch
    layers: Sequence[LayerAttention]
    pools: Sequence[Tensor]
    runs: Sequence[Tensor]
    views: Mapping[int | None, _View]
    """By window."""
    masks: TileMasks
    output: Tensor
    """[rows, heads · head_dim]; every layer writes all rows but the padding, which stays zero."""
    is_rounded: bool
    """The cache is in fp8."""

    def attend(self, layer: int, projected: ProjectedHeads) -> Tensor:
        """Store, then attend: decode rows by group, chunks one by one."""
        projected.finish_()
        query, key_value, sinks = projected.query, projected.key_value, projected.sinks
        written = key_value
        if self.is_rounded:
            codes = round_to_e4m3(key_value)
            key_value.copy_(codes)
            written = codes.view(torch.uint8)
        written = written.flatten(1, 2)[: self.batch.num_tokens]
        self.pools[layer].index_copy_(1, self.batch.cache_positions, written.transpose(0, 1))
        how, runs = self.layers[layer], self.runs[layer]
        view = self.views[how.window]
        for group in view.groups:
            group.attend(runs, query[: self.batch.num_decode], self.output, how.scale, sinks)
        for chunk, context in zip(self.batch.chunks, view.contexts, strict=True):
            rows = slice(chunk.first_row, chunk.first_row + chunk.count)
            target = self.output[rows].view(query[rows].shape)
            if context is None:
                attend_fresh(query[rows], key_value[rows], target, how, sinks, self.masks)
            else:
                context.runs.read(runs)
                attend_tiles(
                    query[rows],
                    context.keys,
                    context.values,
                    target,
                    how,
                    sinks,
                    self.masks,
                    start=chunk.start,
                    first_key=context.first_key,
                )
        return self.output


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
