"""A GPU's sampler against torch's, alone and as one of several ranks."""

import numpy as np
import pytest
import torch
from torch import Tensor

from protocol.messages import SamplingParams
from worker.batch import SampledRows
from worker.logit_edits import Known
from worker.parallel import OneRank
from worker.sampling_slots import SamplingSlots, Variant
from worker.shard import divide_vocabulary
from worker.sharded_sampler import ShardedSampler
from worker.slot_sampler import FAILED, TorchSlotSampler

CudaSampler = pytest.importorskip("worker.cuda_sampler").CudaSampler
VOCAB_SIZE, ROWS = 103, 6


class Parts:
    """What every rank has given away."""

    def __init__(self, size: int) -> None:
        self.of_rank: dict[int, Tensor] = {}
        self.size = size


class Rank:
    """A rank that runs after the others have: first to give its part, then to be given all."""

    def __init__(self, parts: Parts, rank: int) -> None:
        self._parts = parts
        self.rank = rank
        self.size = parts.size

    def all_reduce(self, part: Tensor) -> Tensor:
        return part

    def all_gather(self, part: Tensor) -> Tensor:
        self._parts.of_rank[self.rank] = part
        return torch.stack([self._parts.of_rank.get(rank, part) for rank in range(self.size)])


def make_slots(device: torch.device, variant: Variant) -> SamplingSlots:
    slots = SamplingSlots(ROWS, VOCAB_SIZE, device)
    params = [
        SamplingParams(
            temperature=0.0 if slot % 3 == 0 else 0.8,
            seed=slot,
            top_k=3 if variant >= Variant.FILTERED and slot == 4 else 0,
        )
        for slot in range(ROWS)
    ]
    slots.join(range(ROWS), params)
    if variant is Variant.EDITED:
        edited = SamplingParams(logit_bias={60: -100.0, 9: 4.0}, presence_penalty=1.0)
        tokens = np.array([5, 9], dtype=np.int32)
        slots.edits.join(
            Known(slot=slot, params=edited, token_ids=tokens, prompt_len=1) for slot in (0, 1, 2)
        )
    return slots


def make_logits(device: torch.device) -> Tensor:
    logits = torch.randn(ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    logits[2, 60] = float("nan")
    return logits.to(device)


def make_rows(device: torch.device) -> SampledRows:
    slots = np.array([5, 1, 2, 0, 4, 3], dtype=np.int32)
    index = torch.from_numpy(slots).long().to(device)
    return SampledRows(slots=index, indices=index + 9, host_slots=slots)


def expect(device: torch.device, variant: Variant) -> tuple[list[int], list[int]]:
    """Return what torch's sampler reports, and the last tokens it leaves."""
    slots = make_slots(device, variant)
    sampler = TorchSlotSampler(slots, ShardedSampler(VOCAB_SIZE, OneRank()))
    reported = sampler.sample(make_logits(device), make_rows(device)).tolist()
    assert reported[2] == FAILED
    return reported, slots.last_tokens.tolist()


def check(reported: Tensor, slots: SamplingSlots, expected: tuple[list[int], list[int]]) -> None:
    assert reported.tolist() == expected[0]
    last_tokens = slots.last_tokens.tolist()
    assert 0 <= last_tokens.pop(2) < VOCAB_SIZE  # a failed row's means nothing
    assert last_tokens == [token for slot, token in enumerate(expected[1]) if slot != 2]


@pytest.mark.parametrize("variant", list(Variant))
def test_alone(device: torch.device, variant: Variant):
    slots = make_slots(device, variant)
    sampler = CudaSampler(slots, VOCAB_SIZE, OneRank())
    reported = sampler.sample(make_logits(device), make_rows(device))
    check(reported, slots, expect(device, variant))
    logits = make_logits(device)[:2]
    assert torch.equal(sampler.whole_logits(logits), logits)


@pytest.mark.parametrize("variant", list(Variant))
def test_ranks_draw_what_one_draws(device: torch.device, variant: Variant):
    parts = Parts(3)
    logits, rows = make_logits(device), make_rows(device)
    for is_last in (False, True):
        for rank in range(parts.size):
            shard = divide_vocabulary(VOCAB_SIZE, rank=rank, size=parts.size)
            own = logits[:, shard.ids.start : shard.ids.start + shard.ids.size]
            padding = (0, shard.width - shard.ids.size)
            own = torch.nn.functional.pad(own, padding, value=float("-inf"))
            slots = make_slots(device, variant)
            reported = CudaSampler(slots, VOCAB_SIZE, Rank(parts, rank)).sample(own, rows)
            if is_last:
                check(reported, slots, expect(device, variant))
