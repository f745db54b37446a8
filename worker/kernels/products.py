"""Matrix products of few rows: y = x · weightᵀ + bias, where reading the weight is all the work.

Two kernels, each with settings that `worker.tune` chooses by measuring:

- `Gemv` for 1 to 8 rows: each program takes a few outputs and all of the input, keeps its loads of
  the weight in flight together and adds up in float32 on the plain arithmetic units.
- `Tiles` for more rows: the tensor cores, with the weight's rows on the side where a tile is tall,
  so that few rows of x waste little. The input is divided among `split` programs where outputs
  alone are too few for the GPU. The last of them to finish adds the partial sums in their order:

      program s < split:  partial sums ─► scratch;  ticket + 1 ─► was it the last?
      the last one:       scratch[0] + scratch[1] + … ─► y;  ticket = 0

Both are deterministic, and a row of y depends on the same row of x alone.

With `pdl` a kernel may start while the one before it on the stream still runs (programmatic
dependent launch): it touches nothing that another kernel writes until that one is through.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.product_table import Gemv, Setting

_LOAD = 8
"""Elements of 16 bits that one load takes."""
_LANES = 32


@dataclass(frozen=True, slots=True)
class Scratch:
    """Where programs that share a tile meet. One serves all products of a stream."""

    sums: Tensor
    """[partial sums] float32, in no state between products"""
    tickets: Tensor
    """[tiles] int32, zero between products"""

    @staticmethod
    def allocate(num_sums: int, num_tiles: int, device: torch.device) -> "Scratch":
        """Return scratch for products of up to so many partial sums and tiles."""
        return Scratch(
            torch.empty(max(1, num_sums), dtype=torch.float32, device=device),
            torch.zeros(max(1, num_tiles), dtype=torch.int32, device=device),
        )


class Launch(NamedTuple):
    """A kernel and what it is started with."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    setting: Setting,
    scratch: Scratch,
    out: Tensor | None = None,
) -> Tensor:
    """Return x · weightᵀ + bias, [rows, outputs]: in `out` of any float type, or like `x`.

    `x` is [rows, inputs] with each row's elements together; `weight` [outputs, inputs] and
    contiguous. The setting must fit.
    """
    if out is None:
        out = x.new_empty(len(x), len(weight))
    launch = prepare_launch(x, weight, bias, setting, scratch, out)
    launch.kernel[launch.grid](*launch.arguments, **launch.options)
    return out


def prepare_launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    setting: Setting,
    scratch: Scratch,
    out: Tensor,
) -> Launch:
    """Return the launch that writes x · weightᵀ + bias into `out`, [rows, outputs]."""
    rows, inputs = x.shape
    outputs = len(weight)
    assert setting.fits(rows, outputs, inputs), f"{setting} does not fit {rows, outputs, inputs}"
    assert x.stride(1) == 1, "a row's elements lie together"
    assert weight.is_contiguous(), "the weight's rows lie together"
    pointers = (x, weight, weight if bias is None else bias, out)
    sizes = (rows, outputs, inputs, x.stride(0))
    options = {"HAS_BIAS": bias is not None, "PDL": setting.pdl, "num_warps": setting.warps}
    if setting.pdl:
        options["launch_pdl"] = True
    if isinstance(setting, Gemv):
        options |= {
            "ROWS": triton.next_power_of_2(rows),
            "BLOCK_N": setting.block_n,
            "BLOCK_K": setting.block_k,
            "LOAD": min(_LOAD, setting.block_k),
            "ROW_A_WARP": setting.block_k < _LOAD * _LANES * setting.warps,
            "IS_ONE_BLOCK": setting.block_k == inputs,
        }
        grid = (triton.cdiv(outputs, setting.block_n),)
        return Launch(_gemv, grid, (*pointers, *sizes), options)
    grid3 = (
        triton.cdiv(rows, setting.block_m),
        triton.cdiv(outputs, setting.block_n),
        setting.split,
    )
    assert scratch.sums.numel() >= setting.num_sums(rows, outputs), "too little scratch"
    assert scratch.tickets.numel() >= setting.num_tiles(rows, outputs), "too few tickets"
    options |= {
        "BLOCK_N": setting.block_n,
        "BLOCK_M": setting.block_m,
        "BLOCK_K": setting.block_k,
        "IS_SPLIT": setting.split > 1,
        "AHEAD": setting.stages - 1,
        "num_stages": setting.stages,
    }
    return Launch(_tiles, grid3, (*pointers, scratch.sums, scratch.tickets, *sizes), options)


