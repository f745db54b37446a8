"""Root-mean-square normalisation on a GPU, alone and after adding to the residual.

Bytes read and written per row of `hidden` numbers of b bytes, those of the residual of r, the
weight apart, which stays in cache:

    rms_norm        hidden · (r + b)      residual ─► normed
    add_rms_norm    hidden · (2b + 2r)    delta, residual ─► residual, normed

One program takes one row and keeps it in registers between its sum of squares and its use, so that
every number crosses memory once. A row is short, so many programs fit on a multiprocessor and hide
each other's wait for memory.

The sum is rounded to the residual's dtype, what is normalised to the asked one, once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.kernels.overlap import launch_options

_NUMBERS_PER_THREAD = 8
"""16 bytes of a 16-bit dtype: the widest load a thread has."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight in a dtype.

    [rows, hidden] of any float type, [hidden] -> [rows, hidden]
    """
    assert x.is_contiguous(), "rows lie side by side"
    normed = torch.empty_like(x, dtype=dtype)
    _launch(x, x, weight, normed, eps, adds=False)
    return normed


def add_rms_norm(
    delta: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """Add `delta` to `residual` in place; return the sum normalised as `rms_norm` does.

    All [rows, hidden], the weight [hidden]. The residual may be float32 where the others are not.
    """
    assert delta.is_contiguous(), "rows lie side by side"
    assert residual.is_contiguous(), "rows lie side by side"
    normed = torch.empty_like(residual, dtype=dtype)
    _launch(delta, residual, weight, normed, eps, adds=True)
    return normed


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor, normed: Tensor, eps: float, *, adds: bool
) -> None:
    num_rows, size = x.shape
    block = triton.next_power_of_2(size)
    _norm_rows[(num_rows,)](
        x,
        residual,
        weight,
        normed,
        eps,
        SIZE=size,
        BLOCK=block,
        ADDS=adds,
        num_warps=min(max(block // (32 * _NUMBERS_PER_THREAD), 1), 16),
        **launch_options(x.device),
    )


@triton.jit
def _norm_rows(
    x,
    residual,
    weight,
    normed,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Normalise one row, after adding it to the residual's if ADDS."""
    if PDL:
        gdc_launch_dependents()
    start = tl.program_id(0).to(tl.int64) * SIZE
    columns = tl.arange(0, BLOCK)
    held = columns < SIZE
    # Asked for before the row is summed: it arrives meanwhile.
    scale = tl.load(weight + columns, mask=held, other=0.0)
    if PDL:
        gdc_wait()
    row = tl.load(x + start + columns, mask=held, other=0.0).to(tl.float32)
    if ADDS:
        old = tl.load(residual + start + columns, mask=held, other=0.0)
        total = (row + old.to(tl.float32)).to(old.dtype)
        tl.store(residual + start + columns, total, mask=held)
        row = total.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(row * row, axis=0) / SIZE + eps)
    row = row * inverse * scale.to(tl.float32)
    tl.store(normed + start + columns, row.to(normed.dtype.element_ty), mask=held)
