"""What OLMo 2's layer does besides the numbers that test_families compares."""

from functools import partial
from pathlib import Path

import torch

from tests.worker.models.families import FAMILIES
from tests.worker.models.harness import TOKENS, save_family
from tests.worker.thread_ranks import on_all, thread_ranks
from tests.worker.tiny_models import Stepper, reference_logits

FAMILY = next(family for family in FAMILIES if family.model_type == "olmo2")


def test_ranks_exchange_two_sums_a_layer_and_two_numbers_a_row(tmp_path: Path):
    save_family(FAMILY, tmp_path)
    ranks = thread_ranks(2)
    on_all(partial(Stepper(tmp_path, group=rank).prefill, 0, [1] * 8, [0, 1]) for rank in ranks)
    # Of the last of four layers only the rows that sample are wanted, here one and its padding.
    expected = (3 * (8 + 8) + 4 + 4) * 48 + 4 * 8 * 2
    assert [rank.exchanged for rank in ranks] == [expected] * 2


def test_in_bfloat16(tmp_path: Path):
    reference = save_family(FAMILY, tmp_path)
    for parameter in reference.parameters():
        parameter.data.copy_(parameter.data.bfloat16())
    stepper = Stepper(tmp_path, dtype=torch.bfloat16)
    expected = reference_logits(reference, TOKENS)
    ours = [stepper.prefill(0, TOKENS[:-1], range(11)), stepper.decode({0: TOKENS[-1]})[0]]
    error = (torch.stack(ours).float() - expected[38:]).abs().max()
    assert error / expected.std() < 0.2
