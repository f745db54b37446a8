"""Causal attention of chunks, over the step's own keys and values or over the paged KV cache.

    [tiles of queries, heads] programs, each one tile over all tiles of keys up to it

How many tiles there are depends on how many rows and chunks there are, not on the chunks' sizes: a
chunk's first one is numbered (its first row) / (queries of a tile) + (chunks before it), and a few
are nobody's.

Tiles of keys wholly before the tile of queries need no mask; those on the diagonal come last. With
a window the first are those that its edge runs through, and those before are never read.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.decode_attention import LOG2_E, SINK_SCALE, load_blocks

LEAST = tl.constexpr(-3e38)
"""Below any score that a weight could come of."""
_LONG_CHUNK = 32
"""Rows from which on a chunk is worth a large tile of queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTuning:
    """How the kernel goes about it; every legal value gives the same result up to rounding."""

    queries: int
    """Queries of a tile, a power of two from 16 on."""
    keys: int
    """Keys of a tile, a power of two from 16 on."""
    warps: int
    stages: int


def choose_tuning(rows: int, num_chunks: int, head_dim: int, dtype: torch.dtype) -> PrefillTuning:
    """Return the default for chunks of this many rows, with tiles that fit any GPU since Ampere."""
    if dtype == torch.float32:
        size = 32 if head_dim <= 128 else 16
        return PrefillTuning(queries=size, keys=size, warps=4, stages=2)
    if rows < _LONG_CHUNK * num_chunks:
        keys, stages = (64, 3) if head_dim <= 128 else (32, 3)
        return PrefillTuning(queries=16, keys=keys, warps=4, stages=stages)
    if head_dim <= 128:
        return PrefillTuning(queries=128, keys=64, warps=8, stages=3)
    return PrefillTuning(queries=64, keys=32, warps=4, stages=2)


def attend_chunks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_starts: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    tuning: PrefillTuning,
) -> Tensor:
    """Attend to chunks that start their sequences.

    `query` is [rows, heads, head_dim], `keys` and `values` [rows, kv_heads, head_dim] of the same
    strides, `query_starts` [chunks + 1] int32: the first row of each, then their number. `window`
    are the tokens that a row sees, itself included, `sinks` [heads]. Returns [rows, heads,
    head_dim].
    """
    assert keys.stride() == values.stride(), "keys and values lie alike"
    return _launch(
        query,
        keys,
        values,
        query_starts,
        query_starts,  # not read: a chunk's length is its count
        query_starts[:, None],  # not read: there are no blocks
        strides=(0, *keys.stride()),
        num_kv_heads=keys.shape[1],
        block_size=0,
        scale=scale,
        window=window,
        sinks=sinks,
        tuning=tuning,
    )


def attend_paged_chunks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    block_tables: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    tuning: PrefillTuning,
) -> Tensor:
    """Attend to chunks over a layer's cache, which holds them and what comes before them.

    `keys` and `values` are [blocks, block_size, kv_heads, head_dim] of the same strides, `lengths`
    [chunks] int32 tokens up to each chunk's end, `block_tables` [chunks, blocks] int32; the rest is
    as above.
    """
    assert keys.stride() == values.stride(), "keys and values lie alike"
    return _launch(
        query,
        keys,
        values,
        query_starts,
        lengths,
        block_tables,
        strides=keys.stride(),
        num_kv_heads=keys.shape[2],
        block_size=keys.shape[1],
        scale=scale,
        window=window,
        sinks=sinks,
        tuning=tuning,
    )


