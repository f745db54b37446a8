import numpy as np
import torch

from protocol.messages import SamplingParams
from worker.batch import SampledRows
from worker.logit_edits import Known
from worker.parallel import OneRank
from worker.sampling_slots import SamplingSlots
from worker.sharded_sampler import ShardedSampler
from worker.slot_sampler import FAILED, TorchSlotSampler

CPU = torch.device("cpu")


def test_tokens_are_reported_and_kept():
    slots = SamplingSlots(5, 10, CPU)
    slots.join([1, 3, 4], [SamplingParams(temperature=0.0, seed=0)] * 3)
    sampler = TorchSlotSampler(slots, ShardedSampler(10, OneRank()))
    logits = torch.zeros(3, 10, dtype=torch.float16)
    logits[0, 7] = logits[1, 2] = 1.0
    logits[2, 5] = float("nan")
    chosen = np.array([3, 1, 4], dtype=np.int32)
    rows = SampledRows(
        slots=torch.from_numpy(chosen).long(), indices=torch.tensor([9, 4, 2]), host_slots=chosen
    )
    reported = sampler.sample(logits, rows)
    assert reported.tolist() == [7, 2, FAILED]
    assert reported.dtype == torch.int32
    assert slots.last_tokens.tolist()[:4] == [0, 2, 0, 7]
    assert 0 <= int(slots.last_tokens[4]) < 10
    assert torch.equal(sampler.whole_logits(logits[:1]), logits[:1])


def test_edited_rows_beside_others():
    slots = SamplingSlots(5, 10, CPU)
    params = SamplingParams(temperature=0.0, seed=0, frequency_penalty=1.0)
    slots.join([1, 3, 4], [SamplingParams(temperature=0.0, seed=0), params, params])
    prompt = np.array([2], dtype=np.int32)
    slots.edits.join(
        Known(slot=slot, params=params, token_ids=prompt, prompt_len=1) for slot in (3, 4)
    )
    sampler = TorchSlotSampler(slots, ShardedSampler(10, OneRank()))
    logits = torch.zeros(3, 10)
    logits[:, 7], logits[:, 8], logits[2, 5] = 2.5, 1.0, float("nan")
    chosen = np.array([3, 1, 4], dtype=np.int32)
    rows = SampledRows(
        slots=torch.from_numpy(chosen).long(), indices=torch.tensor([1, 1, 1]), host_slots=chosen
    )
    drawn = [sampler.sample(logits, rows).tolist() for _ in range(4)]
    # 2.5, 1.5, 0.5 for token 7, and then 1 for token 8.
    assert drawn == [[7, 7, FAILED], [7, 7, FAILED], [8, 7, FAILED], [7, 7, FAILED]]
    assert logits[0, 7] == 2.5
    only = SampledRows(
        slots=rows.slots[:1], indices=rows.indices[:1], host_slots=rows.host_slots[:1]
    )
    assert sampler.sample(logits[:1], only).tolist() == [0]
    assert slots.last_tokens.tolist()[3] == 0
