"""Edited logits against a reference in float64, and who is edited for how long."""

import math
import random

import numpy as np
import pytest
import torch

from protocol.messages import SamplingParams
from tests.worker.logit_reference import reference_edits
from worker.logit_edits import MAX_COUNT, Known, LogitEdits
from worker.memory_plan import edit_state_bytes

CPU = torch.device("cpu")
VOCAB = 75
SLOTS = 6

PARAMS = {
    "presence": SamplingParams(presence_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=-0.75),
    "repetition": SamplingParams(repetition_penalty=1.3),
    "less than 1": SamplingParams(repetition_penalty=0.7, presence_penalty=-2.0),
    "bias": SamplingParams(logit_bias={0: 2.5, 74: -100.0, 31: 100.0}),
    "bias and repetition": SamplingParams(logit_bias={3: 9.0, 4: -9.0}, repetition_penalty=1.9),
    "allowed": SamplingParams(allowed_token_ids=[3, 32, 74]),
    "bad word": SamplingParams(bad_word_ids=[[5], [6], [5, 6, 7], [74]]),
    "allowed and bad": SamplingParams(allowed_token_ids=[3, 5, 6], bad_word_ids=[[5], [3, 6]]),
    "min_tokens": SamplingParams(min_tokens=3, stop_token_ids=[0, 74]),
    "all": SamplingParams(
        presence_penalty=0.3,
        frequency_penalty=0.4,
        repetition_penalty=1.2,
        logit_bias={5: 3.0, 6: -3.0, 7: 1.0},
        bad_word_ids=[[7], [5, 6]],
        min_tokens=2,
        stop_token_ids=[9],
    ),
}


def known(slot, params, tokens, prompt_len) -> Known:
    ids = np.array(tokens, dtype=np.int32)
    return Known(slot=slot, params=params, token_ids=ids, prompt_len=prompt_len)


def random_logits(seed: int) -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def edit(edits: LogitEdits, slot: int, index: int, logits: torch.Tensor) -> list[float]:
    return edits.edit(logits, torch.tensor([slot]), torch.tensor([index]))[0].tolist()


@pytest.mark.parametrize("resumed", [0, 3])
@pytest.mark.parametrize("kind", PARAMS)
def test_every_step_of_an_output_is_as_the_reference_has_it(kind: str, resumed: int):
    params, prompt = PARAMS[kind], [3, 4, 4, 30]
    output = [5, 6, 5, 5, 6, 7, 3, 74, 5, 6]
    edits = LogitEdits(SLOTS, VOCAB, CPU)
    edits.join([known(2, params, prompt + output[:resumed], len(prompt))])
    for step in range(resumed, len(output) + 1):
        logits = random_logits(step)
        expected = reference_edits(logits[0].tolist(), params, prompt, output[:step])
        found = edit(edits, 2, len(prompt) + step, logits)
        assert found == pytest.approx(expected, rel=3e-7, abs=3e-6)
        if step < len(output):
            edits.note(torch.tensor([2]), torch.tensor([output[step]]))


def test_random_bad_words():
    rng = random.Random(7)
    words = [[rng.randrange(3) for _ in range(rng.randint(1, 32))] for _ in range(40)]
    words += [[0, 1], [1, 1, 2], [2, 2]]
    params = SamplingParams(bad_word_ids=words)
    edits = LogitEdits(SLOTS, VOCAB, CPU)
    edits.join([known(0, params, [1], 1)])
    output: list[int] = []
    logits = torch.zeros(1, VOCAB)
    for step in range(60):
        expected = reference_edits([0.0] * VOCAB, params, [1], output)
        assert edit(edits, 0, 1 + step, logits) == expected
        output.append(rng.randrange(4))
        edits.note(torch.tensor([0]), torch.tensor(output[-1:]))


def test_nan_and_infinity_are_never_edited_away():
    edits = LogitEdits(SLOTS, VOCAB, CPU)
    edits.join([known(0, SamplingParams(allowed_token_ids=[1], logit_bias={2: 5}), [1], 1)])
    logits = torch.zeros(1, VOCAB)
    logits[0, 2], logits[0, 3], logits[0, 4] = math.nan, math.inf, -math.inf
    edited = edit(edits, 0, 1, logits)
    assert math.isnan(edited[2])
    assert [edited[0], edited[1], *edited[3:5]] == [-math.inf, 0.0, math.inf, -math.inf]


def test_counts_stop_at_their_largest():
    edits = LogitEdits(SLOTS, VOCAB, CPU)
    params = SamplingParams(frequency_penalty=1.0)
    edits.join([known(0, params, [1] + [5] * (MAX_COUNT + 9), 1)])
    edits.note(torch.tensor([0]), torch.tensor([5]))
    assert edit(edits, 0, 2, torch.zeros(1, VOCAB))[5] == -MAX_COUNT


def test_a_slot_is_taken_over_completely():
    edits = LogitEdits(SLOTS, VOCAB, CPU)
    slots = np.array([1], dtype=np.int32)
    edits.join([known(1, PARAMS["all"], [5, 6, 7], 1)])
    assert edits.rows_of(slots).tolist() == [0]
    edits.join([known(1, PARAMS["bias"], [8], 1)])
    expected = reference_edits([1.0] * VOCAB, PARAMS["bias"], [8], [])
    assert edit(edits, 1, 1, torch.ones(1, VOCAB)) == expected
    edits.join([known(1, SamplingParams(), [8], 1)])
    assert edits.rows_of(slots).tolist() == []
    assert edits.tensors.is_edited.tolist() == [0] * SLOTS
    assert not edits.in_force(slots)


@pytest.mark.parametrize(
    ("params", "at_9", "at_12"),
    [
        (SamplingParams(temperature=0.5, top_k=3, logprobs=2), False, False),
        (SamplingParams(min_tokens=2), False, False),
        (SamplingParams(stop_token_ids=[3]), False, False),
        (SamplingParams(min_tokens=2, stop_token_ids=[3]), True, False),
        (SamplingParams(min_tokens=2, stop_token_ids=[3], presence_penalty=0.1), True, True),
        (SamplingParams(repetition_penalty=1.0), False, False),
        (SamplingParams(repetition_penalty=1.1), True, True),
        (SamplingParams(logit_bias={3: 0.0}), True, True),
        (SamplingParams(allowed_token_ids=[3]), True, True),
        (SamplingParams(bad_word_ids=[[3]]), True, True),
    ],
)
def test_who_is_edited_and_until_when(params, at_9, at_12):
    edits = LogitEdits(SLOTS, VOCAB, CPU)
    edits.join([known(3, params, range(10), 10)])
    slots = np.array([0, 3], dtype=np.int32)
    assert edits.in_force(slots) is at_9
    for index, expected in ((9, at_9), (11, at_9), (12, at_12)):
        assert edits.in_force(slots, np.array([99, index], dtype=np.int32)) is expected


@pytest.mark.parametrize("vocab_size", [1, 32, 1001])
def test_the_memory_that_is_planned(vocab_size):
    tensors = LogitEdits(4, vocab_size, CPU).tensors.all()
    assert sum(tensor.nbytes for tensor in tensors) == edit_state_bytes(3, vocab_size)
