"""The first kernel of a decode step: from slots and positions to what the model reads.

One program a row. It reads a few numbers and the row's block table as far as it is used, and writes
the same: some hundred bytes a row, so the launch is all that it costs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 128
"""Blocks copied at once."""


def open_rows(
    slots: Tensor,
    positions: Tensor,
    last_tokens: Tensor,
    tables: Tensor,
    *,
    row_tables: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, positions, lengths and cache positions of rows; write their block tables.

    `slots` and `positions`, -1 for a row of padding, are [rows] int32; `last_tokens` is [slots]
    int64, `tables` [slots, width] int32, `row_tables` [rows, width] int32, of which only what a
    row's length reaches is written. Returns [rows] int64, int64, int32, int64.
    """
    num_rows = len(slots)
    tokens = torch.empty_like(slots, dtype=torch.int64)
    out_positions, cache_positions = torch.empty_like(tokens), torch.empty_like(tokens)
    lengths = torch.empty_like(slots)
    _open_rows[(num_rows,)](
        slots,
        positions,
        last_tokens,
        tables,
        tokens,
        out_positions,
        lengths,
        cache_positions,
        row_tables,
        tables.shape[1],
        BLOCK_SIZE=block_size,
        TILE=_TILE,
        num_warps=1,
    )
    return tokens, out_positions, lengths, cache_positions


@triton.jit
def _open_rows(
    slots,
    positions,
    last_tokens,
    tables,
    out_tokens,
    out_positions,
    out_lengths,
    out_cache_positions,
    out_tables,
    width,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row)
    held = tl.maximum(position, 0)
    tl.store(out_tokens + row, tl.load(last_tokens + slot))
    tl.store(out_positions + row, held.to(tl.int64))
    tl.store(out_lengths + row, position + 1)
    table = tables + slot * width
    block = tl.load(table + held // BLOCK_SIZE).to(tl.int64)
    tl.store(out_cache_positions + row, block * BLOCK_SIZE + held % BLOCK_SIZE)
    # One at least: a back end may look at the first block of a row without tokens.
    used = held // BLOCK_SIZE + 1
    out_table = out_tables + row.to(tl.int64) * width
    for start in range(0, used, TILE):
        at = start + tl.arange(0, TILE)
        tl.store(out_table + at, tl.load(table + at, mask=at < used), mask=at < used)
