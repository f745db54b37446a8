"""Attention of one query a row over the paged KV cache, fast where rows are few.

A row's tokens are split among programs, so that a GPU is full however few the rows. All query heads
that share a KV head are one tile of a product, so that the cache is read once:

    [kv_heads, rows, splits] programs ─► partial outputs, logarithms of weights' sums ─► output

The last program of a row and KV head to finish adds its partial outputs up, which saves a launch;
`combines_at_once` off, a second kernel does. A row of few tokens has one split, which writes the
output itself. How a row is split depends on its length and on the shape of the step alone. With a
window only the tiles that reach into it are split; those before are never read.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.attention.base import LayerAttention
from worker.kernels.decode_tuning import DecodeTuning, choose_num_splits
from worker.kernels.overlap import launch_options

LOG2_E = 1.4426950408889634
SINK_SCALE = tl.constexpr(LOG2_E)  # the same for kernels, whose exponentials are of two
_MIN_GROUP_ROWS = 16
"""Rows of the smallest product a tensor core does."""
_COMBINED_NUMBERS = 1024
"""Numbers of partial outputs that a warp adds up at a time: their loads are under way together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitDecode:
    """The kernel, set up for the rows of one step; its layers must run one after another."""

    lengths: Tensor
    """[rows] int32, tokens each row attends to; a row of none comes out as zeros."""
    block_tables: Tensor
    """[rows, blocks] int32"""
    window: int | None
    """Tokens a row sees, itself included; None: all."""
    tuning: DecodeTuning
    capacity: int
    """The most tokens that a row reads."""
    num_splits: int
    partials: Tensor
    """[rows, heads, splits, head_dim] float32, scratch"""
    logs: Tensor
    """[rows, heads, splits] float32, scratch"""
    arrivals: Tensor
    """[rows, kv_heads] int32, programs that have finished; zero before and after each call."""

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        how: LayerAttention,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend in one layer of this window. query [rows, 1, heads, head_dim] -> the same

        Keys and values are [blocks, block_size, kv_heads, head_dim] of like strides, sinks [heads].
        """
        assert how.window == self.window, "a layer's window is the one this was set up for"
        rows, _, num_heads, head_dim = query.shape
        block_size, num_kv_heads = keys.shape[1:3]
        width = self.block_tables.shape[1]
        assert keys.stride() == values.stride(), "keys and values lie alike"
        assert keys.stride(3) == query.stride(3) == 1, "a head's numbers lie together"
        assert self.block_tables.stride(1) == self.lengths.stride(0) == 1, "tables have no gaps"
        tuning, group = self.tuning, num_heads // num_kv_heads
        output = torch.empty((rows, 1, num_heads, head_dim), dtype=query.dtype, device=query.device)
        dims = max(16, triton.next_power_of_2(head_dim))
        members = triton.next_power_of_2(group)
        combined = _COMBINED_NUMBERS * tuning.warps // dims
        sizes = {
            "HEAD_DIM": head_dim,
            "DIMS": dims,
            "TILE": tuning.tile,
            "GROWS": self.num_splits * tuning.split_length < self.capacity,
            "WINDOW": self.window or 0,
        }
        _attend_split[(num_kv_heads, rows, self.num_splits)](
            query,
            keys,
            values,
            self.block_tables,
            self.lengths,
            output,
            self.partials,
            self.logs,
            self.arrivals,
            sinks,
            query.stride(0),
            query.stride(2),
            *keys.stride()[:3],
            self.block_tables.stride(0),
            width,
            self.num_splits,
            tuning.split_length,
            how.scale * LOG2_E,
            BLOCK_SIZE=block_size,
            GROUP=group,
            GROUP_ROWS=max(_MIN_GROUP_ROWS, members),
            MEMBERS=members,
            COMBINES=tuning.combines_at_once,
            COMBINED=max(1, combined // members),
            STAGES=tuning.stages,
            num_warps=tuning.warps,
            **sizes,
            **launch_options(query.device),
        )
        if self.num_splits > 1 and not tuning.combines_at_once:
            _combine_splits[(num_heads, rows)](
                self.lengths,
                output,
                self.partials,
                self.logs,
                self.num_splits,
                tuning.split_length,
                COMBINED=combined,
                num_warps=tuning.warps,
                **sizes,
            )
        return output


def start_split_decode(
    lengths: Tensor,
    block_tables: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    num_processors: int,
    tuning: DecodeTuning,
    window: int | None = None,
) -> SplitDecode:
    """Set the kernel up for a step's rows. All of it may be captured in a graph."""
    rows, width = block_tables.shape
    assert tuning.split_length % tuning.tile == 0, "a split is whole tiles"
    capacity = width * block_size
    if window is not None:
        # It may begin at the last token of a tile.
        capacity = min(capacity, window + tuning.tile - 1)
    num_splits = choose_num_splits(
        rows, num_kv_heads, capacity, num_processors, tuning.split_length
    )
    device = lengths.device
    logs = torch.empty((rows, num_heads, num_splits), dtype=torch.float32, device=device)
    return SplitDecode(
        lengths=lengths,
        block_tables=block_tables,
        window=window,
        tuning=tuning,
        capacity=capacity,
        num_splits=num_splits,
        partials=torch.empty((*logs.shape, head_dim), dtype=torch.float32, device=device),
        logs=logs,
        arrivals=torch.zeros((rows, num_kv_heads), dtype=torch.int32, device=device),
    )


