"""Each slot's sampling parameters, on the device, and which rows of a step need what.

The host keeps a small copy of what decides the work: whether a slot is greedy, samples freely or
samples behind filters, and how many log-probabilities it wants. So no step has to look at the
device to know what to run.
"""

import enum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.messages import SamplingParams
from worker.sampler import SamplingRows
from worker.step_rows import Int32Array

GREEDY_BELOW = 1e-5
"""Temperatures below this count as 0."""
NO_LOGPROBS = -1


class _Kind(enum.IntEnum):
    GREEDY = 0
    UNFILTERED = 1
    FILTERED = 2


class SamplingSlots:
    """The sampling parameters of `slots` slots. Written when a sequence joins."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._temperatures = torch.zeros(slots, device=device)
        self._top_k = torch.full((slots,), vocab_size, dtype=torch.int64, device=device)
        self._top_p = torch.ones(slots, device=device)
        self._min_p = torch.zeros(slots, device=device)
        self._seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self._kinds: NDArray[np.int8] = np.zeros(slots, dtype=np.int8)
        self._host_top_k: NDArray[np.int64] = np.zeros(slots, dtype=np.int64)
        self.num_logprobs: Int32Array = np.full(slots, NO_LOGPROBS, dtype=np.int32)
        """[slots] alternatives a slot wants reported; NO_LOGPROBS: none, nor its own token's."""

    def join(self, slot: int, params: SamplingParams) -> None:
        """Take the parameters of the sequence that has joined a slot."""
        is_greedy = params.temperature < GREEDY_BELOW
        keeps_all = params.top_k <= 0 or params.top_k >= self._vocab_size
        top_k = self._vocab_size if keeps_all else params.top_k
        is_filtered = not keeps_all or params.top_p < 1.0 or params.min_p > 0.0
        kind = _Kind.GREEDY if is_greedy else _Kind.FILTERED if is_filtered else _Kind.UNFILTERED
        self._kinds[slot] = kind
        self._host_top_k[slot] = 0 if keeps_all else top_k
        self.num_logprobs[slot] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self._temperatures[slot] = 0.0 if is_greedy else params.temperature
        if not is_greedy:
            assert params.seed is not None, "the scheduler sees seeds resolved"
            self._top_k[slot] = top_k
            self._top_p[slot] = params.top_p
            self._min_p[slot] = params.min_p
            self._seeds[slot] = params.seed

    def rows(self, slots: Int32Array, positions: Int32Array) -> SamplingRows:
        """Return what the sampler needs for rows of these slots and indices of their tokens."""
        index = self._to_device(slots)
        kinds = self._kinds[slots]
        filtered = np.flatnonzero(kinds == _Kind.FILTERED)
        return SamplingRows(
            temperatures=self._temperatures[index],
            top_k=self._top_k[index],
            top_p=self._top_p[index],
            min_p=self._min_p[index],
            seeds=self._seeds[index],
            positions=self._to_device(positions),
            unfiltered=self._to_device(np.flatnonzero(kinds == _Kind.UNFILTERED)),
            filtered=self._to_device(filtered),
            max_top_k=int(self._host_top_k[slots[filtered]].max(initial=0)),
        )

    def draw_parameters(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return temperatures, 0 where greedy, and seeds of slots [rows] int64 on the device."""
        return self._temperatures.index_select(0, slots), self._seeds.index_select(0, slots)

    def need_logits(self, slots: Int32Array) -> bool:
        """Return whether any of these slots wants more than a draw: filters, log-probabilities."""
        has_filters = self._kinds[slots] == _Kind.FILTERED
        return bool(has_filters.any() or (self.num_logprobs[slots] != NO_LOGPROBS).any())

    def _to_device(self, array: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)
