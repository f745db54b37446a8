"""The gated activation of the feed-forward block on a GPU.

Reads 2 · size numbers a row and writes size, once each: 6 bytes per result in a 16-bit dtype. A
program takes a run of one row, so that a single row of 3,072 keeps several multiprocessors busy,
and neighbouring programs take neighbouring runs, so that many rows stream through memory in order.

Roundings are Hugging Face's: silu or gelu in float32, rounded to the dtype, multiplied, rounded
again. gelu is its tanh formula, x · (1 + tanh u) / 2 with u = √(2/π) · (x + 0.044715 x³); since
(1 + tanh u) / 2 is the logistic function of 2u, both are x times a logistic function.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.kernels.overlap import launch_options

_RUN = 1024
"""Results of a program: 8 a thread, 16 bytes of a 16-bit dtype."""


def silu_multiply(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up. [rows, 2 · size], gate then up -> [rows, size]"""
    return _multiply(gate_up, is_gelu=False)


def gelu_multiply(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) · up. [rows, 2 · size], gate then up -> [rows, size]"""
    return _multiply(gate_up, is_gelu=True)


def _multiply(gate_up: Tensor, *, is_gelu: bool) -> Tensor:
    assert gate_up.is_contiguous(), "rows lie side by side"
    num_rows, width = gate_up.shape
    size = width // 2
    result = gate_up.new_empty(num_rows, size)
    num_runs = triton.cdiv(size, _RUN)
    _multiply_runs[(num_rows * num_runs,)](
        gate_up,
        result,
        num_runs,
        SIZE=size,
        RUN=_RUN,
        IS_GELU=is_gelu,
        num_warps=4,
        **launch_options(gate_up.device),
    )
    return result


@triton.jit
def _multiply_runs(
    gate_up,
    result,
    num_runs,
    SIZE: tl.constexpr,
    RUN: tl.constexpr,
    IS_GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one run of one row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = (tl.program_id(0) // num_runs).to(tl.int64)
    columns = tl.program_id(0) % num_runs * RUN + tl.arange(0, RUN)
    held = columns < SIZE
    start = gate_up + row * 2 * SIZE
    gate = tl.load(start + columns, mask=held, other=0.0)
    up = tl.load(start + SIZE + columns, mask=held, other=0.0)
    wide = gate.to(tl.float32)
    slope = wide
    if IS_GELU:
        # 2 · √(2/π)
        slope = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    activated = (wide / (1.0 + tl.exp(-slope))).to(gate.dtype)
    product = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(result + row * SIZE + columns, product.to(gate.dtype), mask=held)
