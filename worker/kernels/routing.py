"""Which experts a row goes to, and the rows of every expert together, without asking the host.

`choose_experts` takes one program a row: its k greatest scores one after the other, and their
softmax, all in float32.

`sort_by_expert` is a counting sort that keeps equal ones in order. An assignment is one of a row's
k choices, numbered row · k + choice; the assignments are cut into chunks:

    count    a program a chunk:  how many of each expert are in the chunk
    place    a program a chunk:  an assignment's place is how many there are of lower experts, plus
                                 those of its own in earlier chunks and before it in its chunk

A step of few rows is one chunk, which counts and places in one launch. Nothing depends on the
number of rows an expert has but values in memory, so a CUDA graph can hold it.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.kernels.overlap import launch_options

_BLOCK = 32
"""Assignments that a program handles at a time."""
_CHUNK = 1024


class SortedAssignments(NamedTuple):
    """The assignments, those of one expert side by side, lower experts first."""

    order: Tensor
    """[rows · k] int32: which assignment is at each place"""
    counts: Tensor
    """[experts] int32: how many each expert has"""


def choose_experts(
    scores: Tensor, bias: Tensor | None, k: int, *, is_renormalised: bool
) -> tuple[Tensor, Tensor]:
    """Return the k experts of each row, [rows, k] int32, best first, and their weights, float32.

    Scores, [rows, experts] of any float type, get the bias, [experts]. Weights are the softmax over
    the chosen if renormalised, else over all.
    """
    assert scores.is_contiguous(), "rows lie side by side"
    num_rows, num_experts = scores.shape
    experts = torch.empty(num_rows, k, dtype=torch.int32, device=scores.device)
    weights = torch.empty(num_rows, k, dtype=torch.float32, device=scores.device)
    _choose[(num_rows,)](
        scores,
        scores if bias is None else bias,
        experts,
        weights,
        NUM_EXPERTS=num_experts,
        EXPERTS=triton.next_power_of_2(num_experts),
        K=k,
        CHOICES=triton.next_power_of_2(k),
        HAS_BIAS=bias is not None,
        IS_RENORMALISED=is_renormalised,
        num_warps=1,
        **launch_options(scores.device),
    )
    return experts, weights


def sort_by_expert(experts: Tensor, num_experts: int) -> SortedAssignments:
    """Sort assignments by their expert, [rows, k] int32; equal ones stay in order."""
    assert experts.is_contiguous(), "rows lie side by side"
    device, num_assignments = experts.device, experts.numel()
    chunk = min(_CHUNK, max(_BLOCK, triton.next_power_of_2(num_assignments)))
    num_chunks = triton.cdiv(num_assignments, chunk)
    order = torch.empty(num_assignments, dtype=torch.int32, device=device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    chunk_counts = counts
    sizes = {
        "NUM_EXPERTS": num_experts,
        "EXPERTS": triton.next_power_of_2(num_experts),
        "CHUNK": chunk,
        "BLOCK": _BLOCK,
        **launch_options(device),
    }
    if num_chunks > 1:
        chunk_counts = torch.empty(num_chunks, num_experts, dtype=torch.int32, device=device)
        _count[(num_chunks,)](experts, chunk_counts, num_assignments, **sizes)
    _place[(num_chunks,)](
        experts,
        chunk_counts,
        order,
        counts,
        num_assignments,
        num_chunks,
        IS_ONE_CHUNK=num_chunks == 1,
        **sizes,
    )
    return SortedAssignments(order, counts)


@triton.jit
def _choose(
    scores,
    bias,
    experts,
    weights,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    CHOICES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_RENORMALISED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose one row's experts."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    choice = tl.arange(0, CHOICES)
    is_one = expert < NUM_EXPERTS
    row_at = scores + row.to(tl.int64) * NUM_EXPERTS
    left = tl.load(row_at + expert, mask=is_one, other=-math.inf).to(tl.float32)
    if HAS_BIAS:
        left += tl.load(bias + expert, mask=is_one, other=0.0).to(tl.float32)
    greatest = tl.max(left, axis=0)
    total = tl.sum(tl.exp(left - greatest), axis=0)
    chosen = tl.zeros((CHOICES,), tl.int32)
    values = tl.full((CHOICES,), -math.inf, tl.float32)
    for i in tl.static_range(K):
        # A row that is not a number still goes to experts that exist.
        best = tl.minimum(tl.argmax(left, axis=0), NUM_EXPERTS - 1)
        chosen = tl.where(choice == i, best, chosen)
        values = tl.where(choice == i, tl.max(left, axis=0), values)
        left = tl.where(expert == best, -math.inf, left)
    raised = tl.exp(values - greatest)
    if IS_RENORMALISED:
        total = tl.sum(raised, axis=0)
    at = row.to(tl.int64) * K + choice
    tl.store(experts + at, chosen, mask=choice < K)
    tl.store(weights + at, raised / total, mask=choice < K)


@triton.jit(do_not_specialize=["num_assignments"])
def _count(
    experts,
    chunk_counts,
    num_assignments,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count a chunk's assignments of each expert."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunk = tl.program_id(0)
    counts = _histogram(experts, chunk * CHUNK, num_assignments, EXPERTS, CHUNK, BLOCK)
    expert = tl.arange(0, EXPERTS)
    tl.store(chunk_counts + chunk * NUM_EXPERTS + expert, counts, mask=expert < NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_assignments", "num_chunks"])
def _place(
    experts,
    chunk_counts,
    order,
    counts,
    num_assignments,
    num_chunks,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_ONE_CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Put a chunk's assignments in their places."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunk = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    is_one = expert < NUM_EXPERTS
    # What there is of each expert in earlier chunks, and in all.
    before = tl.zeros((EXPERTS,), tl.int32)
    if IS_ONE_CHUNK:
        total = _histogram(experts, 0, num_assignments, EXPERTS, CHUNK, BLOCK)
    else:
        total = tl.zeros((EXPERTS,), tl.int32)
        for other in tl.range(0, num_chunks):
            there = tl.load(chunk_counts + other * NUM_EXPERTS + expert, mask=is_one, other=0)
            total += there
            before += tl.where(other < chunk, there, 0)
    if chunk == 0:
        tl.store(counts + expert, total, mask=is_one)
    free = tl.cumsum(total, axis=0) - total + before
    for start in tl.range(0, CHUNK, BLOCK):
        assignment = chunk * CHUNK + start + tl.arange(0, BLOCK)
        inside = assignment < num_assignments
        ids = tl.load(experts + assignment, mask=inside, other=EXPERTS)
        is_of = (ids[:, None] == expert[None, :]).to(tl.int32)
        place = free[None, :] + tl.cumsum(is_of, axis=0) - is_of
        tl.store(order + tl.sum(is_of * place, axis=1), assignment, mask=inside)
        free += tl.sum(is_of, axis=0)


@triton.jit
def _histogram(
    experts,
    first,
    num_assignments,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return how many of the chunk from `first` on each expert has. [EXPERTS]"""
    expert = tl.arange(0, EXPERTS)
    counts = tl.zeros((EXPERTS,), tl.int32)
    for start in tl.range(0, CHUNK, BLOCK):
        assignment = first + start + tl.arange(0, BLOCK)
        ids = tl.load(experts + assignment, mask=assignment < num_assignments, other=EXPERTS)
        counts += tl.sum((ids[:, None] == expert[None, :]).to(tl.int32), axis=0)
    return counts
