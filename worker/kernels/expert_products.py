"""A layer's experts on a GPU: every expert's rows times its own weights, in two products.

    sorted assignments   e0 e0 e0 │ e2 │ e3 e3 …       an expert without rows has no place
    tiles of rows        ▪▪▪▪▪▪▪▪ │ ▪▪ │ ▪▪▪▪▪         of one expert each, the last one filled up

    gate_up:  rows of hidden, fetched ─► product ─► + bias ─► activation ─► [assignments, inner]
    down:     those in order          ─► product ─► (+ bias) · weight   ─► [assignments, hidden]
    combine:  a row's k assignments added up in float32                 ─► [rows, hidden]

The number of tiles depends on how the rows fall; as many programs are started as there can be at
most, and find their expert and rows from the experts' counts, or that they have none. So nothing
waits for the host, and a CUDA graph can hold it. Sums have a fixed order: the same input gives the
same bits.

Gate and up rows of the weight alternate, so a tile has both halves of each of its results.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.kernels.overlap import launch_options
from worker.kernels.routing import SortedAssignments, sort_by_expert
from worker.layers.linear import ADDS_FROM_ROWS
from worker.model_config import SwigluClamp

_RUN = 1024
"""Sums of a program of the last step."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """The tile of a program, and how it computes it."""

    rows: int
    outputs: int
    inputs: int
    """Of a step along the sum."""
    warps: int
    stages: int


def tile_shape(num_assignments: int, num_experts: int) -> TileShape:
    """Return the tile for so many assignments: about as many rows as an expert will have.

    With few, reading the weights is all the work, and narrow tiles make more programs. With many,
    tall ones read each weight seldom.
    """
    rows_each = num_assignments / num_experts
    if rows_each <= 16:
        return TileShape(rows=16, outputs=64, inputs=128, warps=4, stages=4)
    if rows_each <= 64:
        return TileShape(rows=32, outputs=128, inputs=64, warps=4, stages=4)
    if rows_each <= 256:
        return TileShape(rows=64, outputs=128, inputs=64, warps=4, stages=4)
    return TileShape(rows=128, outputs=128, inputs=64, warps=8, stages=3)


def most_tiles(num_assignments: int, num_experts: int, rows: int) -> int:
    """Return how many tiles of so many rows there can be: whole ones, and one more an expert."""
    return num_assignments // rows + min(num_assignments, num_experts)


def run_experts(
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    clamp: SwigluClamp | None,
    shape: TileShape | None = None,
) -> Tensor:
    """Return the weighted sum of each row's experts. [rows, hidden] -> [rows, hidden]

    `experts` and `weights` are [rows, k], int32 and float32; `gate_up` is [experts, 2 · inner,
    hidden], its rows alternating, `down` [experts, hidden, inner]; biases are [experts, outputs] or
    None. The activation is silu(gate) · up without `clamp`. `shape` is for trying another tile.
    """
    assert hidden.stride(1) == 1, "a row's elements lie together"
    assert gate_up.is_contiguous() and down.is_contiguous(), "the weights' rows lie together"  # noqa: PT018
    num_rows, k = experts.shape
    num_experts, width, size = gate_up.shape
    num_assignments = num_rows * k
    shape = shape or tile_shape(num_assignments, num_experts)
    places = sort_by_expert(experts, num_experts)
    inner = hidden.new_empty(num_assignments, width // 2)
    # Of few rows the parts are kept as they were summed; of many that would cost bandwidth.
    part_dtype = torch.float32 if num_rows < ADDS_FROM_ROWS else hidden.dtype
    parts = torch.empty(num_assignments, size, dtype=part_dtype, device=hidden.device)
    clamped = clamp or SwigluClamp(alpha=1.0, limit=0.0)
    _launch(_gate_up, shape, places, hidden, gate_up, gate_up_bias, inner)(
        hidden.stride(0), k, clamped.alpha, clamped.limit, IS_CLAMPED=clamp is not None
    )
    _launch(_down, shape, places, inner, down, down_bias, parts)(weights)
    result = torch.empty(num_rows, size, dtype=hidden.dtype, device=hidden.device)
    _combine[(num_rows, triton.cdiv(size, _RUN))](
        parts, result, K=k, SIZE=size, RUN=_RUN, num_warps=4, **launch_options(hidden.device)
    )
    return result


def _launch(
    kernel,
    shape: TileShape,
    places: SortedAssignments,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
):
    """Return what starts a product, given what this one takes besides."""
    num_experts, outputs, inputs = weight.shape
    num_assignments = len(places.order)
    tiles_n = triton.cdiv(outputs, shape.outputs)
    grid = (most_tiles(num_assignments, num_experts, shape.rows) * tiles_n,)

    def start(*more, **constants) -> None:
        kernel[grid](
            x,
            weight,
            weight if bias is None else bias,
            out,
            places.order,
            places.counts,
            *more,
            OUTPUTS=outputs,
            INPUTS=inputs,
            NUM_EXPERTS=num_experts,
            EXPERTS=triton.next_power_of_2(num_experts),
            HAS_BIAS=bias is not None,
            BLOCK_M=shape.rows,
            BLOCK_N=shape.outputs,
            BLOCK_K=shape.inputs,
            num_warps=shape.warps,
            num_stages=shape.stages,
            **constants,
            **launch_options(x.device),
        )

    return start


@triton.jit
def _find_tile(counts, tile, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, M: tl.constexpr):
    """Return a tile's expert, NUM_EXPERTS if there is no such tile, its first place and the end."""
    expert = tl.arange(0, EXPERTS)
    count = tl.load(counts + expert, mask=expert < NUM_EXPERTS, other=0)
    tiles = (count + M - 1) // M
    # An expert comes before the tile's if all of its tiles do.
    is_before = (tl.cumsum(tiles, axis=0) <= tile) & (expert < NUM_EXPERTS)
    found = tl.sum(is_before.to(tl.int32), axis=0)
    first = tl.sum(tl.where(is_before, count, 0), axis=0)
    end = first + tl.sum(tl.where(expert == found, count, 0), axis=0)
    first += (tile - tl.sum(tl.where(is_before, tiles, 0), axis=0)) * M
    return found, first, end


