import numpy as np
import torch

from protocol.messages import SamplingParams
from worker.sampling_slots import NO_LOGPROBS, SamplingSlots

CPU = torch.device("cpu")


def make() -> SamplingSlots:
    slots = SamplingSlots(6, 100, CPU)
    slots.join(0, SamplingParams(temperature=0.0, seed=1, top_k=5, logprobs=0))
    slots.join(1, SamplingParams(temperature=0.5, seed=-(2**63)))
    slots.join(2, SamplingParams(temperature=0.7, seed=2**63 - 1, top_k=5, logprobs=3))
    slots.join(3, SamplingParams(temperature=0.7, seed=3, top_p=0.25))
    slots.join(4, SamplingParams(temperature=1e-6, seed=3, min_p=0.5))
    slots.join(5, SamplingParams(temperature=0.7, seed=3, top_k=100))
    return slots


def test_rows():
    slots = np.array([3, 2, 0, 1, 4, 5], dtype=np.int32)
    rows = make().rows(slots, np.arange(6, dtype=np.int32))
    assert rows.filtered.tolist() == [0, 1]
    assert rows.unfiltered.tolist() == [3, 5]
    assert rows.max_top_k == 5
    assert rows.top_k.tolist()[:4] == [100, 5, 100, 100]
    assert rows.top_p.tolist()[0] == 0.25
    assert rows.seeds.tolist() == [3, 2**63 - 1, 0, -(2**63), 0, 3]
    assert rows.positions.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_slot_is_taken_over_completely():
    slots = make()
    slots.join(2, SamplingParams(temperature=1.0, seed=8))
    rows = slots.rows(np.array([2], dtype=np.int32), np.array([4], dtype=np.int32))
    assert rows.unfiltered.tolist() == [0]
    assert rows.filtered.tolist() == []
    assert (rows.top_k.item(), rows.top_p.item(), rows.min_p.item()) == (100, 1.0, 0.0)
    assert rows.max_top_k == 0
    assert slots.num_logprobs.tolist() == [0] + [NO_LOGPROBS] * 5


def test_what_a_draw_needs():
    slots = make()
    temperatures, seeds = slots.draw_parameters(torch.tensor([1, 0, 5]))
    assert temperatures.tolist() == [0.5, 0.0, torch.tensor(0.7).item()]
    assert seeds.tolist()[::2] == [-(2**63), 3]
    slots.join(1, SamplingParams(temperature=0.0, seed=4))
    assert slots.draw_parameters(torch.tensor([1]))[0].tolist() == [0.0]


def test_who_needs_more_than_a_draw():
    needs = {slot: make().need_logits(np.array([slot], dtype=np.int32)) for slot in range(6)}
    assert needs == {0: True, 1: False, 2: True, 3: True, 4: False, 5: False}
    assert make().need_logits(np.array([1, 3], dtype=np.int32))
