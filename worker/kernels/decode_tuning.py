"""How the decode kernel divides a step's work: pure functions of the step's shape."""

from dataclasses import dataclass

import torch

_BYTES_IN_FLIGHT = 64 << 10
"""Shared memory that tiles may take by default: a processor has 99 KiB or more since Ampere, and on
Hopper three programs then share one."""
_PROGRAMS_PER_PROCESSOR = 4
_MIN_SPLITS = 8
"""Splits a row may have however many rows there are: one may be far longer than the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTuning:
    """How the kernel goes about it; every legal value gives the same result up to rounding."""

    tile: int
    """Tokens read at a time, a power of two from 16 on."""
    warps: int
    stages: int
    """One more than the tiles in shared memory, the one computed included."""
    split_length: int
    """Tokens of a split, a multiple of the tile; more in rows that would have too many splits."""
    combines_at_once: bool = True
    """Whether the last program of a row adds up its splits, rather than a second kernel."""


def choose_tuning(
    rows: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16
) -> DecodeTuning:
    """Return the default for a step's shape.

    Few programs are made many by short splits, for time is then latency; many are left with splits
    long enough for tiles to be under way all the time. As measured on an H200 for heads of 128
    (`python -m benchmarks.attention_speed`).
    """
    programs = rows * num_kv_heads
    if programs <= 16:
        tile, warps, split_length = 32, 2, 64
    elif programs <= 64:
        tile, warps, split_length = 32, 2, 32
    elif programs <= 256:
        tile, warps, split_length = 32, 2, 1024
    else:
        tile, warps, split_length = 64, 4, 1024
    tile_bytes = 2 * tile * (1 << (head_dim - 1).bit_length()) * dtype.itemsize
    while tile > 16 and 2 * tile_bytes > _BYTES_IN_FLIGHT:
        tile, tile_bytes = tile // 2, tile_bytes // 2
    stages = 1 + min(2, _BYTES_IN_FLIGHT // tile_bytes)
    return DecodeTuning(tile=tile, warps=warps, stages=stages, split_length=split_length)


def choose_num_splits(
    rows: int, num_kv_heads: int, capacity: int, num_processors: int, split_length: int
) -> int:
    """Return how many splits a row may have at most, in a step whose tables hold `capacity` tokens.

    As many as the tables have room for, but no more than fill the GPU.
    """
    filling = -(-_PROGRAMS_PER_PROCESSOR * num_processors // (rows * num_kv_heads))
    return max(1, min(-(-capacity // split_length), max(_MIN_SPLITS, filling)))
