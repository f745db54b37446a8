"""Products with weights in 4 bits (`worker.layers.int4`).

`product`, for few rows: reading the codes is all the work. A program takes a tile of outputs and a
share of the inputs, turns codes into numbers of x's dtype in registers and multiplies on the tensor
cores, the weight's rows on the side where a tile is tall, as `worker.kernels.products` does. Where
outputs alone are too few for the GPU, inputs are divided among `split` programs, and the last of
them to finish adds the partial sums in their order; so results do not depend on who is faster.

`multiply_out`, for many rows: writes the weight as numbers, for the library's product.

A tile's inputs lie in one group, so that a scale is loaded once a channel and tile.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.kernels.overlap import launch_options
from worker.kernels.products import Scratch
from worker.layers.int4 import FEW_ROWS, LEAST_GROUP, Int4Weight

_MAX_BLOCK_K = 128
_BLOCK_N = 32
_PROGRAMS = 264
"""How many programs are enough for a GPU: two for each of an H200's multiprocessors."""
_MAX_SPLIT = 16


@dataclass(frozen=True, slots=True)
class Int4Setting:
    """How a product of few rows is divided among programs."""

    block_n: int
    block_m: int
    block_k: int
    split: int

    def num_tiles(self, rows: int, outputs: int) -> int:
        """Return how many tiles of results there are."""
        return -(-rows // self.block_m) * -(-outputs // self.block_n)

    def num_sums(self, rows: int, outputs: int) -> int:
        """Return how many partial sums are exchanged."""
        if self.split == 1:
            return 0
        return self.num_tiles(rows, outputs) * self.split * self.block_n * self.block_m


def choose_setting(rows: int, outputs: int, inputs: int, group: int) -> Int4Setting:
    """Return how to divide a product of up to `FEW_ROWS` rows.

    The division of the inputs does not depend on the rows, so a row's result does neither.
    """
    block_k = min(_MAX_BLOCK_K, group & -group)
    assert block_k >= LEAST_GROUP, f"groups of {group} are no multiple of {LEAST_GROUP}"
    tiles = triton.cdiv(outputs, _BLOCK_N)
    split = max(1, min(_MAX_SPLIT, _PROGRAMS // tiles, inputs // block_k // 2))
    block_m = min(max(triton.next_power_of_2(rows), 16), FEW_ROWS)
    return Int4Setting(_BLOCK_N, block_m, block_k, split)


def allocate_scratch(device: torch.device) -> Scratch:
    """Return scratch for all products of few rows: inputs are divided among so few programs."""
    return Scratch.allocate(_PROGRAMS * _BLOCK_N * FEW_ROWS, _PROGRAMS, device)


def product(
    x: Tensor,
    weight: Int4Weight,
    bias: Tensor | None,
    scratch: Scratch,
    out_dtype: torch.dtype,
    setting: Int4Setting | None = None,
) -> Tensor:
    """Return x · weightᵀ + bias, [rows, outputs], of few rows."""
    rows, inputs = x.shape
    outputs = len(weight.codes)
    setting = setting or choose_setting(rows, outputs, inputs, weight.group)
    assert x.stride(1) == 1, "a row's elements lie together"
    assert weight.group % setting.block_k == 0, "a tile lies in one group"
    assert scratch.sums.numel() >= setting.num_sums(rows, outputs), "too little scratch"
    if setting.split > 1:
        assert scratch.tickets.numel() >= setting.num_tiles(rows, outputs), "too few tickets"
    out = torch.empty(rows, outputs, dtype=out_dtype, device=x.device)
    grid = (
        triton.cdiv(rows, setting.block_m),
        triton.cdiv(outputs, setting.block_n),
        setting.split,
    )
    _tiles[grid](
        x,
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.scales if bias is None else bias,
        out,
        scratch.sums,
        scratch.tickets,
        rows,
        outputs,
        inputs,
        x.stride(0),
        GROUP=weight.group,
        BLOCK_N=setting.block_n,
        BLOCK_M=setting.block_m,
        BLOCK_K=setting.block_k,
        IS_SPLIT=setting.split > 1,
        HAS_BIAS=bias is not None,
        num_warps=4,
        num_stages=3,
        **launch_options(x.device),
    )
    return out


def multiply_out(weight: Int4Weight, out: Tensor) -> None:
    """Write what a weight's codes stand for into `out`, [outputs, inputs], contiguous."""
    outputs, inputs = out.shape
    block_k = min(_MAX_BLOCK_K, weight.group & -weight.group)
    grid = (inputs // block_k, triton.cdiv(outputs, _BLOCK_N))
    _write_tile[grid](
        weight.codes,
        weight.scales,
        weight.zeros,
        out,
        outputs,
        inputs,
        GROUP=weight.group,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=block_k,
        num_warps=4,
        **launch_options(out.device),
    )


@triton.jit
def _values(
    codes,
    scales,
    zeros,
    row,
    start,
    num_inputs,
    DTYPE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return a tile of the weight: rows `row`, int64, and inputs from `start` on."""
    words = start // 8 + tl.arange(0, BLOCK_K // 8)
    packed = tl.load(codes + row[:, None] * (num_inputs // 8) + words[None, :])
    # Within a word the lowest bits are the first input's.
    shifts = tl.arange(0, 8) * 4
    each = (packed[:, :, None] >> shifts[None, None, :]) & 15
    group = row * (num_inputs // GROUP) + start // GROUP
    scale = tl.load(scales + group).to(tl.float32)
    zero = tl.load(zeros + group).to(tl.float32)
    wide = tl.reshape(each, (BLOCK_N, BLOCK_K)).to(tl.float32)
    return ((wide - zero[:, None]) * scale[:, None]).to(DTYPE)


@triton.jit
def _write_tile(
    codes,
    scales,
    zeros,
    out,
    num_outputs,
    num_inputs,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write one tile of the weight."""
    if PDL:
        gdc_launch_dependents()
        # The product before may still read what is written here.
        gdc_wait()
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(0) * BLOCK_K
    row = tl.minimum(n, num_outputs - 1).to(tl.int64)
    values = _values(
        codes, scales, zeros, row, start, num_inputs, out.dtype.element_ty, GROUP, BLOCK_N, BLOCK_K
    )
    at = row[:, None] * num_inputs + (start + tl.arange(0, BLOCK_K))[None, :]
    tl.store(out + at, values, mask=(n < num_outputs)[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _tiles(
    x,
    codes,
    scales,
    zeros,
    bias,
    out,
    sums,
    tickets,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a tile of results, or a share of its inputs' part of it."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile_m, tile_n, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    share = tl.cdiv(num_inputs // BLOCK_K, num_splits)
    first = split * share * BLOCK_K
    last = tl.minimum(first + share * BLOCK_K, num_inputs)
    # What lies past the end reads something legal, and is not stored.
    row = tl.where(n < num_outputs, n, 0).to(tl.int64)
    x_row = tl.where(m < num_rows, m, 0).to(tl.int64)
    y = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(first, last, BLOCK_K):
        values = _values(
            codes,
            scales,
            zeros,
            row,
            start,
            num_inputs,
            x.dtype.element_ty,
            GROUP,
            BLOCK_N,
            BLOCK_K,
        )
        rows = tl.load(x + x_row[None, :] * x_stride + (start + k)[:, None])
        y = tl.dot(values, rows, y, input_precision="ieee")
    out_at = out + m.to(tl.int64)[None, :] * num_outputs + n[:, None]
    inside = (m < num_rows)[None, :] & (n < num_outputs)[:, None]
    offset = tl.zeros((BLOCK_N,), tl.float32)
    if HAS_BIAS:
        offset = tl.load(bias + n, mask=n < num_outputs, other=0.0).to(tl.float32)
    if IS_SPLIT:
        tile = tile_n * tl.num_programs(0) + tile_m
        size = BLOCK_N * BLOCK_M
        place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        sums_at = sums + (tile * num_splits).to(tl.int64) * size + place
        tl.store(sums_at + split * size, y)
        # All of this program's threads have stored before one of them takes the ticket.
        tl.debug_barrier()
        ticket = tl.atomic_add(tickets + tile, 1, sem="acq_rel")
        if ticket == num_splits - 1:
            total = tl.load(sums_at, cache_modifier=".cg")
            for s in tl.range(1, num_splits):
                total += tl.load(sums_at + s * size, cache_modifier=".cg")
            tl.store(out_at, (total + offset[:, None]).to(out.dtype.element_ty), mask=inside)
            tl.store(tickets + tile, 0)
    else:
        tl.store(out_at, (y + offset[:, None]).to(out.dtype.element_ty), mask=inside)
