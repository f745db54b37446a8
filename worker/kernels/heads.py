"""What lies between the product of queries, keys and values and attention, in one launch on a GPU.

Queries and keys are normalised and rotated in place, if the model does that; keys and values are
also written to the cache. Bytes per row, of h query and k key-value heads of d numbers of b bytes:

    read       (h + 2k) · d · b    and the row's cosines and sines, d · b
    written    (h +  k) · d · b    in place
               2k · d · b          to the cache

A program takes a few heads of one row and holds each as its two halves, so that the rotation's swap
of halves moves nothing:

    a' = a · cos + b · sin        b' = b · cos + a · sin        sin is negated in the first half

Where only the first numbers of a head turn, the halves are those of this part, and the rest is held
beside them. Where all do, what concerns the rest is not compiled.

Many rows have programs of more heads: they share the angles and the weights. Few rows have more
programs, which all run at once, so that what counts is the length of one.

What is not finite is cached as the largest number there is, and values also in place, where kernels
read them beside their neighbours' (`worker.attention.paged.KVWriter` says why). A cache in fp8 gets
e4m3 numbers of at most 448, and NaN for a key that is not finite.

Roundings are those of `worker.layers.head_norm` and `worker.layers.rotary` on a GPU: normalised in
float32, rounded to the dtype, times the weight, rounded; times the cosine, rounded; plus the rest.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.kernels.fp8 import e4m3_or_nan
from worker.kernels.overlap import launch_options

_FEW_ROWS = 64
_FEW_HEADS, _MANY_HEADS = 4, 8
_NUMBERS_PER_THREAD = 8
"""Of each half: 16 bytes of a 16-bit dtype."""


def prepare_heads(
    heads: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
    keys: Tensor,
    values: Tensor,
    cache_positions: Tensor,
) -> None:
    """Normalise and rotate queries and keys in place; write keys and values to the cache.

    heads             [rows, num_heads + 2 · num_kv_heads, head_dim]: queries, keys, values
    cos, sin          [rows, 1, rotary_dim], as `worker.layers.rotary.Rotation` has them; None for
                      both where a layer does not rotate
    query_weight, key_weight
                      [head_dim], None for both in a model that does not normalise heads
    keys, values      [blocks, block_size, num_kv_heads, head_dim], of the heads' dtype or e4m3
    cache_positions   [n] int32 or int64, block · block_size + offset of the first n rows; the
                      others are not written to the cache

    Each tensor's numbers lie together.
    """
    num_rows, num_all_heads, head_dim = heads.shape
    assert num_all_heads == num_heads + 2 * num_kv_heads
    assert len(cache_positions) <= num_rows
    for tensor in (heads, cos, sin, keys, values):
        assert tensor is None or tensor.is_contiguous(), "numbers lie together"
    rotary_dim = head_dim if cos is None else cos.shape[-1]
    half_block = triton.next_power_of_2(rotary_dim // 2)
    run = _FEW_HEADS if num_rows <= _FEW_ROWS else _MANY_HEADS
    num_runs = triton.cdiv(num_all_heads, run)
    _prepare_runs[(num_rows * num_runs,)](
        heads,
        cos,
        sin,
        query_weight,
        key_weight,
        keys,
        values,
        cache_positions,
        len(cache_positions),
        num_runs,
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        HALF_BLOCK=half_block,
        REST_BLOCK=triton.next_power_of_2(head_dim - rotary_dim),
        RUN=run,
        NORMALIZES=query_weight is not None,
        ROTATES=cos is not None,
        num_warps=max(run * half_block // (32 * _NUMBERS_PER_THREAD), 1),
        **launch_options(heads.device),
    )


@triton.jit
def _prepare_runs(
    heads,
    cos,
    sin,
    query_weight,
    key_weight,
    keys,
    values,
    cache_positions,
    num_cached,
    num_runs,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    NORMALIZES: tl.constexpr,
    ROTATES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Prepare a run of one row's heads."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    HALF: tl.constexpr = ROTARY_DIM // 2
    HAS_REST: tl.constexpr = ROTARY_DIM < HEAD_DIM
    NUM_ROTATED: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    NUM_ALL: tl.constexpr = NUM_ROTATED + NUM_KV_HEADS
    row = (tl.program_id(0) // num_runs).to(tl.int64)
    head = (tl.program_id(0) % num_runs * RUN + tl.arange(0, RUN))[:, None]
    column = tl.arange(0, HALF_BLOCK)[None, :]
    in_half = column < HALF
    held = (head < NUM_ALL) & in_half

    at = heads + row * (NUM_ALL * HEAD_DIM) + head * HEAD_DIM + column
    first = tl.load(at, mask=held, other=0.0)
    second = tl.load(at + HALF, mask=held, other=0.0)
    rest_column, rest_held, rest_at, rest = column, held, at, first
    if HAS_REST:
        rest_column = ROTARY_DIM + tl.arange(0, REST_BLOCK)[None, :]
        rest_held = (head < NUM_ALL) & (rest_column < HEAD_DIM)
        rest_at = heads + row * (NUM_ALL * HEAD_DIM) + head * HEAD_DIM + rest_column
        rest = tl.load(rest_at, mask=rest_held, other=0.0)
    # What is cached is known before it is computed, so that its position arrives meanwhile.
    is_cached = row < num_cached
    position = tl.load(cache_positions + row, mask=is_cached, other=0).to(tl.int64)
    cached = position * (NUM_KV_HEADS * HEAD_DIM) + column
    rest_cached = position * (NUM_KV_HEADS * HEAD_DIM) + rest_column

    # Most runs have heads of one kind, and do nothing for the others.
    start = tl.program_id(0) % num_runs * RUN
    if start < NUM_ROTATED:
        # Every head loads the angles and weights for itself, by the threads that hold its numbers.
        # They come from the first-level cache; handing them over would take shared memory and a
        # barrier. Both halves turn by the same angle.
        columns = tl.broadcast_to(column, (RUN, HALF_BLOCK))
        cosine = tl.zeros((RUN, HALF_BLOCK), tl.float32)
        sine = cosine
        if ROTATES:
            angle = row * ROTARY_DIM + columns
            cosine = tl.load(cos + angle, mask=held, other=0.0).to(tl.float32)
            sine = tl.load(sin + angle + HALF, mask=held, other=0.0).to(tl.float32)
        dtype = first.dtype
        a, b = first.to(tl.float32), second.to(tl.float32)
        rest_key = rest
        is_rotated = held & (head < NUM_ROTATED)
        if NORMALIZES:
            weight = tl.where(head < NUM_HEADS, query_weight, key_weight) + columns
            wa = tl.load(weight, mask=held, other=0.0).to(tl.float32)
            wb = tl.load(weight + HALF, mask=held, other=0.0).to(tl.float32)
            squares = tl.sum(a * a + b * b, axis=1, keep_dims=True)
            c = rest.to(tl.float32)
            if HAS_REST:
                squares += tl.sum(c * c, axis=1, keep_dims=True)
            inverse = tl.rsqrt(squares / HEAD_DIM + eps)
            a = _rounded(_rounded(a * inverse, dtype) * wa, dtype)
            b = _rounded(_rounded(b * inverse, dtype) * wb, dtype)
            if HAS_REST:
                weight = tl.where(head < NUM_HEADS, query_weight, key_weight) + rest_column
                wc = tl.load(weight, mask=rest_held, other=0.0).to(tl.float32)
                rest_key = (_rounded(c * inverse, dtype) * wc).to(dtype)
                tl.store(rest_at, rest_key, mask=rest_held & (head < NUM_ROTATED))
        turned_a, turned_b = a.to(dtype), b.to(dtype)
        if ROTATES:
            turned_a = (_rounded(a * cosine, dtype) - b * sine).to(dtype)
            turned_b = (_rounded(b * cosine, dtype) + a * sine).to(dtype)
        if ROTATES or NORMALIZES:
            tl.store(at, turned_a, mask=is_rotated)
            tl.store(at + HALF, turned_b, mask=is_rotated)
        if start + RUN > NUM_HEADS:
            key = keys + cached + (head - NUM_HEADS) * HEAD_DIM
            is_key = is_rotated & (head >= NUM_HEADS) & is_cached
            kept = keys.dtype.element_ty
            tl.store(key, _cached_key(turned_a, kept), mask=is_key)
            tl.store(key + HALF, _cached_key(turned_b, kept), mask=is_key)
            if HAS_REST:
                is_rest = rest_held & (head >= NUM_HEADS) & (head < NUM_ROTATED) & is_cached
                key = keys + rest_cached + (head - NUM_HEADS) * HEAD_DIM
                tl.store(key, _cached_key(rest_key, kept), mask=is_rest)
    if start + RUN > NUM_ROTATED:
        value = values + cached + (head - NUM_ROTATED) * HEAD_DIM
        is_value = held & (head >= NUM_ROTATED)
        kept = values.dtype.element_ty
        finite_a, finite_b = _finite(first), _finite(second)
        tl.store(value, _cached_value(finite_a, kept), mask=is_value & is_cached)
        tl.store(value + HALF, _cached_value(finite_b, kept), mask=is_value & is_cached)
        # In place too, where it differs: NaN differs from everything.
        tl.store(at, finite_a, mask=is_value & (finite_a != first))
        tl.store(at + HALF, finite_b, mask=is_value & (finite_b != second))
        if HAS_REST:
            is_rest = rest_held & (head >= NUM_ROTATED)
            finite_rest = _finite(rest)
            value = values + rest_cached + (head - NUM_ROTATED) * HEAD_DIM
            tl.store(value, _cached_value(finite_rest, kept), mask=is_rest & is_cached)
            tl.store(rest_at, finite_rest, mask=is_rest & (finite_rest != rest))


@triton.jit
def _cached_key(x, dtype: tl.constexpr):
    """Return a key as the cache has it."""
    cached = _finite(x)
    if dtype == tl.float8e4nv:
        cached = e4m3_or_nan(x)
    return cached


@triton.jit
def _cached_value(x, dtype: tl.constexpr):
    """Return a finite value as the cache has it."""
    cached = x
    if dtype == tl.float8e4nv:
        cached = e4m3_or_nan(x)
    return cached


@triton.jit
def _finite(x):
    """Replace what is not finite by the largest number, of the same sign if it has one."""
    largest: tl.constexpr = 65504.0 if x.dtype == tl.float16 else 3.3895313892515355e38
    wide = x.to(tl.float32)
    wide = tl.where(wide == wide, wide, largest)
    return tl.minimum(tl.maximum(wide, -largest), largest).to(x.dtype)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """Round float32 to a dtype, in float32."""
    return x.to(dtype).to(tl.float32)
