"""Edits of logits on a GPU, as `worker.logit_edits` says what they are.

Two kernels before a draw, and one after it:

    logits ─► every token: penalties, masks ─► the few tokens with a bias, early stop tokens,
                                               ends of bad words ─► edited logits ─► draw ─► count

Rows of slots without edits are copied. Bytes per row: the logits once in and out, and for a row
with edits 2 a token for counts and two bits for masks. What ranks have of a row is put together
before: edits are of the whole vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.logit_edits import MAX_COUNT, NO_TOKEN, EditTensors

_TILE = 2048
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_MAX_COUNT = tl.constexpr(MAX_COUNT)


def edited_logits(logits: Tensor, state: EditTensors, slots: Tensor, indices: Tensor) -> Tensor:
    """Return logits as they are to be drawn from. [rows, vocab] float32

    logits           [rows, vocab] in any float type
    slots, indices   [rows] int32 or int64: each row's slot, and where its token will stand
    """
    assert logits.stride(1) == 1, "a row's logits lie together"
    num_rows, num_ids = logits.shape
    assert num_ids == state.counts.shape[1], "edits are of the whole vocabulary"
    edited = torch.empty(num_rows, num_ids, dtype=torch.float32, device=logits.device)
    source = (logits, logits.stride(0), edited, slots)
    shared = (
        state.is_edited,
        state.banned,
        state.in_prompt,
        state.counts,
        state.repetition,
        state.frequency,
        state.presence,
    )
    words = state.banned.shape[1]
    _edit_all[(triton.cdiv(num_ids, _TILE), num_rows)](
        *source, *shared, NUM_IDS=num_ids, WORDS=words, TILE=_TILE, num_warps=4
    )
    num_words, word_tokens = state.words.shape[1:]
    _edit_few[(num_rows,)](
        *source,
        indices,
        *shared,
        state.bias_ids,
        state.biases,
        state.stop_ids,
        state.stops_from,
        state.words,
        state.recent,
        NUM_IDS=num_ids,
        WORDS=words,
        BIASES=state.biases.shape[1],
        BIASES_HELD=triton.next_power_of_2(state.biases.shape[1]),
        STOPS=state.stop_ids.shape[1],
        BAD_WORDS=num_words,
        WORD_TOKENS=word_tokens,
        num_warps=4,
    )
    return edited


def count_tokens(last_tokens: Tensor, state: EditTensors, slots: Tensor) -> None:
    """Count the token just drawn for each row whose slot has edits.

    `last_tokens` is [all slots] int64; `slots`, [rows] int32 or int64, has none with edits twice.
    """
    _count[(len(slots),)](
        last_tokens,
        slots,
        state.is_edited,
        state.counts,
        state.recent,
        NUM_IDS=state.counts.shape[1],
        RECENT=state.recent.shape[1],
        RECENT_HELD=triton.next_power_of_2(state.recent.shape[1]),
        num_warps=1,
    )


@triton.jit
def _edit_all(
    logits,
    logits_stride,
    edited,
    slots,
    is_edited,
    banned,
    in_prompt,
    counts,
    repetition,
    frequency,
    presence,
    NUM_IDS: tl.constexpr,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Leave a tile of one row as penalties and the mask make it."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    ids = tl.program_id(0) * TILE + tl.arange(0, TILE)
    held = ids < NUM_IDS
    logit = tl.load(logits + row * logits_stride + ids, mask=held, other=0.0).to(tl.float32)
    value = logit
    if tl.load(is_edited + slot) != 0:
        value = _edited(
            logit,
            0.0,
            ids,
            held,
            slot,
            banned,
            in_prompt,
            counts,
            repetition,
            frequency,
            presence,
            NUM_IDS,
            WORDS,
        )
    tl.store(edited + row * NUM_IDS + ids, value, mask=held)


@triton.jit
def _edit_few(
    logits,
    logits_stride,
    edited,
    slots,
    indices,
    is_edited,
    banned,
    in_prompt,
    counts,
    repetition,
    frequency,
    presence,
    bias_ids,
    biases,
    stop_ids,
    stops_from,
    words,
    recent,
    NUM_IDS: tl.constexpr,
    WORDS: tl.constexpr,
    BIASES: tl.constexpr,
    BIASES_HELD: tl.constexpr,
    STOPS: tl.constexpr,
    BAD_WORDS: tl.constexpr,
    WORD_TOKENS: tl.constexpr,
):
    """Do one row's tokens that have a bias again, and ban what only its position bans."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if tl.load(is_edited + slot) != 0:
        start, out = logits + row * logits_stride, edited + row * NUM_IDS
        place = tl.arange(0, BIASES_HELD)
        ids = tl.load(bias_ids + slot * BIASES + place, mask=place < BIASES, other=_NO_TOKEN)
        held = ids != _NO_TOKEN
        logit = tl.load(start + ids, mask=held, other=0.0).to(tl.float32)
        bias = tl.load(biases + slot * BIASES + place, mask=held, other=0.0)
        value = _edited(
            logit,
            bias,
            ids,
            held,
            slot,
            banned,
            in_prompt,
            counts,
            repetition,
            frequency,
            presence,
            NUM_IDS,
            WORDS,
        )
        tl.store(out + ids, value, mask=held)
        # A token may have a bias and be banned: what one thread wrote another overwrites.
        tl.debug_barrier()
        if tl.load(indices + row).to(tl.int64) < tl.load(stops_from + slot):
            stops = tl.load(stop_ids + slot * STOPS + tl.arange(0, STOPS))
            _ban(start, out, stops, stops != _NO_TOKEN)
        word = tl.arange(0, BAD_WORDS)
        place = tl.arange(0, WORD_TOKENS)
        own = words + slot * BAD_WORDS * WORD_TOKENS
        token = tl.load(own + word[:, None] * WORD_TOKENS + place[None, :])
        newest = tl.load(
            recent + slot * (WORD_TOKENS - 1) + place, mask=place < WORD_TOKENS - 1, other=0
        )
        differs = (token != _NO_TOKEN) & (token != newest[None, :])
        differs = differs & (place < WORD_TOKENS - 1)[None, :]
        fits = tl.sum(differs.to(tl.int32), axis=1) == 0
        end = tl.load(own + word * WORD_TOKENS + (WORD_TOKENS - 1))
        _ban(start, out, end, fits & (end != _NO_TOKEN))