def _launch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    block_tables: Tensor,
    *,
    strides: tuple[int, ...],
    num_kv_heads: int,
    block_size: int,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    tuning: PrefillTuning,
) -> Tensor:
    rows, num_heads, head_dim = query.shape
    num_chunks = len(query_starts) - 1
    assert strides[3] == query.stride(2) == 1, "a head's numbers lie together"
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _attend_tile[(rows // tuning.queries + num_chunks, num_heads)](
        query,
        keys,
        values,
        query_starts,
        lengths,
        block_tables,
        output,
        sinks,
        *query.stride()[:2],
        *strides[:3],
        block_tables.stride(0),
        block_tables.shape[1],
        num_chunks,
        scale * LOG2_E,
        BLOCK_SIZE=block_size,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        DIMS=max(16, triton.next_power_of_2(head_dim)),
        QUERIES=tuning.queries,
        KEYS=tuning.keys,
        WINDOW=window or 0,
        STAGES=tuning.stages,
        num_warps=tuning.warps,
    )
    return output


@triton.jit(do_not_specialize=["table_width", "num_chunks"])
def _attend_tile(
    query,
    keys,
    values,
    query_starts,
    lengths,
    block_tables,
    output,
    sinks,
    query_row_stride,
    query_head_stride,
    block_stride,
    token_stride,
    head_stride,
    table_stride,
    table_width,
    num_chunks,
    score_scale,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend from one tile of a chunk's queries, by one head. Without blocks chunks are fresh."""
    # The last tiles have most to do: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    chunk = _find_chunk(tile, query_starts, num_chunks, QUERIES)
    first_row = tl.load(query_starts + chunk)
    tile -= first_row // QUERIES + chunk
    count = tl.load(query_starts + chunk + 1) - first_row
    if tile * QUERIES >= count:
        return
    if BLOCK_SIZE == 0:
        start = 0
        table = block_tables
        first_key = first_row.to(tl.int64) * token_stride + (head // GROUP) * head_stride
    else:
        start = tl.load(lengths + chunk) - count
        table = block_tables + chunk.to(tl.int64) * table_stride
        first_key = (head // GROUP).to(tl.int64) * head_stride
    keys += first_key
    values += first_key

    members = tile * QUERIES + tl.arange(0, QUERIES)
    dims = tl.arange(0, DIMS)
    is_part = (members < count)[:, None] & (dims < HEAD_DIM)[None, :]
    rows = first_row.to(tl.int64) + members
    query_at = rows * query_row_stride + head * query_head_stride
    queries = tl.load(query + query_at[:, None] + dims[None, :], mask=is_part, other=0.0)
    positions = start + members
    if WINDOW > 0:
        # Rows past the chunk's end would see nothing, and their sums be 0.
        positions = start + tl.minimum(members, count - 1)
    end = start + tl.minimum(count, (tile + 1) * QUERIES)
    # All queries of the tile see all keys up to the first one's own.
    seen_by_all = (start + tile * QUERIES + 1) // KEYS * KEYS

    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    attended = tl.zeros([QUERIES, DIMS], tl.float32)
    if sinks is not None:
        # The softmax begins with the head's sink.
        largest = (
            tl.zeros([QUERIES], tl.float32) + tl.load(sinks + head).to(tl.float32) * SINK_SCALE
        )
        total += 1.0
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(start + tile * QUERIES + 1 - WINDOW, 0) // KEYS * KEYS
    # One tile ahead of what they are for: keys must not wait for them.
    blocks = _load_blocks(table, begin, table_width, BLOCK_SIZE, KEYS)
    if WINDOW > 0:
        # The last query sees no less than the end less the window.
        edge = tl.minimum(tl.cdiv(tl.maximum(end - WINDOW, 0), KEYS) * KEYS, seen_by_all)
        for first in tl.range(begin, edge, KEYS, num_stages=STAGES):
            largest, total, attended = _attend_keys(
                queries,
                keys,
                values,
                blocks,
                first,
                end,
                positions,
                largest,
                total,
                attended,
                block_stride,
                token_stride,
                score_scale,
                BLOCK_SIZE,
                HEAD_DIM,
                DIMS,
                KEYS,
                WINDOW,
                IS_MASKED=True,
            )
            blocks = _load_blocks(table, first + KEYS, table_width, BLOCK_SIZE, KEYS)
        begin = edge
    for first in tl.range(begin, seen_by_all, KEYS, num_stages=STAGES):
        largest, total, attended = _attend_keys(
            queries,
            keys,
            values,
            blocks,
            first,
            end,
            positions,
            largest,
            total,
            attended,
            block_stride,
            token_stride,
            score_scale,
            BLOCK_SIZE,
            HEAD_DIM,
            DIMS,
            KEYS,
            WINDOW,
            IS_MASKED=False,
        )
        blocks = _load_blocks(table, first + KEYS, table_width, BLOCK_SIZE, KEYS)
    for first in tl.range(seen_by_all, end, KEYS, num_stages=STAGES):
        largest, total, attended = _attend_keys(
            queries,
            keys,
            values,
            blocks,
            first,
            end,
            positions,
            largest,
            total,
            attended,
            block_stride,
            token_stride,
            score_scale,
            BLOCK_SIZE,
            HEAD_DIM,
            DIMS,
            KEYS,
            WINDOW,
            IS_MASKED=True,
        )
        blocks = _load_blocks(table, first + KEYS, table_width, BLOCK_SIZE, KEYS)
    out_at = (rows * tl.num_programs(1) + head) * HEAD_DIM
    tl.store(
        output + out_at[:, None] + dims[None, :],
        (attended / total[:, None]).to(output.dtype.element_ty),
        mask=is_part,
    )


@triton.jit
def _find_chunk(tile, query_starts, num_chunks, QUERIES: tl.constexpr):
    """Return the chunk that a tile is of: the last whose first tile is not after it."""
    num_before = 0
    for first in tl.range(0, num_chunks, 128):
        chunks = first + tl.arange(0, 128)
        is_chunk = chunks < num_chunks
        starts = tl.load(query_starts + chunks, mask=is_chunk, other=0)
        is_before = is_chunk & (starts // QUERIES + chunks <= tile)
        num_before += tl.sum(is_before.to(tl.int32), axis=0)
    return num_before - 1


@triton.jit
def _load_blocks(table, first, table_width, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """Return the blocks of a tile of keys, or nothing of use where there are none."""
    blocks = first
    if BLOCK_SIZE > 0:
        blocks = load_blocks(table, first, table_width, BLOCK_SIZE, KEYS)
    return blocks


@triton.jit
def _attend_keys(
    queries,
    keys,
    values,
    blocks,
    first,
    end,
    positions,
    largest,
    total,
    attended,
    block_stride,
    token_stride,
    score_scale,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Take one tile of keys into the running softmax."""
    tokens = first + tl.arange(0, KEYS)
    dims = tl.arange(0, DIMS)
    is_held = tokens < end
    if BLOCK_SIZE == 0:
        key_at = tokens.to(tl.int64) * token_stride
    else:
        key_at = blocks.to(tl.int64) * block_stride + (tokens % BLOCK_SIZE) * token_stride
    # What lies past the end may be NaN, and 0 · NaN is NaN: it must not be loaded. Of a cache in
    # fp8 every number is one of the queries' dtype too.
    key = tl.load(
        keys + key_at[None, :] + dims[:, None],
        mask=is_held[None, :] & (dims < HEAD_DIM)[:, None],
        other=0.0,
    ).to(queries.dtype)
    value = tl.load(
        values + key_at[:, None] + dims[None, :],
        mask=is_held[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    ).to(queries.dtype)
    scores = tl.dot(queries, key, input_precision="ieee") * score_scale
    if IS_MASKED:
        is_seen = tokens[None, :] <= positions[:, None]
        if WINDOW > 0:
            is_seen = is_seen & (tokens[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(is_seen, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    if IS_MASKED and WINDOW > 0:
        # A query that has seen nothing yet: infinity less infinity would be no number.
        new_largest = tl.maximum(new_largest, LEAST)
    weights = tl.exp2(scores - new_largest[:, None])
    decay = tl.exp2(largest - new_largest)
    total = total * decay + tl.sum(weights, axis=1)
    attended = tl.dot(
        weights.to(value.dtype), value, attended * decay[:, None], input_precision="ieee"
    )
    return new_largest, total, attended