@triton.jit(do_not_specialize=["num_rows"])
def _gemv(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOAD: tl.constexpr,
    ROW_A_WARP: tl.constexpr,
    IS_ONE_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a few outputs of all rows."""
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Outputs past the end read the last one's weight again.
    row = tl.minimum(n, num_outputs - 1).to(tl.int64)
    weight_at = weight + row[:, None] * num_inputs + k[None, :]
    block = tl.load(weight_at, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
    sums = ()
    for _ in tl.static_range(ROWS):
        sums = sums + (tl.zeros((BLOCK_N, BLOCK_K // LOAD), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    if not IS_ONE_BLOCK:
        for start in tl.range(BLOCK_K, num_inputs, BLOCK_K):
            # The next block is on its way while this one is used.
            following = tl.load(weight_at + start, eviction_policy="evict_first")
            sums = _add_block(
                sums,
                block,
                x + (start - BLOCK_K),
                x_stride,
                num_rows,
                ROWS,
                BLOCK_N,
                BLOCK_K,
                LOAD,
                ROW_A_WARP,
            )
            block = following
    sums = _add_block(
        sums,
        block,
        x + (num_inputs - BLOCK_K),
        x_stride,
        num_rows,
        ROWS,
        BLOCK_N,
        BLOCK_K,
        LOAD,
        ROW_A_WARP,
    )
    offset = tl.zeros((BLOCK_N,), tl.float32)
    if HAS_BIAS:
        offset = tl.load(bias + n, mask=n < num_outputs, other=0.0).to(tl.float32)
    for m in tl.static_range(ROWS):
        y = tl.sum(sums[m], axis=1) + offset
        tl.store(
            out + m * num_outputs + n,
            y.to(out.dtype.element_ty),
            mask=(n < num_outputs) & (m < num_rows),
        )


@triton.jit
def _add_block(
    sums,
    block,
    x_from,
    x_stride,
    num_rows,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOAD: tl.constexpr,
    ROW_A_WARP: tl.constexpr,
):
    """Add one block's products to every row's sums: within a thread, so nothing is exchanged."""
    values = block.to(tl.float32)
    added = ()
    for m in tl.static_range(ROWS):
        row_at = x_from + m * x_stride + tl.arange(0, BLOCK_K)
        if ROW_A_WARP:
            # Each warp reads the row for itself, so that no warp waits for another.
            every = row_at[None, :] + tl.zeros((BLOCK_N, 1), tl.int32)
            row = tl.load(every, mask=m < num_rows, other=0.0).to(tl.float32)
        else:
            row = tl.load(row_at, mask=m < num_rows, other=0.0).to(tl.float32)[None, :]
        products = tl.reshape(values * row, (BLOCK_N, BLOCK_K // LOAD, LOAD))
        added = added + (sums[m] + tl.sum(products, axis=2),)  # type: ignore[assignment]  # noqa: RUF005
    return added


@triton.jit(do_not_specialize=["num_rows"])
def _tiles(
    x,
    weight,
    bias,
    out,
    sums,
    tickets,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Compute one tile, or a share of its sums."""
    if PDL:
        gdc_launch_dependents()
    tile_m = tl.program_id(0)
    tile_n = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    share = tl.cdiv(num_inputs // BLOCK_K, num_splits)
    first = split * share * BLOCK_K
    last = tl.minimum(first + share * BLOCK_K, num_inputs)
    # What lies past the end reads something legal, and is not stored.
    weight_row = tl.where(n < num_outputs, n, 0).to(tl.int64)
    x_row = tl.where(m < num_rows, m, 0)
    weight_at = weight + weight_row[:, None] * num_inputs + (first + k)[None, :]
    x_at = x + x_row[None, :] * x_stride + (first + k)[:, None]
    if PDL:
        _prefetch(weight, weight_row, num_inputs, first, last, BLOCK_K, AHEAD)
        gdc_wait()
    y = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for _ in tl.range(first, last, BLOCK_K):
        y = tl.dot(tl.load(weight_at), tl.load(x_at), y, input_precision="ieee")
        weight_at += BLOCK_K
        x_at += BLOCK_K
    out_at = out + m[None, :] * num_outputs + n[:, None]
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


@triton.jit
def _prefetch(
    weight,
    weight_row,
    num_inputs,
    first,
    last,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Ask for the first blocks of the weight: the L2 cache has them when the loop starts."""
    lines = tl.arange(0, BLOCK_K // 64) * 64  # a cache line is 64 elements of 16 bits
    for stage in tl.static_range(AHEAD):
        start = tl.minimum(first + stage * BLOCK_K, last - BLOCK_K)
        at = weight + weight_row[:, None] * num_inputs + (start + lines)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [at],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