@triton.jit(do_not_specialize=["table_width", "num_splits"])
def _attend_split(
    query,
    keys,
    values,
    block_tables,
    lengths,
    output,
    partials,
    logs,
    arrivals,
    sinks,
    query_row_stride,
    query_head_stride,
    block_stride,
    token_stride,
    head_stride,
    table_stride,
    table_width,
    num_splits,
    least_length,
    score_scale,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    MEMBERS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    GROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    COMBINES: tl.constexpr,
    COMBINED: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend to one split of one row by the query heads of one KV head. `sinks` may be None."""
    if PDL:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    num_kv_heads = tl.num_programs(0)
    length = tl.load(lengths + row)
    begin = _begin(length, TILE, WINDOW)
    split_length = _split_length(length - begin, num_splits, least_length, TILE, GROWS)
    first = begin + split * split_length
    # One tile ahead of what it is for, here as in the loop: keys wait for it, not it for them.
    table = block_tables + row.to(tl.int64) * table_stride
    blocks = load_blocks(table, first, table_width, BLOCK_SIZE, TILE)
    members = tl.arange(0, GROUP_ROWS)
    dims = tl.arange(0, DIMS)
    is_dim = dims < HEAD_DIM
    is_part = (members < GROUP)[:, None] & is_dim[None, :]
    head_at = kv_head * GROUP + members
    query_at = row.to(tl.int64) * query_row_stride + head_at * query_head_stride
    if PDL:
        # Lengths and tables are the step's, from before the chain; the query is the last kernel's.
        gdc_wait()
    queries = tl.load(query + query_at[:, None] + dims[None, :], mask=is_part, other=0.0)
    if (first >= length) & (split > 0):
        return
    last = tl.minimum(first + split_length, length)
    keys += kv_head * head_stride
    values += kv_head * head_stride

    largest = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    attended = tl.zeros([GROUP_ROWS, DIMS], tl.float32)
    if sinks is not None:
        # The first split's softmax begins with them, so that they count once.
        sink = tl.load(sinks + head_at, mask=members < GROUP, other=0.0).to(tl.float32)
        largest = tl.where(split == 0, sink * SINK_SCALE, largest)
        total = tl.where(split == 0, 1.0, total)
    for start in tl.range(first, last, TILE, num_stages=STAGES):
        tokens = start + tl.arange(0, TILE)
        is_held = tokens < last
        if WINDOW > 0:
            is_held = is_held & (tokens >= length - WINDOW)
        cache_at = blocks.to(tl.int64) * block_stride + (tokens % BLOCK_SIZE) * token_stride
        blocks = load_blocks(table, start + TILE, table_width, BLOCK_SIZE, TILE)
        # What lies past the row's end may be NaN, and 0 · NaN is NaN: it must not be loaded. Of a
        # cache in fp8 every number is one of the query's dtype too.
        key = tl.load(
            keys + cache_at[None, :] + dims[:, None],
            mask=is_held[None, :] & is_dim[:, None],
            other=0.0,
        ).to(queries.dtype)
        value = tl.load(
            values + cache_at[:, None] + dims[None, :],
            mask=is_held[:, None] & is_dim[None, :],
            other=0.0,
        ).to(queries.dtype)
        scores = tl.dot(queries, key, input_precision="ieee") * score_scale
        scores = tl.where(is_held[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_largest[:, None])
        decay = tl.exp2(largest - new_largest)
        total = total * decay + tl.sum(weights, axis=1)
        attended = tl.dot(
            weights.to(value.dtype), value, attended * decay[:, None], input_precision="ieee"
        )
        largest = new_largest

    attended = attended / tl.where(length > 0, total, 1.0)[:, None]
    row_heads = row.to(tl.int64) * (num_kv_heads * GROUP)
    if length - begin <= split_length:
        out_at = (row_heads + head_at) * HEAD_DIM
        tl.store(
            output + out_at[:, None] + dims[None, :],
            attended.to(output.dtype.element_ty),
            mask=is_part,
        )
    else:
        split_at = (row_heads + head_at) * num_splits + split
        tl.store(partials + split_at[:, None] * HEAD_DIM + dims[None, :], attended, mask=is_part)
        tl.store(logs + split_at, largest + tl.log2(total), mask=members < GROUP)
        if COMBINES:
            num_held = tl.cdiv(length - begin, split_length)
            # All threads' stores come before the one thread's atomic, which publishes them.
            tl.debug_barrier()
            arrival = arrivals + row * num_kv_heads + kv_head
            before = tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu")
            if before == num_held - 1:
                tl.store(arrival, 0)
                _combine_heads(
                    row_heads + kv_head * GROUP,
                    output,
                    partials,
                    logs,
                    num_held,
                    num_splits,
                    GROUP,
                    MEMBERS,
                    HEAD_DIM,
                    DIMS,
                    COMBINED,
                )


@triton.jit(do_not_specialize=["num_splits"])
def _combine_splits(
    lengths,
    output,
    partials,
    logs,
    num_splits,
    least_length,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    GROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    COMBINED: tl.constexpr,
):
    """Add up the splits of one row and query head."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    length = tl.load(lengths + row)
    held = length - _begin(length, TILE, WINDOW)
    split_length = _split_length(held, num_splits, least_length, TILE, GROWS)
    if held > split_length:
        _combine_heads(
            row.to(tl.int64) * tl.num_programs(0) + head,
            output,
            partials,
            logs,
            tl.cdiv(held, split_length),
            num_splits,
            1,
            1,
            HEAD_DIM,
            DIMS,
            COMBINED,
        )


@triton.jit
def _begin(length, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Return where the first tile begins that a row of this length sees anything of."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(length - WINDOW, 0) // TILE * TILE
    return begin


@triton.jit
def _split_length(held, num_splits, least_length, TILE: tl.constexpr, GROWS: tl.constexpr):
    """Return the tokens of a row's splits, whole tiles. `held` are those from its first tile on."""
    split_length = least_length
    if GROWS:
        split_length = tl.maximum(least_length, tl.cdiv(tl.cdiv(held, num_splits), TILE) * TILE)
    return split_length


@triton.jit
def load_blocks(table, first, table_width, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Return the block of a tile's tokens, or each token's where tiles may span blocks.

    Past the end of the table they are the last one's, and not to be used.
    """
    tokens = first
    if BLOCK_SIZE % TILE != 0:
        tokens = first + tl.arange(0, TILE)
    return tl.load(table + tl.minimum(tokens // BLOCK_SIZE, table_width - 1))


@triton.jit
def _combine_heads(
    first_head,
    output,
    partials,
    logs,
    num_held,
    num_splits,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    COMBINED: tl.constexpr,
):
    """Add up the splits of some heads of one row, weighted by their weights' sums."""
    members = tl.arange(0, MEMBERS)
    dims = tl.arange(0, DIMS)
    is_part = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    largest = tl.full([MEMBERS], float("-inf"), tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    attended = tl.zeros([MEMBERS, DIMS], tl.float32)
    for first in tl.range(0, num_held, COMBINED):
        splits = first + tl.arange(0, COMBINED)
        split_at = ((first_head + members) * num_splits)[:, None] + splits[None, :]
        is_held = (members < GROUP)[:, None] & (splits < num_held)[None, :]
        # Other processors wrote them: this one's L1 may hold older ones.
        log = tl.load(logs + split_at, mask=is_held, other=float("-inf"), cache_modifier=".cg")
        log = tl.where((members < GROUP)[:, None], log, 0.0)  # of no use, but a number
        part = tl.load(
            partials + split_at[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=is_held[:, :, None] & (dims < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_largest = tl.maximum(largest, tl.max(log, axis=1))
        weights = tl.exp2(log - new_largest[:, None])
        decay = tl.exp2(largest - new_largest)
        total = total * decay + tl.sum(weights, axis=1)
        attended = attended * decay[:, None] + tl.sum(weights[:, :, None] * part, axis=1)
        largest = new_largest
    out_at = ((first_head + members) * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(
        output + out_at,
        (attended / total[:, None]).to(output.dtype.element_ty),
        mask=is_part,
    )
