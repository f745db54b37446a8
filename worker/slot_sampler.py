"""What the runner asks of sampling, and how torch does it.

A sampler reads what the slots hold (`SamplingSlots`), draws a token for each row of logits, keeps
it as the slot's last token and reports it. The tokens are the same on every rank.
"""

from typing import Protocol

import torch
from torch import Tensor

from worker.batch import SampledRows
from worker.sampling_slots import SamplingSlots
from worker.sharded_sampler import ShardedSampler

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
        samples = self._sampler.sample(
            logits.float(), self._slots.rows(rows.host_slots, rows.indices)
        )
        self._slots.last_tokens.index_copy_(0, rows.slots, samples.tokens)
        return samples.tokens.to(torch.int32).masked_fill_(samples.failed, FAILED)

    def whole_logits(self, logits: Tensor) -> Tensor:
        """Return all ranks' logits of some rows side by side. [n, width] -> [n, vocab]"""
        return self._sampler.whole_logits(logits)
