import numpy as np
import torch

from protocol.messages import SamplingParams
from worker.logit_edits import Known
from worker.sampling_slots import NO_LOGPROBS, SamplingSlots, Variant

CPU = torch.device("cpu")


def make() -> SamplingSlots:
    slots = SamplingSlots(6, 100, CPU)
    first = [
        SamplingParams(temperature=0.0, seed=1, top_k=5, logprobs=0),
        SamplingParams(temperature=0.5, seed=-(2**63)),
        SamplingParams(temperature=0.7, seed=2**63 - 1, top_k=5, logprobs=3),
        SamplingParams(temperature=0.7, seed=3, top_p=0.25),
        SamplingParams(temperature=1e-6, seed=3, min_p=0.5),
    ]
    slots.join([1, 0, 2, 3, 4], [first[slot] for slot in (1, 0, 2, 3, 4)])
    slots.join([5], [SamplingParams(temperature=0.7, seed=3, top_k=100)])
    return slots


def test_rows():
    slots = np.array([3, 2, 0, 1, 4, 5], dtype=np.int32)
    rows = make().rows(slots, torch.arange(6))
    assert rows.filtered.tolist() == [0, 1]
    assert rows.unfiltered.tolist() == [3, 5]
    assert rows.max_top_k == 5
    assert rows.top_k.tolist()[:4] == [100, 5, 100, 100]
    assert rows.top_p.tolist()[0] == 0.25
    assert rows.seeds.tolist() == [3, 2**63 - 1, 0, -(2**63), 0, 3]
    assert rows.positions.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_slot_is_taken_over_completely():
    slots = make()
    slots.join([2], [SamplingParams(temperature=1.0, seed=8)])
    rows = slots.rows(np.array([2], dtype=np.int32), torch.tensor([4]))
    assert rows.unfiltered.tolist() == [0]
    assert rows.filtered.tolist() == []
    assert (rows.top_k.item(), rows.top_p.item(), rows.min_p.item()) == (100, 1.0, 0.0)
    assert rows.max_top_k == 0
    assert slots.num_logprobs.tolist() == [0] + [NO_LOGPROBS] * 5


def test_what_is_on_the_device():
    slots = make()
    assert slots.temperatures.tolist() == torch.tensor([0, 0.5, 0.7, 0.7, 0, 0.7]).tolist()
    assert slots.seeds.tolist() == [0, -(2**63), 2**63 - 1, 3, 0, 3]
    assert slots.top_k.tolist() == [100, 100, 5, 100, 100, 100]
    assert slots.top_p.tolist() == [1.0, 1.0, 1.0, 0.25, 1.0, 1.0]
    assert slots.min_p.tolist() == [0.0] * 6
    assert slots.last_tokens.tolist() == [0] * 6
    slots.join([1], [SamplingParams(temperature=0.0, seed=4)])
    assert slots.temperatures.tolist()[:2] == [0.0, 0.0]


def test_what_drawing_takes():
    slots = make()
    takes = [slots.variant(np.array([slot], dtype=np.int32)) for slot in range(6)]
    assert takes == [Variant.PLAIN] * 2 + [Variant.FILTERED] * 2 + [Variant.PLAIN] * 2
    assert slots.variant(np.array([1, 3], dtype=np.int32)) is Variant.FILTERED
    assert slots.variant(np.array([1, 4, 0], dtype=np.int32)) is Variant.PLAIN
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=[7])
    prompt = np.array([1, 2], dtype=np.int32)
    slots.edits.join([Known(slot=4, params=params, token_ids=prompt, prompt_len=2)])
    both = np.array([3, 4], dtype=np.int32)
    assert slots.variant(both) is Variant.EDITED
    assert slots.variant(both, np.array([9, 4], dtype=np.int32)) is Variant.EDITED
    assert slots.variant(both, np.array([9, 5], dtype=np.int32)) is Variant.FILTERED
    assert slots.variant(both[:1]) is Variant.FILTERED
