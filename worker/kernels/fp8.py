"""Rows as 8-bit floats, in one launch.

A program takes one row and keeps it in registers between its largest value and its codes, so that
every number crosses memory once: 2 bytes read and 1 written for each of a 16-bit dtype.

The arithmetic is `worker.layers.fp8.quantize_rows`'s, division included, so the codes are the same.
For a KV cache in fp8 numbers are rounded as they are (`worker.kv_rounding`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.kernels.overlap import launch_options
from worker.layers.fp8 import E4M3_MAX, LEAST_ABSMAX

_NUMBERS_PER_THREAD = 8
"""16 bytes of a 16-bit dtype: the widest load a thread has."""


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes, [rows, size], and the scales of rows, [rows, 1] float32.

    `x` is [rows, size] with each row's elements together.
    """
    assert x.stride(1) == 1, "a row's elements lie together"
    num_rows, size = x.shape
    codes = torch.empty(num_rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    _quantize_row[(num_rows,)](
        x,
        codes,
        scales,
        x.stride(0),
        SIZE=size,
        BLOCK=block,
        LARGEST=E4M3_MAX,
        LEAST=LEAST_ABSMAX,
        num_warps=_num_warps(block),
        **launch_options(x.device),
    )
    return codes, scales


def round_to_e4m3(x: Tensor) -> Tensor:
    """Return the nearest e4m3 numbers, at most 448; what is not finite becomes NaN.

    `x` is [rows, …] with each row's elements together; returns its shape, contiguous.
    """
    rows = x.flatten(1)
    assert rows.data_ptr() == x.data_ptr(), "a row's elements lie together"
    num_rows, size = rows.shape
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    block = triton.next_power_of_2(size)
    _round_row[(num_rows,)](
        rows,
        codes,
        rows.stride(0),
        SIZE=size,
        BLOCK=block,
        num_warps=_num_warps(block),
        **launch_options(x.device),
    )
    return codes


def _num_warps(block: int) -> int:
    return min(max(block // (32 * _NUMBERS_PER_THREAD), 1), 16)


@triton.jit
def e4m3_or_nan(x):
    """Round to e4m3, at most 448; what is not finite becomes NaN."""
    wide = x.to(tl.float32)
    # Compared first: the conversion saturates, and so would hide infinity.
    is_finite = tl.abs(wide) <= 3.4028234663852886e38
    wide = tl.minimum(tl.maximum(wide, -448.0), 448.0)
    return tl.where(is_finite, wide, float("nan")).to(tl.float8e4nv)


@triton.jit
def _round_row(x, codes, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Round one row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    held = columns < SIZE
    values = tl.load(x + row * x_stride + columns, mask=held, other=0.0)
    tl.store(codes + row * SIZE + columns, e4m3_or_nan(values), mask=held)


@triton.jit
def _quantize_row(
    x,
    codes,
    scales,
    x_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantise one row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    held = columns < SIZE
    values = tl.load(x + row * x_stride + columns, mask=held, other=0.0).to(tl.float32)
    # This drops NaN, which stays in its number's code and thereby in the whole row's products.
    absmax = tl.maximum(tl.max(tl.abs(values), axis=0), LEAST)
    # The conversion rounds to even and saturates.
    scaled = values * tl.div_rn(LARGEST, absmax)
    tl.store(codes + row * SIZE + columns, scaled.to(codes.dtype.element_ty), mask=held)
    tl.store(scales + row, tl.div_rn(absmax, LARGEST))
