"""Drawing tokens on a GPU: the noise of `worker.philox` and the argmax in one pass over the logits.

Same numbers as `worker.sampler` up to the last bit of a logarithm. Each program takes a run of one
row's tokens and leaves its best; a second kernel scores the runs' best and picks the row's:

    logits ─► [rows, runs] (token, largest logit) ─► [rows] (score, token, largest logit)

A rank that holds a part of the vocabulary exchanges the three numbers a row of the second kernel.
For one rank it writes tokens to where the next step of a graph reads them.

Bytes per row: the logits once, 2 a token in a 16-bit dtype, and 8 a run in between. Arithmetic
costs more than that: ten rounds of Philox per four tokens, and two logarithms and a division for
each. So a run is first scored roughly, with the hardware's logarithms and a product by the inverse
temperature, a third of the instructions. Only if a second token comes so close to the best that
roughness could decide (one run in thousands) is the run scored again exactly. What is drawn never
depends on the rough scores, hence neither on how a row is divided among programs or ranks.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

_FEW_ROWS = 8
_FEW_ROWS_RUN, _MANY_ROWS_RUN = 1024, 2048
"""Tokens a program takes: few where they must suffice for all multiprocessors."""

_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels run in numpy, which has no `libdevice`."""


class Candidates(NamedTuple):
    """Each row's best token among those of this rank."""

    scores: Tensor
    """[rows] float32, logit / temperature + noise; the logit itself at temperature 0."""
    tokens: Tensor
    """[rows] int32"""
    largest: Tensor
    """[rows] float32, the largest logit; infinity if any is NaN."""


class _Runs(NamedTuple):
    """What the first kernel leaves, [rows, runs] each."""

    tokens: Tensor
    largest: Tensor


def draw_candidates(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, *, first_id: int
) -> Candidates:
    """Return each row's best without filters; at temperature 0 the likeliest token.

    `logits`, [rows, ids] in any float type, are those of the tokens from `first_id` on; the rest is
    [rows] float32, int64 and int32 or int64.
    """
    parameters = (temperatures, seeds, positions, None, None)
    runs = _draw(logits, parameters, first_id)
    num_rows, num_runs = runs.tokens.shape
    best = logits.new_empty(2, num_rows, dtype=torch.float32)
    tokens = logits.new_empty(num_rows, dtype=torch.int32)
    _pick_candidates[(num_rows,)](
        logits,
        logits.stride(0),
        *parameters,
        *runs,
        first_id,
        num_runs,
        best[0],
        tokens,
        best[1],
        **_pick_shape(num_runs),
    )
    return Candidates(best[0], tokens, best[1])


def draw_tokens(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    slots: Tensor,
    last_tokens: Tensor,
    reported: Tensor,
    thresholds: Tensor | None = None,
) -> None:
    """Draw each row's token of the whole vocabulary and write it to its slot and to the report.

    logits             [rows, vocab] in any float type
    temperatures       [all slots] float32; 0: the likeliest token
    seeds              [all slots] int64
    positions, slots   [rows] int32 or int64
    last_tokens        [all slots] int64; a failed row's gets any token
    reported           [rows] int32; -1 where the largest logit is NaN or infinite
    thresholds         [rows] float32: tokens with less logit / temperature are not drawn
    """
    parameters = (temperatures, seeds, positions, slots, thresholds)
    runs = _draw(logits, parameters, first_id=0)
    num_rows, num_runs = runs.tokens.shape
    _pick_tokens[(num_rows,)](
        logits,
        logits.stride(0),
        *parameters,
        *runs,
        num_runs,
        last_tokens,
        reported,
        **_pick_shape(num_runs),
    )


def _draw(logits: Tensor, parameters: tuple[Tensor | None, ...], first_id: int) -> _Runs:
    """Find the best of each run."""
    assert logits.stride(1) == 1, "a row's logits lie together"
    num_rows, num_ids = logits.shape
    run = _FEW_ROWS_RUN if num_rows <= _FEW_ROWS else _MANY_ROWS_RUN
    num_runs = triton.cdiv(num_ids + first_id % 4, run)
    runs = _Runs(
        logits.new_empty(num_rows, num_runs, dtype=torch.int32),
        logits.new_empty(num_rows, num_runs, dtype=torch.float32),
    )
    _draw_runs[(num_runs, num_rows)](
        logits,
        logits.stride(0),
        *parameters,
        *runs,
        first_id,
        num_ids,
        SKIPPED=first_id % 4,
        QUADS=run // 4,
        num_warps=4,
    )
    return runs