@triton.jit
def _multiply(
    x_row,
    weight_row,
    INPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return rows times weight rows, given where each begins. [BLOCK_M, BLOCK_N] float32"""
    k = tl.arange(0, BLOCK_K)
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, INPUTS, BLOCK_K):
        if INPUTS % BLOCK_K == 0:
            x_block = tl.load(x_row[:, None] + (start + k)[None, :])
            weight_block = tl.load(weight_row[None, :] + (start + k)[:, None])
        else:
            inside = start + k < INPUTS
            x_block = tl.load(
                x_row[:, None] + (start + k)[None, :], mask=inside[None, :], other=0.0
            )
            weight_block = tl.load(
                weight_row[None, :] + (start + k)[:, None], mask=inside[:, None], other=0.0
            )
        y = tl.dot(x_block, weight_block, y, input_precision="ieee")
    return y


@triton.jit
def _gate_up(
    x,
    weight,
    bias,
    out,
    order,
    counts,
    x_stride,
    k,
    alpha,
    limit,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one tile of the activated product."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tiles_n: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    expert, first, end = _find_tile(
        counts, tl.program_id(0) // tiles_n, NUM_EXPERTS, EXPERTS, BLOCK_M
    )
    if expert >= NUM_EXPERTS:
        return
    n = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    place = first + tl.arange(0, BLOCK_M)
    # What lies past an end reads something legal, and is not stored.
    row = tl.load(order + tl.minimum(place, end - 1)) // k
    # Stacks of experts may have more than 2³¹ numbers.
    outputs_at = expert.to(tl.int64) * OUTPUTS + tl.minimum(n, OUTPUTS - 1)
    y = _multiply(
        x + row.to(tl.int64) * x_stride,
        weight + outputs_at * INPUTS,
        INPUTS,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    if HAS_BIAS:
        y += tl.load(bias + outputs_at).to(tl.float32)[None, :]
    gate, up = tl.split(tl.reshape(y, (BLOCK_M, BLOCK_N // 2, 2)))
    if IS_CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        gate = gate / (1.0 + tl.exp(-gate * alpha))
    else:
        gate = gate / (1.0 + tl.exp(-gate))
    column = tl.program_id(0) % tiles_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    out_at = out + place.to(tl.int64)[:, None] * (OUTPUTS // 2) + column[None, :]
    inside = (place < end)[:, None] & (column < OUTPUTS // 2)[None, :]
    tl.store(out_at, (gate * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _down(
    x,
    weight,
    bias,
    out,
    order,
    counts,
    row_weights,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one tile of the weighted product, and put its rows back to their assignments."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tiles_n: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    expert, first, end = _find_tile(
        counts, tl.program_id(0) // tiles_n, NUM_EXPERTS, EXPERTS, BLOCK_M
    )
    if expert >= NUM_EXPERTS:
        return
    n = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    place = first + tl.arange(0, BLOCK_M)
    legal = tl.minimum(place, end - 1)
    outputs_at = expert.to(tl.int64) * OUTPUTS + tl.minimum(n, OUTPUTS - 1)
    y = _multiply(
        x + legal.to(tl.int64) * INPUTS,
        weight + outputs_at * INPUTS,
        INPUTS,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    if HAS_BIAS:
        y += tl.load(bias + outputs_at).to(tl.float32)[None, :]
    assignment = tl.load(order + legal)
    y *= tl.load(row_weights + assignment)[:, None]
    out_at = out + assignment.to(tl.int64)[:, None] * OUTPUTS + n[None, :]
    inside = (place < end)[:, None] & (n < OUTPUTS)[None, :]
    tl.store(out_at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _combine(
    parts, result, K: tl.constexpr, SIZE: tl.constexpr, RUN: tl.constexpr, PDL: tl.constexpr
):
    """Add up a run of one row's parts, best choice first."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * RUN + tl.arange(0, RUN)
    total = tl.zeros((RUN,), tl.float32)
    for choice in tl.static_range(K):
        at = parts + (row * K + choice) * SIZE + column
        total += tl.load(at, mask=column < SIZE, other=0.0).to(tl.float32)
    tl.store(result + row * SIZE + column, total.to(result.dtype.element_ty), mask=column < SIZE)
