"""Top-k, top-p and min-p on a GPU: the least scaled logit that all filters keep, without a sort.

Every filter keeps the tokens whose scaled logit x reaches a threshold (`worker.sampler`):

    top-k    the least x that occurs with    count(> x) < k
    top-p    the least x that occurs with    mass(> x) < p · mass(≥ top-k's threshold)
    min-p    the largest x + ln(min_p)

Count and mass only fall as x rises, so the first two are searched for, among the bits of x put in
the order of the numbers: each round takes a sum above eight pivots at once and leaves a ninth of
the range. One program does a row, always in the same order, so that a row's threshold does not
depend on its neighbours:

1. the largest logit, and the largest of each of a few thousand columns into which the row is
   folded. The k-th largest column is at most the k-th largest token, and mostly close to it.
2. what lies above that, or for top-p above what all tokens together could not make up, is gathered
   in scratch memory: a few hundred tokens as a rule. If it is more than fits, rounds read the row.
3. the rounds, over what was gathered.

Bytes per row: the logits twice, from memory or the second-level cache, and what was gathered once a
round; without filters nothing, for min-p alone the logits once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.drawing import draw_tokens, natural_log, scaled_logit

_COLUMNS = 4096
_GATHERED = 8192
_RUN = 1024
"""Numbers that a round takes at once."""
_COARSE_ROUNDS = tl.constexpr(16)


def draw_filtered_tokens(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    slots: Tensor,
    last_tokens: Tensor,
    reported: Tensor,
) -> None:
    """Draw each row's token from what its slot's filters keep, as `draw_tokens` does.

    top_k [all slots] int64, at least 1, the vocabulary's size or more keeps all; top_p [all slots]
    float32, 1 keeps all; min_p [all slots] float32, 0 keeps all.
    """
    thresholds = filter_threshold(logits, temperatures, top_k, top_p, min_p, slots=slots)
    draw_tokens(
        logits,
        temperatures,
        seeds,
        positions,
        slots=slots,
        last_tokens=last_tokens,
        reported=reported,
        thresholds=thresholds,
    )


def filter_threshold(
    logits: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    slots: Tensor | None = None,
) -> Tensor:
    """Return the least logit / temperature that all filters keep. [rows] float32

    `logits` [rows, vocab] in any float type. The others, float32 and for top-k int64, are [rows],
    or [all slots] if `slots`, [rows] int32 or int64, says which is a row's. Rows that are greedy or
    have no filter get -inf.
    """
    assert logits.stride(1) == 1, "a row's logits lie together"
    num_rows, num_ids = logits.shape
    thresholds = logits.new_empty(num_rows, dtype=torch.float32)
    columns = min(_COLUMNS, triton.next_power_of_2(num_ids))
    _find_thresholds[(num_rows,)](
        logits,
        logits.stride(0),
        temperatures,
        top_k,
        top_p,
        min_p,
        slots,
        logits.new_empty(num_rows, _GATHERED),
        thresholds,
        NUM_IDS=num_ids,
        COLUMNS=columns,
        GATHERED=_GATHERED,
        RUN=_RUN,
        num_warps=16,
    )
    return thresholds


@triton.jit
def _find_thresholds(
    logits,
    logits_stride,
    temperatures,
    top_k,
    top_p,
    min_p,
    slots,
    gathered,
    thresholds,
    NUM_IDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATHERED: tl.constexpr,
    RUN: tl.constexpr,
):
    """Leave one row's threshold."""
    row = tl.program_id(0).to(tl.int64)
    at = row
    if slots is not None:
        at = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(temperatures + at)
    k = tl.load(top_k + at)
    p = tl.load(top_p + at)
    least_share = tl.load(min_p + at)
    has_top_k, has_top_p = k < NUM_IDS, p < 1.0
    threshold = float("-inf")
    if (temperature > 0) & (has_top_k | has_top_p | (least_share > 0)):
        start = logits + row * logits_stride
        tops = _column_tops(start, temperature, NUM_IDS, COLUMNS)
        largest = tl.max(tops, axis=0)
        by_min_p = largest + natural_log(least_share)
        threshold = by_min_p
        if has_top_k | has_top_p:
            if has_top_k:
                floor = _below_kth_column(tops, k)
            else:
                # All tokens together weigh less than 1 - p of the largest alone; minus 1 for room.
                floor = _key(largest + natural_log((1.0 - p) / NUM_IDS) - 1.0).to(tl.int64)
                floor = tl.maximum(floor, _key(by_min_p).to(tl.int64) - 1)
            own = gathered + row * GATHERED
            count, mass = _gather(
                start, temperature, largest, floor, own, NUM_IDS, COLUMNS, GATHERED
            )
            # What one thread wrote others read.
            tl.debug_barrier()
            fits = count <= GATHERED
            values = tl.where(fits, own, start)
            num_values = tl.where(fits, count, NUM_IDS)
            highest = _key(largest).to(tl.int64)
            if has_top_k:
                kth = _search(
                    values,
                    num_values,
                    temperature,
                    largest,
                    k.to(tl.float32),
                    floor,
                    highest,
                    False,
                    RUN,
                )
                by_top_k = _from_key(kth)
                threshold = tl.maximum(threshold, by_top_k)
                floor = kth - 1
                mass = _mass_from(values, num_values, temperature, largest, by_top_k, RUN)
            if has_top_p:
                nucleus = _search(
                    values,
                    num_values,
                    temperature,
                    largest,
                    p * mass,
                    floor,
                    highest,
                    True,
                    RUN,
                )
                threshold = tl.maximum(threshold, _from_key(nucleus))
    tl.store(thresholds + row, threshold)


