"""What requests change about the logits of their rows before a token is drawn.

For each row, in this order (vLLM's):

1. -inf for what may not be drawn: tokens that are not among `allowed_token_ids`, ends of bad words
   whose beginning was just output, and, while the output is shorter than `min_tokens`, stop tokens;
2. `logit_bias` is added;
3. `repetition_penalty` divides the logits above 0, and multiplies those below, of all tokens that
   prompt or output hold;
4. `frequency_penalty` times the number of times that the output holds a token, and
   `presence_penalty` if it does, are subtracted.

Greedy rows choose by the edited logits too. Log-probabilities are those of the logits as the model
made them, and so is whether a row has failed: NaN and infinity are never edited away.

What this takes is kept for each slot on the device and written when a sequence joins, from what its
tokens are by then. Later the device follows by itself: the token drawn for a row is counted in the
same step, so that the next one need not wait for the host. Any other mask of tokens, by whomever it
is made, would be one more step 1 (`_forbidden` here, `banned` in `worker.kernels.editing`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.messages import (
    MAX_BAD_WORD_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from protocol.sampling import sampling
from worker.step_rows import Int32Array
from worker.upload import upload

NO_TOKEN = -1
"""In place of a token that a word does not have. It fits any."""
NOTHING_YET = -2
"""In place of an output token that there is not. It fits NO_TOKEN alone."""
MAX_COUNT = 2**15 - 1
"""Counts are 16 bits: a token that is output more often than this counts as so often."""
_FOR_EVER = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a slot's sequence is when it joins."""

    slot: int
    params: SamplingParams
    token_ids: Int32Array
    """Prompt, then output."""
    prompt_len: int


