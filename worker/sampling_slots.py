"""Each slot's last token and sampling parameters, on the device, and which rows need what.

The host keeps a small copy of what decides the work: whether a slot is greedy, samples freely or
samples behind filters, and how many log-probabilities it wants. So no step has to look at the
device to know what to run.
"""

import enum
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.messages import SamplingParams
from protocol.sampling import Sampling, sampling
from worker.logit_edits import LogitEdits
from worker.sampler import SamplingRows
from worker.step_rows import Int32Array
from worker.upload import upload

GREEDY_BELOW = 1e-5
"""Temperatures below this count as 0."""
NO_LOGPROBS = -1


class _Kind(enum.IntEnum):
    GREEDY = 0
    UNFILTERED = 1
    FILTERED = 2


class Variant(enum.IntEnum):
    """What drawing the tokens of a step takes. Each variant can do what those before it can."""

    PLAIN = 0
    FILTERED = 1
    """Some row has top-k, top-p or min-p."""
    EDITED = 2
    """Some row's logits are edited (`worker.logit_edits`)."""


class SamplingSlots:
    """What sampling knows of `slots` slots. Parameters are written when a sequence joins."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self.last_tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        """[slots] int64, the token that a slot's next decode row is fed. The sampler writes it."""
        self.temperatures = torch.zeros(slots, device=device)
        """[slots] float32; 0: greedy."""
        self.top_k = torch.full((slots,), vocab_size, dtype=torch.int64, device=device)
        """[slots] int64; the vocabulary's size keeps all."""
        self.top_p = torch.ones(slots, device=device)
        """[slots] float32; 1 keeps all."""
        self.min_p = torch.zeros(slots, device=device)
        """[slots] float32; 0 keeps all."""
        self.seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        """[slots] int64, any pattern of bits."""
        self.edits = LogitEdits(slots, vocab_size, device)
        """What else is done to logits before a draw."""
        self._kinds: NDArray[np.int8] = np.zeros(slots, dtype=np.int8)
        self._host_top_k: NDArray[np.int64] = np.zeros(slots, dtype=np.int64)
        self.num_logprobs: Int32Array = np.full(slots, NO_LOGPROBS, dtype=np.int32)
        """[slots] alternatives a slot wants reported; NO_LOGPROBS: none, nor its own token's."""
        self.num_prompt_logprobs: Int32Array = np.full(slots, NO_LOGPROBS, dtype=np.int32)
        """[slots] the same of prompt tokens."""

    def join(self, slots: Sequence[int], params: Sequence[SamplingParams]) -> None:
        """Take the parameters of the sequences that have joined slots, at least one.

        What edits of logits these ask for, `edits` is to be told, with the sequences' tokens.
        """
        index = np.array(slots, dtype=np.int64)
        integers = np.zeros((2, len(slots)), dtype=np.int64)
        floats = np.zeros((3, len(slots)), dtype=np.float32)
        for column, (slot, given) in enumerate(zip(slots, params, strict=True)):
            chosen = sampling(given)
            kind, top_k = self._kind(chosen)
            self._kinds[slot] = kind
            self._host_top_k[slot] = 0 if top_k == self._vocab_size else top_k
            self.num_logprobs[slot] = NO_LOGPROBS if given.logprobs is None else given.logprobs
            scores = given.prompt_logprobs
            self.num_prompt_logprobs[slot] = NO_LOGPROBS if scores is None else scores
            if kind is _Kind.GREEDY:
                integers[:, column] = top_k, 0
                floats[:, column] = 0.0, 1.0, 0.0
            else:
                assert given.seed is not None, "the scheduler sees seeds resolved"
                integers[:, column] = top_k, given.seed
                floats[:, column] = chosen.temperature, chosen.top_p, chosen.min_p
        rows, device_integers, bits = upload((index, integers, floats.view(np.int32)), self._device)
        device_floats = bits.view(torch.float32)
        for target, values in zip((self.top_k, self.seeds), device_integers, strict=True):
            target.index_copy_(0, rows, values)
        targets = (self.temperatures, self.top_p, self.min_p)
        for target, values in zip(targets, device_floats, strict=True):
            target.index_copy_(0, rows, values)

    def rows(self, slots: Int32Array, positions: Tensor) -> SamplingRows:
        """Return what torch's sampler needs for rows of these slots.

        `positions`, [rows] int64 on the device, are the indices of their tokens.
        """
        kinds = self._kinds[slots]
        filtered = np.flatnonzero(kinds == _Kind.FILTERED)
        index, unfiltered_rows, filtered_rows = upload(
            (slots.astype(np.int64), np.flatnonzero(kinds == _Kind.UNFILTERED), filtered),
            self._device,
        )
        return SamplingRows(
            temperatures=self.temperatures[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            min_p=self.min_p[index],
            seeds=self.seeds[index],
            positions=positions,
            unfiltered=unfiltered_rows,
            filtered=filtered_rows,
            max_top_k=int(self._host_top_k[slots[filtered]].max(initial=0)),
        )

    def variant(self, slots: Int32Array, indices: Int32Array | None = None) -> Variant:
        """Return what drawing for rows of these slots takes.

        `indices`, where their tokens will stand, tell when the edits of a row are over.
        """
        if self.edits.in_force(slots, indices):
            return Variant.EDITED
        has_filters = (self._kinds[slots] == _Kind.FILTERED).any()
        return Variant.FILTERED if has_filters else Variant.PLAIN

    def _kind(self, chosen: Sampling) -> tuple[_Kind, int]:
        """Return how a sequence samples, and its top-k, the vocabulary's size if it has none."""
        keeps_all = chosen.top_k <= 0 or chosen.top_k >= self._vocab_size
        if chosen.temperature < GREEDY_BELOW:
            return _Kind.GREEDY, self._vocab_size
        if keeps_all and chosen.top_p >= 1.0 and chosen.min_p <= 0.0:
            return _Kind.UNFILTERED, self._vocab_size
        return _Kind.FILTERED, self._vocab_size if keeps_all else chosen.top_k