def _pick_shape(num_runs: int) -> dict[str, int]:
    """Return the second kernel's shape: a thread for each run, for all that counts is its time."""
    block = triton.next_power_of_2(num_runs)
    return {"RUNS": block, "num_warps": min(max(block // 32, 1), 8)}


@triton.jit
def _draw_runs(
    logits,
    logits_stride,
    temperatures,
    seeds,
    positions,
    slots,
    thresholds,
    out_tokens,
    out_largest,
    first_id,
    num_ids,
    SKIPPED: tl.constexpr,
    QUADS: tl.constexpr,
):
    """Leave the best of one run of one row.

    The first id need not be the first of its four: SKIPPED of them come before.
    """
    run, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    quads = run * QUADS + tl.arange(0, QUADS)
    # A thread holds whole quadruples, for whose tokens Philox makes its four words at once.
    lanes = tl.arange(0, 4)[None, :]
    columns = quads[:, None] * 4 + lanes - SKIPPED
    held = columns < num_ids
    if SKIPPED > 0:
        held &= columns >= 0
    logit = tl.load(logits + row * logits_stride + columns, mask=held, other=float("-inf"))
    logit = logit.to(tl.float32)
    temperature, seed, position, threshold = _row_parameters(
        temperatures, seeds, positions, slots, thresholds, row
    )
    out = row * tl.num_programs(0) + run
    largest = tl.max(tl.max(tl.where(logit != logit, float("inf"), logit), axis=1), axis=0)
    tl.store(out_largest + out, largest)

    if temperature > 0:
        words = _words(seed, position, (first_id - SKIPPED) // 4 + quads[:, None], lanes)
        if thresholds is not None:
            logit = tl.where(scaled_logit(logit, temperature) >= threshold, logit, float("-inf"))
        rough = logit * tl.div_rn(1.0, temperature) + _rough_noise(words)
        best, winner = _first_best(rough)
        # Twice what a rough score may be off by, with room to spare: 1e-5 from the noise, and
        # three roundings of numbers no larger than the score and the noise together.
        is_close = rough >= best - (4e-5 + tl.abs(best) * (1.0 / 1048576))
        if tl.sum(tl.sum(is_close.to(tl.int32), axis=1), axis=0) > 1:
            _, winner = _first_best(_noise(words) + scaled_logit(logit, temperature))
    else:
        _, winner = _first_best(logit)
    token = run * (4 * QUADS) - SKIPPED + winner
    token = tl.maximum(tl.minimum(token, num_ids - 1), 0)  # a row of NaN may pick any
    tl.store(out_tokens + out, first_id + token)


@triton.jit
def _first_best(tile):
    """Return a tile's largest score and its place in row order, the first of equals.

    By axis: Triton 3.6 reorders a reshaped tile that only a reduction reads, places and all.
    """
    scores, lanes = tl.max(tile, axis=1, return_indices=True)
    best, quad = tl.max(scores, axis=0, return_indices=True)
    lane = tl.sum(tl.where(tl.arange(0, tile.shape[0]) == quad, lanes, 0), axis=0)
    return best, quad * tile.shape[1] + lane


@triton.jit
def _pick_candidates(
    logits,
    logits_stride,
    temperatures,
    seeds,
    positions,
    slots,
    thresholds,
    tokens,
    largest,
    first_id,
    num_runs,
    out_scores,
    out_tokens,
    out_largest,
    RUNS: tl.constexpr,
):
    """Leave the best of a row's runs."""
    row = tl.program_id(0).to(tl.int64)
    parameters = _row_parameters(temperatures, seeds, positions, slots, thresholds, row)
    start = logits + row * logits_stride - first_id
    score, token, most = _pick(start, *parameters, tokens, largest, row, num_runs, RUNS)
    tl.store(out_scores + row, score)
    tl.store(out_tokens + row, token)
    tl.store(out_largest + row, most)


@triton.jit
def _pick_tokens(
    logits,
    logits_stride,
    temperatures,
    seeds,
    positions,
    slots,
    thresholds,
    tokens,
    largest,
    num_runs,
    last_tokens,
    reported,
    RUNS: tl.constexpr,
):
    """Write the best of a row's runs to where it is needed."""
    row = tl.program_id(0).to(tl.int64)
    parameters = _row_parameters(temperatures, seeds, positions, slots, thresholds, row)
    start = logits + row * logits_stride
    _, token, most = _pick(start, *parameters, tokens, largest, row, num_runs, RUNS)
    tl.store(last_tokens + tl.load(slots + row), token.to(tl.int64))
    tl.store(reported + row, tl.where(tl.abs(most) < float("inf"), token, -1))


@triton.jit
def _pick(
    start,
    temperature,
    seed,
    position,
    threshold,
    tokens,
    largest,
    row,
    num_runs,
    RUNS: tl.constexpr,
):
    """Return the score and token of a row's best run, and the row's largest logit.

    `start` is where the logit of token 0 would be.
    """
    runs = tl.arange(0, RUNS)
    held = runs < num_runs
    at = row * num_runs + runs
    most = tl.load(largest + at, mask=held, other=float("-inf"))
    token = tl.load(tokens + at, mask=held, other=0)
    logit = tl.load(start + token, mask=held, other=float("-inf")).to(tl.float32)
    score = logit
    if temperature > 0:
        words = _words(seed, position, token // 4, token % 4)
        scaled = scaled_logit(logit, temperature)
        score = tl.where(scaled >= threshold, _noise(words) + scaled, float("-inf"))
    best, winner = tl.max(score, axis=0, return_indices=True)
    return best, tl.sum(tl.where(runs == winner, token, 0), axis=0), tl.max(most, axis=0)


@triton.jit
def _row_parameters(temperatures, seeds, positions, slots, thresholds, row):
    """Return a row's temperature, seed, position and threshold."""
    at = row
    if slots is not None:
        at = tl.load(slots + row).to(tl.int64)
    threshold = float("-inf")
    if thresholds is not None:
        threshold = tl.load(thresholds + row)
    position = tl.load(positions + row).to(tl.int64)
    return tl.load(temperatures + at), tl.load(seeds + at), position, threshold


@triton.jit
def _words(seed, position, quads, lanes):
    """Return Philox's words for tokens, given as their quadruple and their place in it."""
    zero = quads * 0
    w0, w1, w2, w3 = tl.philox(
        seed, quads, zero + position.to(tl.int32), zero + (position >> 32).to(tl.int32), zero
    )
    return tl.where(lanes < 2, tl.where(lanes == 0, w0, w1), tl.where(lanes == 2, w2, w3))


@triton.jit
def scaled_logit(logit, temperature):
    """Divide logits by a temperature, rounding as the CPU does."""
    return tl.div_rn(logit, tl.zeros_like(logit) + temperature)


@triton.jit
def _uniform(words):
    return ((words >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)


@triton.jit
def _noise(words):
    """Return Gumbel noise."""
    return -natural_log(-natural_log(_uniform(words)))


@triton.jit
def natural_log(x):
    """Return the natural logarithm; Triton's own is a rough one on a GPU."""
    if _IS_INTERPRETED:
        return tl.log(x)
    return libdevice.log(x)


@triton.jit
def _rough_log2(x):
    """Return the logarithm that the hardware has an instruction for."""
    if _IS_INTERPRETED:
        return tl.log2(x)
    return libdevice.fast_log2f(x)


@triton.jit
def _rough_noise(words):
    """Return Gumbel noise, wrong by at most 1e-5.

    The hardware's logarithm has an absolute error where its result is near 0, that is, where u is
    near 1 and the noise large. There -ln(1 - v) is the beginning of its series, v = 1 - u.
    """
    u = _uniform(words)
    v = 1.0 - u
    near_one = v * (1.0 + v * (0.5 + v * (1.0 / 3.0 + v * 0.25)))
    exponential = tl.where(v < 0.0625, near_one, -0.6931471805599453 * _rough_log2(u))
    return -0.6931471805599453 * _rough_log2(exponential)
