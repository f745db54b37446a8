"""Drawing tokens on a GPU: the noise of `worker.philox` and the argmax in one pass over the logits.

Same numbers as `worker.sampler` up to the last bit of a logarithm. Each program takes a run of one
row's tokens and leaves its best candidate; a second kernel picks the row's best:

    logits ─► [rows, runs] (score, token, largest logit) ─► [rows] (score, token, largest logit)

A rank that holds a part of the vocabulary exchanges the three numbers a row of the second step.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

_RUN_QUADS = 512
"""Quadruples of tokens a program takes: Philox makes four words at a time."""


class Candidates(NamedTuple):
    """Each row's best token among those of this rank."""

    scores: Tensor
    """[rows] float32, logit / temperature + noise; the logit itself at temperature 0."""
    tokens: Tensor
    """[rows] int32"""
    largest: Tensor
    """[rows] float32, the largest logit; infinity if any is NaN."""


def draw_candidates(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, *, first_id: int
) -> Candidates:
    """Return each row's best without filters; at temperature 0 the likeliest token.

    `logits`, [rows, ids] in any float type, are those of the tokens from `first_id` on; the rest is
    [rows] float32, int64 and int64.
    """
    assert logits.stride(1) == 1, "a row's logits lie together"
    num_rows, num_ids = logits.shape
    num_runs = triton.cdiv(num_ids + first_id % 4, 4 * _RUN_QUADS)
    parts = logits.new_empty(2, num_rows, num_runs, dtype=torch.float32)
    part_tokens = logits.new_empty(num_rows, num_runs, dtype=torch.int32)
    _draw_runs[(num_rows, num_runs)](
        logits,
        logits.stride(0),
        temperatures,
        seeds,
        positions,
        parts[0],
        part_tokens,
        parts[1],
        num_ids,
        first_id,
        num_runs,
        RUN_QUADS=_RUN_QUADS,
    )
    best = logits.new_empty(2, num_rows, dtype=torch.float32)
    tokens = logits.new_empty(num_rows, dtype=torch.int32)
    _pick_runs[(num_rows,)](
        parts[0],
        part_tokens,
        parts[1],
        best[0],
        tokens,
        best[1],
        num_runs,
        RUNS=triton.next_power_of_2(num_runs),
    )
    return Candidates(best[0], tokens, best[1])


@triton.jit
def _draw_runs(
    logits,
    logits_stride,
    temperatures,
    seeds,
    positions,
    out_scores,
    out_tokens,
    out_largest,
    num_ids,
    first_id,
    num_runs,
    RUN_QUADS: tl.constexpr,
):
    """Leave the best of one run of one row."""
    row = tl.program_id(0)
    run = tl.program_id(1)
    quads = run * RUN_QUADS + tl.arange(0, RUN_QUADS)
    temperature = tl.load(temperatures + row)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    zero = quads * 0
    w0, w1, w2, w3 = tl.philox(
        seed,
        first_id // 4 + quads,
        zero + position.to(tl.int32),
        zero + (position >> 32).to(tl.int32),
        zero,
    )
    start = logits + row.to(tl.int64) * logits_stride
    # The first id need not be the first of its four.
    ids = quads * 4 - first_id % 4
    best, largest = _score(start, ids, num_ids, w0, temperature)
    score1, raw1 = _score(start, ids + 1, num_ids, w1, temperature)
    score2, raw2 = _score(start, ids + 2, num_ids, w2, temperature)
    score3, raw3 = _score(start, ids + 3, num_ids, w3, temperature)
    # Strictly better: among equals the lowest id wins.
    lane = tl.where(score1 > best, 1, 0)
    best = tl.maximum(best, score1)
    lane = tl.where(score2 > best, 2, lane)
    best = tl.maximum(best, score2)
    lane = tl.where(score3 > best, 3, lane)
    best = tl.maximum(best, score3)
    largest = tl.maximum(tl.maximum(largest, raw1), tl.maximum(raw2, raw3))
    winner = tl.argmax(best, axis=0)
    is_winner = tl.arange(0, RUN_QUADS) == winner
    token = tl.sum(tl.where(is_winner, ids + lane, 0), axis=0)
    token = tl.maximum(tl.minimum(token, num_ids - 1), 0)  # a row of NaN may pick any
    out = row * num_runs + run
    tl.store(out_scores + out, tl.max(best, axis=0))
    tl.store(out_tokens + out, first_id + token)
    tl.store(out_largest + out, tl.max(largest, axis=0))


@triton.jit
def _score(start, ids, num_ids, words, temperature):
    """Return the scores of tokens, and their logits with NaN as infinity."""
    logit = tl.load(start + ids, mask=(ids >= 0) & (ids < num_ids), other=float("-inf")).to(
        tl.float32
    )
    score = logit
    if temperature > 0:
        uniform = ((words >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
        noise = -libdevice.log(-libdevice.log(uniform))
        score = noise + tl.div_rn(logit, tl.zeros_like(logit) + temperature)
    return score, tl.where(logit != logit, float("inf"), logit)


@triton.jit
def _pick_runs(
    scores,
    tokens,
    largest,
    out_scores,
    out_tokens,
    out_largest,
    num_runs,
    RUNS: tl.constexpr,
):
    """Leave the best of a row's runs."""
    row = tl.program_id(0)
    runs = tl.arange(0, RUNS)
    held = runs < num_runs
    at = row * num_runs + runs
    score = tl.load(scores + at, mask=held, other=float("-inf"))
    token = tl.load(tokens + at, mask=held, other=0)
    raw = tl.load(largest + at, mask=held, other=float("-inf"))
    winner = tl.argmax(score, axis=0)
    tl.store(out_scores + row, tl.max(score, axis=0))
    tl.store(out_tokens + row, tl.sum(tl.where(runs == winner, token, 0), axis=0))
    tl.store(out_largest + row, tl.max(raw, axis=0))