@triton.jit
def _count(
    last_tokens,
    slots,
    is_edited,
    counts,
    recent,
    NUM_IDS: tl.constexpr,
    RECENT: tl.constexpr,
    RECENT_HELD: tl.constexpr,
):
    """Count one row's token, and make it the newest of its slot."""
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    if tl.load(is_edited + slot) != 0:
        token = tl.load(last_tokens + slot)
        at = counts + slot * NUM_IDS + token
        count = tl.load(at).to(tl.int32)
        tl.store(at, tl.minimum(count + 1, _MAX_COUNT).to(tl.int16))
        place = tl.arange(0, RECENT_HELD)
        own = recent + slot * RECENT + place
        later = tl.load(own + 1, mask=place < RECENT - 1, other=0)
        later = tl.where(place == RECENT - 1, token.to(tl.int32), later)
        tl.debug_barrier()
        tl.store(own, later, mask=place < RECENT)


@triton.jit
def _edited(
    logit,
    bias,
    ids,
    held,
    slot,
    banned,
    in_prompt,
    counts,
    repetition,
    frequency,
    presence,
    NUM_IDS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Return logits of token ids of a slot's row after their bias, the penalties and the mask."""
    biased = logit + bias
    factor = tl.load(repetition + slot)
    count = tl.load(counts + slot * NUM_IDS + ids, mask=held, other=0).to(tl.float32)
    is_seen = (count > 0) | _bit(in_prompt, slot, ids, held, WORDS)
    divided = tl.div_rn(biased, tl.zeros_like(biased) + factor)
    repeated = tl.where(biased > 0, divided, biased * factor)
    value = tl.where(is_seen, repeated, biased) - tl.load(frequency + slot) * count
    value -= tl.where(count > 0, tl.load(presence + slot), 0.0)
    # What the model made NaN or infinite stays, so that the row fails.
    is_banned = _bit(banned, slot, ids, held, WORDS) & (logit < float("inf"))
    return tl.where(is_banned, float("-inf"), value)


@triton.jit
def _bit(masks, slot, ids, held, WORDS: tl.constexpr):
    """Return whether the bits of token ids are set in a slot's mask."""
    word = tl.load(masks + slot * WORDS + (ids >> 5), mask=held, other=0)
    return ((word >> (ids & 31)) & 1) != 0


@triton.jit
def _ban(start, out, ids, held):
    """Ban token ids of a row, unless the model made them NaN or infinite."""
    logit = tl.load(start + ids, mask=held, other=0.0).to(tl.float32)
    tl.store(out + ids, float("-inf"), mask=held & (logit < float("inf")))
