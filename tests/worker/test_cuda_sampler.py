"""How ranks' candidates come together; the kernel that finds them is torch here."""

import sys
from functools import partial
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from protocol.messages import SamplingParams
from tests.worker.thread_ranks import ThreadRank, on_all, thread_ranks
from tests.worker.tiny_models import CPU
from worker.parallel import OneRank, TensorParallel
from worker.philox import gumbel_noise
from worker.sampler import Samples, SamplingRows, sample
from worker.sampling_slots import SamplingSlots
from worker.shard import divide_vocabulary

VOCAB_SIZE = 103


class Candidates:
    def __init__(self, scores: Tensor, tokens: Tensor, largest: Tensor) -> None:
        self.scores, self.tokens, self.largest = scores, tokens, largest


def draw_candidates(logits, temperatures, seeds, positions, *, first_id: int) -> Candidates:
    noise = gumbel_noise(seeds, positions, first_id=first_id, num_ids=logits.shape[1])
    is_greedy = temperatures[:, None] == 0
    scaled = logits.float() / torch.where(is_greedy, 1.0, temperatures[:, None])
    scores, winners = torch.where(is_greedy, scaled, scaled + noise).max(dim=-1)
    largest = logits.float().nan_to_num(float("inf"), float("inf"), float("-inf")).amax(-1)
    return Candidates(scores, (first_id + winners).int(), largest)


@pytest.fixture
def make_sampler(monkeypatch: pytest.MonkeyPatch):
    kernels = ModuleType("worker.kernels.drawing")
    monkeypatch.setattr(kernels, "draw_candidates", draw_candidates, raising=False)
    monkeypatch.setitem(sys.modules, "worker.kernels.drawing", kernels)
    monkeypatch.delitem(sys.modules, "worker.cuda_sampler", raising=False)
    from worker.cuda_sampler import CudaSampler

    yield CudaSampler
    sys.modules.pop("worker.cuda_sampler")


def make_rows(*, with_filters: bool) -> tuple[Tensor, SamplingRows]:
    slots = SamplingSlots(6, VOCAB_SIZE, CPU)
    for slot in range(6):
        top_k = 3 if with_filters and slot == 4 else 0
        temperature = 0.0 if slot % 3 == 0 else 0.8
        slots.join(slot, SamplingParams(temperature=temperature, seed=slot, top_k=top_k))
    logits = torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    logits[2, 60] = float("nan")
    indices = np.arange(6, dtype=np.int32)
    return logits, slots.rows(indices, indices + np.int32(9))


def own_part(logits: Tensor, group: TensorParallel) -> Tensor:
    shard = divide_vocabulary(VOCAB_SIZE, rank=group.rank, size=group.size)
    own = logits[:, shard.ids.start : shard.ids.start + shard.ids.size]
    padding = shard.width - shard.ids.size
    return torch.nn.functional.pad(own, (0, padding), value=float("-inf"))


def check(samples: Samples, expected: Samples) -> None:
    assert samples.failed.tolist() == [False, False, True, False, False, False]
    assert torch.equal(samples.tokens[~samples.failed], expected.tokens[~samples.failed])


@pytest.mark.parametrize("with_filters", [False, True])
def test_alone(make_sampler, with_filters: bool):
    logits, rows = make_rows(with_filters=with_filters)
    sampler = make_sampler(VOCAB_SIZE, OneRank())
    check(sampler.sample(logits, rows), sample(logits, rows))
    assert torch.equal(sampler.whole_logits(logits[:2]), logits[:2])


@pytest.mark.parametrize("with_filters", [False, True])
def test_ranks_draw_what_one_draws(make_sampler, with_filters: bool):
    logits, rows = make_rows(with_filters=with_filters)

    def draw(group: ThreadRank) -> Samples:
        return make_sampler(VOCAB_SIZE, group).sample(own_part(logits, group), rows)

    for samples in on_all([partial(draw, rank) for rank in thread_ranks(3)]):
        check(samples, sample(logits, rows))
