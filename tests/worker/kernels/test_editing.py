"""Edits of logits by kernels against those by torch, which is held to float64."""

import math

import numpy as np
import pytest
import torch

from tests.worker.kernels.closeness import gpu_only
from tests.worker.test_logit_edits import PARAMS
from worker.logit_edits import Known, LogitEdits

editing = pytest.importorskip("worker.kernels.editing")
CPU = torch.device("cpu")


def make(vocab_size: int, device: torch.device) -> LogitEdits:
    """Slots with each kind of edits, and two without."""
    edits = LogitEdits(len(PARAMS) + 2, vocab_size, device)
    rng = np.random.default_rng(3)
    edits.join(
        Known(
            slot=slot,
            params=params,
            token_ids=np.append(rng.integers(0, vocab_size, 9), [5]).astype(np.int32),
            prompt_len=4 + slot % 7,
        )
        for slot, params in enumerate(PARAMS.values())
    )
    return edits


def random_logits(num_rows: int, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * 4).to(dtype)
    logits[1, 6], logits[3, 74], logits[5, 0] = math.nan, math.inf, -math.inf
    return logits


def check(device: torch.device, vocab_size: int, dtype: torch.dtype) -> None:
    expected, edits = make(vocab_size, CPU), make(vocab_size, device)
    slots = torch.randperm(len(PARAMS) + 2, generator=torch.Generator().manual_seed(1))
    has_edits = slots < len(PARAMS)
    for step in range(3):
        logits = random_logits(len(slots), vocab_size, dtype)
        indices = slots % 3 + 8 + step
        whole = logits.float().clone()
        whole[has_edits] = expected.edit(whole[has_edits], slots[has_edits], indices[has_edits])
        found = editing.edited_logits(
            logits.to(device), edits.tensors, slots.int().to(device), indices.to(device)
        )
        torch.testing.assert_close(found.cpu(), whole, rtol=1e-6, atol=4e-6, equal_nan=True)
        # The token drawn in each slot; pads repeat the last slot, which has no edits.
        tokens = (torch.arange(len(slots)) * 3 + 5 + step) % 8
        expected.note(slots[has_edits], tokens[slots[has_edits]])
        padded = torch.cat((slots, torch.full((3,), len(PARAMS) + 1)))
        editing.count_tokens(tokens.to(device), edits.tensors, padded.to(device))
    for mine, theirs in zip(edits.tensors.all(), expected.tensors.all(), strict=True):
        assert torch.equal(mine.cpu(), theirs)


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [2100])
def test_same_as_torch(device: torch.device, vocab_size: int):
    check(device, vocab_size, torch.float32)


def test_counts_stop_at_their_largest(device: torch.device):
    edits = make(75, device)
    edits.tensors.counts[0, 7] = editing.MAX_COUNT
    editing.count_tokens(
        torch.full((20,), 7, device=device), edits.tensors, torch.tensor([0], device=device)
    )
    assert int(edits.tensors.counts[0, 7]) == editing.MAX_COUNT


@gpu_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [151_936, 262_144])
def test_a_real_vocabulary(vocab_size: int, dtype: torch.dtype):
    check(torch.device("cuda"), vocab_size, dtype)