@triton.jit
def _column_tops(start, temperature, NUM_IDS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the largest scaled logit of each column of the row folded to COLUMNS."""
    tops = tl.full((COLUMNS,), float("-inf"), tl.float32)
    for first in tl.range(0, NUM_IDS, COLUMNS, loop_unroll_factor=4):
        ids = first + tl.arange(0, COLUMNS)
        logit = tl.load(start + ids, mask=ids < NUM_IDS, other=float("-inf")).to(tl.float32)
        tops = tl.maximum(tops, logit)
    return scaled_logit(tops, temperature)


@triton.jit
def _below_kth_column(tops, k):
    """Return a key that at least k columns' tops exceed, near the k-th largest's. int64"""
    keys = _key(tops).to(tl.int64)
    low = tl.min(keys, axis=0) - 1
    high = tl.max(keys, axis=0)
    if k > tops.shape[0]:
        low = _key(float("-inf")).to(tl.int64) - 1
    else:
        for _ in range(_COARSE_ROUNDS):
            middle = (low + high) >> 1
            is_exceeded = tl.sum((keys > middle).to(tl.int32), axis=0) >= k
            low = tl.where(is_exceeded, middle, low)
            high = tl.where(is_exceeded, high, middle)
    return low


@triton.jit
def _gather(
    start,
    temperature,
    largest,
    floor,
    gathered,
    NUM_IDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATHERED: tl.constexpr,
):
    """Copy the logits whose key exceeds `floor`; return how many there are, and all's mass."""
    count = 0
    mass = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, NUM_IDS, COLUMNS):
        ids = first + tl.arange(0, COLUMNS)
        logit = tl.load(start + ids, mask=ids < NUM_IDS, other=float("-inf"))
        scaled = scaled_logit(logit.to(tl.float32), temperature)
        mass += tl.exp(scaled - largest)
        is_taken = (_key(scaled).to(tl.int64) > floor) & (ids < NUM_IDS)
        taken = is_taken.to(tl.int32)
        num_taken = tl.sum(taken, axis=0)
        if num_taken > 0:
            to = count + tl.cumsum(taken, axis=0) - 1
            tl.store(gathered + to, logit, mask=is_taken & (to < GATHERED))
        count += num_taken
    return count, tl.sum(mass, axis=0)


@triton.jit
def _search(
    values,
    num_values,
    temperature,
    largest,
    bound,
    low,
    high,
    IS_MASS: tl.constexpr,
    RUN: tl.constexpr,
):
    """Return the least key in (low, high] above which the count, or mass, is less than `bound`.

    `high`, above which there is nothing, is returned if none is. Keys are int64.
    """
    while high - low > 1:
        pivots = low + (high - low) * (1 + tl.arange(0, 8)) // 9
        above = tl.zeros((8,), tl.float32)
        first = 0
        while first < num_values:
            scaled, weight = _run(values, first, num_values, temperature, largest, IS_MASS, RUN)
            is_above = _key(scaled)[:, None] > pivots[None, :].to(tl.int32)
            above += tl.sum(tl.where(is_above, weight[:, None], 0.0), axis=0)
            first += RUN
        is_less = above < bound
        next_high = tl.min(tl.where(is_less, pivots, high), axis=0)
        low = tl.max(tl.where(is_less, low, pivots), axis=0)
        high = next_high
    return high


@triton.jit
def _mass_from(values, num_values, temperature, largest, least, RUN: tl.constexpr):
    """Return the mass of the values that are at least `least`."""
    mass = tl.zeros((RUN,), tl.float32)
    first = 0
    while first < num_values:
        scaled, weight = _run(values, first, num_values, temperature, largest, True, RUN)
        mass += tl.where(scaled >= least, weight, 0.0)
        first += RUN
    return tl.sum(mass, axis=0)


@triton.jit
def _run(values, first, num_values, temperature, largest, IS_MASS: tl.constexpr, RUN: tl.constexpr):
    """Return a run of scaled logits and what each weighs: 1, or as mass exp(x - largest)."""
    at = first + tl.arange(0, RUN)
    held = at < num_values
    logit = tl.load(values + at, mask=held, other=float("-inf")).to(tl.float32)
    scaled = scaled_logit(logit, temperature)
    weight = tl.where(held, 1.0, 0.0)
    if IS_MASS:
        weight = tl.where(held, tl.exp(scaled - largest), 0.0)
    return scaled, weight


@triton.jit
def _key(x):
    """Return an int32 for a float32, in the same order."""
    bits = tl.cast(x, tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _from_key(key):
    """Return the float32 of a key, int64."""
    bits = key.to(tl.int32)
    return tl.cast(tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), tl.float32, bitcast=True)
