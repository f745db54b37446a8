"""The reference back end: plain torch, any device and dtype, eager.

Decode rows are gathered from the cache into one contiguous buffer per group of similar lengths,

    gathered [2, rows, kv_heads, length, head_dim]     (one index_select, whole runs of a block)

and attended to in two batched products, with the query heads that share a KV head as the rows of
its matrix. What lies in a sequence's last block past its length belongs to nobody: it is zeroed
in the buffer, since a foreign NaN times a weight of zero is still NaN.

A chunk that starts a sequence attends to its own fresh keys and values; any other gathers its
sequence's blocks and goes in tiles of queries, so that masks stay small.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import Tensor

from worker.attention.base import StepAttention
from worker.batch import ChunkRows, ForwardBatch
from worker.kv_cache import KVCache
from worker.step_rows import Int32Array

BACK_END = "torch"

_TILE_ROWS = 512
"""Queries of a chunk that attend at once."""
_MAX_GROUP_POSITIONS = 32_768
"""Cache positions gathered at once: 50 MB for SmolLM2 in float32."""
_WORTH_SPLITTING = 1024
"""Padding positions that cost about as much as one more group of about 80 µs."""


class TorchAttention:
    """Attention by torch's own operators."""

    def __init__(self, cache: KVCache, num_heads: int) -> None:
        shape = cache.shape
        self._num_heads = num_heads
        self._shape = shape
        self._num_pooled = cache.num_blocks + 1
        self._pools = [
            layer.view(2 * shape.num_kv_heads, -1, shape.head_dim) for layer in cache.data
        ]
        """Per layer [2 · kv_heads, positions, head_dim]: what tokens are written to."""
        self._runs = [layer.view(-1, shape.block_size * shape.head_dim) for layer in cache.data]
        """Per layer [2 · kv_heads · blocks, block_size · head_dim]: what gathers read."""
        self._gathered = cache.data.new_empty(0)
        self._mask = cache.data.new_empty(0, 0)

    def start_step(self, batch: ForwardBatch) -> StepAttention:
        """Compute the indices and masks that all layers of a step share."""
        device = batch.tokens.device
        groups = [
            self._group(batch, rows, device)
            for rows in split_by_length(batch.decode_lengths, self._shape.block_size)
        ]
        later = [chunk for chunk in batch.chunks if chunk.start > 0]
        self._reserve(groups, later)
        return _TorchStep(
            batch=batch,
            num_heads=self._num_heads,
            pools=self._pools,
            runs=self._runs,
            groups=groups,
            chunk_runs=[self._run_index(chunk.block_table[None]) for chunk in batch.chunks],
            gathered=self._gathered,
            mask=self._mask,
        )

    def _group(self, batch: ForwardBatch, rows: Int32Array, device: torch.device) -> "_DecodeGroup":
        """Return what it takes to attend to rows of similar length together."""
        shape = self._shape
        lengths = torch.from_numpy(batch.decode_lengths[rows].astype(np.int64)).to(device)
        num_blocks = -(-int(batch.decode_lengths[rows].max()) // shape.block_size)
        num_positions = num_blocks * shape.block_size
        row_index = torch.from_numpy(rows.astype(np.int64)).to(device)
        blocks = batch.decode_blocks.index_select(0, row_index)[:, :num_blocks]

        past = torch.arange(num_positions, device=device) >= lengths[:, None]
        mask = torch.zeros(past.shape, dtype=self._gathered.dtype, device=device)
        mask.masked_fill_(past, float("-inf"))
        queries_per_kv_head = self._num_heads // shape.num_kv_heads
        mask = mask[:, None, None].expand(-1, shape.num_kv_heads, queries_per_kv_head, -1)

        # Padding blocks are zeros already; only tails of last blocks need zeroing.
        in_last_block = (
            torch.arange(num_positions, device=device)
            < ((lengths + shape.block_size - 1) // shape.block_size * shape.block_size)[:, None]
        )
        row, position = (past & in_last_block).nonzero(as_tuple=True)
        heads = torch.arange(shape.num_kv_heads, device=device)
        tails = (row * shape.num_kv_heads + heads[:, None]) * num_positions + position
        values = tails + len(rows) * shape.num_kv_heads * num_positions
        is_whole = len(rows) == batch.num_decode
        return _DecodeGroup(
            num_rows=len(rows),
            num_positions=num_positions,
            runs=self._run_index(blocks),
            mask=mask.reshape(len(rows) * shape.num_kv_heads, queries_per_kv_head, -1),
            tails=torch.cat((tails, values)).flatten(),
            rows=None if is_whole else row_index,
        )

    def _run_index(self, blocks: Tensor) -> Tensor:
        """Return the runs that hold blocks [rows, n]: keys, then values, by row, head, block."""
        heads = torch.arange(2 * self._shape.num_kv_heads, device=blocks.device)
        by_side = heads.view(2, 1, -1, 1) * self._num_pooled + blocks[None, :, None, :]
        return by_side.flatten()

    def _reserve(self, groups: Sequence["_DecodeGroup"], later: Sequence[ChunkRows]) -> None:
        """Grow the buffers that steps share; fresh memory each step costs page faults."""
        block_size = self._shape.block_size
        runs = [len(group.runs) for group in groups] + [
            2 * self._shape.num_kv_heads * len(chunk.block_table) for chunk in later
        ]
        most = max(runs, default=0)
        if self._gathered.shape[0] < most:
            self._gathered = self._gathered.new_empty(most, block_size * self._shape.head_dim)
        width = max((chunk.end for chunk in later), default=0)
        if self._mask.shape[1] < width:
            mask = self._mask.new_full((_TILE_ROWS, width), float("-inf"))
            self._mask = mask.triu_(width - _TILE_ROWS + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecodeGroup:
    """Decode rows of similar length, attended to together."""

    num_rows: int
    num_positions: int
    """Of the longest row, up to the end of its last block."""
    runs: Tensor
    """[2 · num_rows · kv_heads · blocks] int64"""
    mask: Tensor
    """[num_rows · kv_heads, queries per KV head, num_positions] 0, or -inf past the length."""
    tails: Tensor
    """Rows of the gathered [.., head_dim] to zero, int64."""
    rows: Tensor | None
    """[num_rows] int64 decode rows; None: all of them in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TorchStep:
    """`StepAttention` of `TorchAttention`."""

    batch: ForwardBatch
    num_heads: int
    pools: Sequence[Tensor]
    runs: Sequence[Tensor]
    groups: Sequence[_DecodeGroup]
    chunk_runs: Sequence[Tensor]
    gathered: Tensor
    mask: Tensor

    def attend(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """Store, then attend: decode rows by group, chunks one by one; padding rows get zeros."""
        batch = self.batch
        num_tokens, num_decode = batch.num_tokens, batch.num_decode
        rows, _, kv_heads, head_dim = key_value.shape
        written = key_value.view(rows, 2 * kv_heads, head_dim)[:num_tokens]
        self.pools[layer].index_copy_(1, batch.cache_positions, written.transpose(0, 1))

        output = query.new_empty(rows, self.num_heads * head_dim)
        if rows > num_tokens:
            output[num_tokens:] = 0
        for group in self.groups:
            if group.rows is None:
                self._decode(group, self.runs[layer], query[:num_decode], output[:num_decode])
            else:
                part = output.new_empty(group.num_rows, self.num_heads * head_dim)
                self._decode(group, self.runs[layer], query.index_select(0, group.rows), part)
                output.index_copy_(0, group.rows, part)
        for chunk, runs in zip(batch.chunks, self.chunk_runs, strict=True):
            chunk_rows = slice(chunk.first_row, chunk.first_row + chunk.count)
            target = output[chunk_rows].view(chunk.count, self.num_heads, head_dim)
            if chunk.start == 0:
                _attend_fresh(query[chunk_rows], key_value[chunk_rows], target)
            else:
                self._attend_later(chunk, runs, self.runs[layer], query[chunk_rows], target)
        return output

    def _decode(self, group: _DecodeGroup, runs: Tensor, query: Tensor, output: Tensor) -> None:
        """Attend one group. query [rows, heads, head_dim], output [rows, heads · head_dim]"""
        head_dim = query.shape[2]
        gathered = self.gathered[: len(group.runs)]
        torch.index_select(runs, 0, group.runs, out=gathered)
        gathered.view(-1, head_dim).index_fill_(0, group.tails, 0)
        keys, values = gathered.view(2, -1, group.num_positions, head_dim)
        by_kv_head = (len(keys), -1, head_dim)  # [rows · kv_heads, queries per KV head, head_dim]
        scores = torch.baddbmm(
            group.mask, query.reshape(by_kv_head), keys.transpose(1, 2), alpha=head_dim**-0.5
        )
        torch.bmm(torch.softmax(scores, dim=-1), values, out=output.view(by_kv_head))

    def _attend_later(
        self, chunk: ChunkRows, index: Tensor, runs: Tensor, query: Tensor, target: Tensor
    ) -> None:
        """Attend a chunk, [count, heads, head_dim], whose sequence has earlier tokens."""
        head_dim = query.shape[2]
        gathered = self.gathered[: len(index)]
        torch.index_select(runs, 0, index, out=gathered)
        num_positions = len(chunk.block_table) * (gathered.shape[1] // head_dim)
        keys, values = gathered.view(2, 1, -1, num_positions, head_dim)
        width = self.mask.shape[1]
        for first in range(0, chunk.count, _TILE_ROWS):
            last = min(first + _TILE_ROWS, chunk.count)
            end = chunk.start + last
            attended = F.scaled_dot_product_attention(
                query[first:last].transpose(0, 1)[None],
                keys[:, :, :end],
                values[:, :, :end],
                # Aligned at its lower right corner, one mask serves every tile.
                attn_mask=self.mask[_TILE_ROWS - (last - first) :, width - end :],
                enable_gqa=True,
            )
            target[first:last] = attended[0].transpose(0, 1)


def _attend_fresh(query: Tensor, key_value: Tensor, target: Tensor) -> None:
    """Attend a chunk that starts its sequence: it needs nothing but itself."""
    keys, values = key_value.transpose(0, 2)[None].unbind(2)
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys, values, is_causal=True, enable_gqa=True
    )
    target.copy_(attended[0].transpose(0, 1))


def split_by_length(lengths: Int32Array, block_size: int) -> list[Int32Array]:
    """Return groups of rows [n] such that padding each to its longest wastes little.

    The rows of a group are read at the length of its longest, so one long row among many short
    ones would have all of them read as long.
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
        if index > bounds[-1] and (is_wasteful or size > _MAX_GROUP_POSITIONS):
            bounds.append(index)
            waste = 0
    bounds.append(len(order))
    if len(bounds) == 2:
        # Keep the rows in order: attention then needs neither gather nor scatter of rows.
        return [np.arange(len(order), dtype=np.int32)] if len(order) else []
    return [order[first:last] for first, last in itertools.pairwise(bounds)]
