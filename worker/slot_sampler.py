"""What the runner asks of sampling, and how torch does it.

A sampler reads what the slots hold (`SamplingSlots`), draws a token for each row of logits, keeps
it as the slot's last token and reports it. The tokens are the same on every rank.
"""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.batch import SampledRows
from worker.sampler import Samples
from worker.sampling_slots import SamplingSlots
from worker.sharded_sampler import ShardedSampler
from worker.upload import upload

FAILED = -1
"""Reported in place of the token of a row whose logits are not finite."""


class SlotSampler(Protocol):
    """A way to sample on this rank's device, together with the other ranks."""

    def sample(self, logits: Tensor, rows: SampledRows) -> Tensor:
        """Return each row's token, FAILED where it has none; keep them as last tokens. [n] int32

        `logits`, [n, width] in any float type, are this rank's. The device may not be done.
        """
        ...

    def whole_logits(self, logits: Tensor) -> Tensor:
        """Return all ranks' logits of some rows side by side. [n, width] -> [n, vocab]"""
        ...


class TorchSlotSampler:
    """`SlotSampler` by torch's operators: any device, but it waits for it."""

    def __init__(self, slots: SamplingSlots, sampler: ShardedSampler) -> None:
        self._slots = slots
        self._sampler = sampler

    def sample(self, logits: Tensor, rows: SampledRows) -> Tensor:
        """Return each row's token, FAILED where it has none; keep them as last tokens. [n] int32"""
        logits = logits.float()
        edited = self._slots.edits.rows_of(rows.host_slots)
        if len(edited):
            samples = self._sample_apart(logits, rows, edited)
        else:
            samples = self._sampler.sample(logits, self._slots.rows(rows.host_slots, rows.indices))
        self._slots.last_tokens.index_copy_(0, rows.slots, samples.tokens)
        return samples.tokens.to(torch.int32).masked_fill_(samples.failed, FAILED)

    def _sample_apart(
        self, logits: Tensor, rows: SampledRows, edited: NDArray[np.int64]
    ) -> Samples:
        """Sample the rows that are edited, and then the others."""
        others = np.setdiff1d(np.arange(len(rows)), edited)
        edits = self._slots.edits
        index, rest = upload((edited, others), logits.device)
        slots, indices = rows.slots[index], rows.indices[index]
        whole = self._sampler.whole_logits(logits[index])
        samples = self._sampler.sample_whole(
            edits.edit(whole, slots, indices), self._slots.rows(rows.host_slots[edited], indices)
        )
        edits.note(slots, samples.tokens)
        if not len(others):
            return samples
        host_slots = rows.host_slots[others]
        plain = self._sampler.sample(logits[rest], self._slots.rows(host_slots, rows.indices[rest]))
        order = torch.cat((index, rest)).argsort()
        return Samples(
            torch.cat((samples.tokens, plain.tokens))[order],
            torch.cat((samples.failed, plain.failed))[order],
        )

    def whole_logits(self, logits: Tensor) -> Tensor:
        """Return all ranks' logits of some rows side by side. [n, width] -> [n, vocab]"""
        return self._sampler.whole_logits(logits)