class EditTensors:
    """What edits need to know of each of `slots` slots. The zeros of a slot mean nothing."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        words = mask_words(vocab_size)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=device)

        self.is_edited = zeros()
        """[slots] 1 or 0; where it is 0, the others mean nothing."""
        self.banned = zeros(words)
        """[slots, words] a bit for each token: 1 may not be drawn."""
        self.in_prompt = zeros(words)
        """[slots, words] a bit for each token: 1 is in the prompt."""
        self.counts = zeros(vocab_size, dtype=torch.int16)
        """[slots, vocab] times that the output holds a token."""
        self.repetition = zeros(dtype=torch.float32)
        self.frequency = zeros(dtype=torch.float32)
        self.presence = zeros(dtype=torch.float32)
        """[slots] the penalties, likewise the two before"""
        self.bias_ids = zeros(MAX_LOGIT_BIASES)
        """[slots, biases] NO_TOKEN past the last."""
        self.biases = zeros(MAX_LOGIT_BIASES, dtype=torch.float32)
        """[slots, biases]"""
        self.stop_ids = zeros(MAX_STOP_TOKEN_IDS)
        """[slots, stops] NO_TOKEN past the last."""
        self.stops_from = zeros(dtype=torch.int64)
        """[slots] the first index in prompt + output where they may be drawn."""
        self.words = zeros(MAX_BAD_WORD_IDS, MAX_BAD_WORD_TOKENS)
        """[slots, bad words, tokens] at the end of each row, behind NO_TOKEN; NO_TOKEN alone in
        rows without a word. Words of one token are among `banned` instead."""
        self.recent = zeros(MAX_BAD_WORD_TOKENS - 1)
        """[slots, tokens - 1] the newest output, the last token last; NOTHING_YET before it."""

    def all(self) -> list[Tensor]:
        """Return every tensor."""
        return list(vars(self).values())


class LogitEdits:
    """The edits of all slots, and which slots have any. The last slot never has: it is padding."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.tensors = EditTensors(slots, vocab_size, device)
        self._vocab_size = vocab_size
        self._device = device
        self._edited: set[int] = set()
        # [slots] the first index in prompt + output where a slot's edits change nothing any more.
        self._until: NDArray[np.int64] = np.zeros(slots, dtype=np.int64)

    def join(self, joins: Iterable[Known]) -> None:
        """Take what sequences that have joined slots want."""
        for known in joins:
            until = _edited_until(known)
            if until:
                self._write(known)
                self._edited.add(known.slot)
            elif known.slot in self._edited:
                self.tensors.is_edited[known.slot] = 0
                self._edited.discard(known.slot)
            self._until[known.slot] = until

    def rows_of(self, slots: Int32Array) -> NDArray[np.int64]:
        """Return which of some rows have edits, by the rows' slots."""
        if not self._edited:
            return np.zeros(0, dtype=np.int64)
        return np.flatnonzero(self._until[slots])

    def in_force(self, slots: Int32Array, indices: Int32Array | None = None) -> bool:
        """Return whether any of some rows is to be edited, given its slot.

        `indices`, of the tokens to be drawn, leave out rows whose edits are over.
        """
        if not self._edited:
            return False
        until = self._until[slots]
        return bool((until > (0 if indices is None else indices)).any())

    def edit(self, logits: Tensor, slots: Tensor, indices: Tensor) -> Tensor:
        """Return logits as they are to be drawn from, by torch's operators.

        `logits` [rows, vocab] float32; `slots` and `indices`, of the tokens to be drawn, [rows]
        int64. Every row is one of a slot with edits.
        """
        state = self.tensors
        edited = logits.scatter_add(1, *_padded(state.bias_ids[slots], state.biases[slots]))
        counts = state.counts[slots]
        is_output = counts > 0
        is_seen = is_output | _bits(state.in_prompt[slots], self._vocab_size)
        repetition = state.repetition[slots, None]
        repeated = torch.where(edited > 0, edited / repetition, edited * repetition)
        edited = torch.where(is_seen, repeated, edited)
        edited -= state.frequency[slots, None] * counts
        edited -= state.presence[slots, None] * is_output
        is_banned = self._forbidden(slots, indices) & (logits < float("inf"))
        return edited.masked_fill_(is_banned, float("-inf"))

    def note(self, slots: Tensor, tokens: Tensor) -> None:
        """Count the tokens drawn for rows of slots with edits. [rows] int64 both"""
        state = self.tensors
        counts = state.counts[slots, tokens]
        state.counts[slots, tokens] = counts + (counts < MAX_COUNT)
        newest = tokens[:, None].to(torch.int32)
        state.recent[slots] = torch.cat((state.recent[slots, 1:], newest), dim=1)

    def _forbidden(self, slots: Tensor, indices: Tensor) -> Tensor:
        """Return which tokens the rows may not draw. [rows, vocab] bool"""
        state = self.tensors
        banned = _bits(state.banned[slots], self._vocab_size)
        is_early = indices < state.stops_from[slots]
        _ban(banned, state.stop_ids[slots].masked_fill(~is_early[:, None], NO_TOKEN))
        words = state.words[slots]
        beginnings, ends = words[:, :, :-1], words[:, :, -1]
        fits = (beginnings == NO_TOKEN) | (beginnings == state.recent[slots, None])
        _ban(banned, ends.masked_fill(~fits.all(dim=2), NO_TOKEN))
        return banned

    def _write(self, known: Known) -> None:
        """Send what a sequence wants to its slot."""
        state, slot = self.tensors, known.slot
        params, prompt = known.params, known.token_ids[: known.prompt_len]
        output = known.token_ids[known.prompt_len :]
        penalties = (
            sampling(params).repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        ids, counts = np.unique(output, return_counts=True)
        sent = upload(
            (
                _banned_bits(params, self._vocab_size),
                _packed(prompt, self._vocab_size),
                ids.astype(np.int64),
                counts.clip(max=MAX_COUNT).astype(np.int32),
                np.array(penalties, dtype=np.float32).view(np.int32),
                _filled(params.logit_bias, MAX_LOGIT_BIASES),
                _bias_bits(params),
                _filled(params.stop_token_ids, MAX_STOP_TOKEN_IDS),
                np.array([known.prompt_len + params.min_tokens], dtype=np.int64),
                _word_rows(params.bad_word_ids),
                _recent(output),
            ),
            self._device,
        )
        banned, in_prompt, device_ids, device_counts, penalty_bits, bias_ids, bias_bits = sent[:7]
        state.counts[slot].zero_().index_copy_(0, device_ids, device_counts.to(torch.int16))
        device_penalties = penalty_bits.view(torch.float32)
        for index, target in enumerate((state.repetition, state.frequency, state.presence)):
            target[slot] = device_penalties[index]
        state.biases[slot] = bias_bits.view(torch.float32)
        targets = (
            *(state.banned, state.in_prompt, state.bias_ids),
            *(state.stop_ids, state.stops_from[:, None], state.words, state.recent),
        )
        for target, values in zip(targets, (banned, in_prompt, bias_ids, *sent[7:]), strict=True):
            target[slot] = values
        state.is_edited[slot] = 1


def mask_words(vocab_size: int) -> int:
    """Return how many int32 hold a bit for each token."""
    return -(-vocab_size // 32)


def _edited_until(known: Known) -> int:
    """Return the first index in prompt + output where a sequence's logits are as the model's."""
    params = known.params
    has_penalties = (
        params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or sampling(params).repetition_penalty != 1.0
    )
    if has_penalties or params.logit_bias or params.bad_word_ids:
        return _FOR_EVER
    if params.allowed_token_ids is not None:
        return _FOR_EVER
    has_early_stops = params.min_tokens > 0 and bool(params.stop_token_ids)
    return known.prompt_len + params.min_tokens if has_early_stops else 0


def _banned_bits(params: SamplingParams, vocab_size: int) -> Int32Array:
    """Return the mask of what may never be drawn."""
    alone = [word[0] for word in params.bad_word_ids if len(word) == 1]
    if params.allowed_token_ids is None:
        return _packed(np.array(alone, dtype=np.int32), vocab_size)
    allowed = np.array(params.allowed_token_ids, dtype=np.int32)
    return ~_packed(np.setdiff1d(allowed, np.array(alone, dtype=np.int32)), vocab_size)


def _packed(token_ids: Int32Array, vocab_size: int) -> Int32Array:
    """Return a mask with the bits of these tokens set. [words]"""
    bits = np.zeros(32 * mask_words(vocab_size), dtype=np.bool_)
    bits[token_ids] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def _filled(token_ids: Iterable[int], size: int) -> Int32Array:
    row = np.full(size, NO_TOKEN, dtype=np.int32)
    ids = list(token_ids)
    row[: len(ids)] = ids
    return row


def _bias_bits(params: SamplingParams) -> Int32Array:
    biases = np.zeros(MAX_LOGIT_BIASES, dtype=np.float32)
    biases[: len(params.logit_bias)] = list(params.logit_bias.values())
    return biases.view(np.int32)


def _word_rows(words: Sequence[Sequence[int]]) -> Int32Array:
    rows = np.full((MAX_BAD_WORD_IDS, MAX_BAD_WORD_TOKENS), NO_TOKEN, dtype=np.int32)
    for row, word in zip(rows, _longer_than_one(words), strict=False):
        row[-len(word) :] = word
    return rows


def _longer_than_one(words: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
    return (word for word in words if len(word) > 1)


def _recent(output: Int32Array) -> Int32Array:
    row = np.full(MAX_BAD_WORD_TOKENS - 1, NOTHING_YET, dtype=np.int32)
    newest = output[-len(row) :]
    row[len(row) - len(newest) :] = newest
    return row


def _bits(masks: Tensor, vocab_size: int) -> Tensor:
    """Return the bits of masks. [rows, words] int32 -> [rows, vocab] bool"""
    shifts = torch.arange(32, dtype=torch.int32, device=masks.device)
    bits = (masks[:, :, None] >> shifts) & 1
    return bits.flatten(1)[:, :vocab_size] != 0


def _padded(token_ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids and what is to be added to each, nothing for NO_TOKEN."""
    return token_ids.clamp(min=0).long(), values.masked_fill(token_ids == NO_TOKEN, 0.0)


def _ban(banned: Tensor, token_ids: Tensor) -> None:
    """Mark tokens of each row, but for NO_TOKEN. [rows, vocab] bool, [rows, n]"""
    is_named = token_ids != NO_TOKEN
    rows = torch.arange(len(banned), device=banned.device)[:, None].expand_as(token_ids)
    banned[rows[is_named], token_ids[is_named].long()] = True
