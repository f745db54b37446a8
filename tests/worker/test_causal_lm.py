"""Models divided among ranks against transformers: logits within 1e-4.

Every family as it is usual is test_families's; here is what may differ within one.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.gguf_models import save_gguf
from tests.worker.models.harness import TOKENS, assert_equal_to_transformers
from tests.worker.thread_ranks import on_all, thread_ranks
from tests.worker.tiny_models import CPU, Stepper, reference_logits, save_llama, save_qwen3
from worker.layers.linear import Linear
from worker.layers.row_parallel import RowParallelLinear
from worker.model_files import read_model_config
from worker.models import ARCHITECTURES, causal_lm

EIGHT_HEADS = {"num_attention_heads": 8}


def test_few_rows_keep_their_residual_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reference = save_llama(tmp_path, num_hidden_layers=16)
    for parameter in reference.parameters():
        parameter.data.copy_(parameter.data.bfloat16())
    expected = reference_logits(reference, TOKENS)
    errors = []
    for adds_from_rows in (512, 1):
        monkeypatch.setattr(causal_lm, "ADDS_FROM_ROWS", adds_from_rows)
        stepper = Stepper(tmp_path, dtype=torch.bfloat16)
        rows = [stepper.prefill(0, TOKENS[:10], range(11))]
        rows += [stepper.decode({0: token})[0] for token in TOKENS[10:]]
        errors.append(float((torch.stack(rows).float() - expected[9:]).square().mean().sqrt()))
    assert errors[0] < 0.95 * errors[1]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 4},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ],
    ids=str,
)
def test_llama(tmp_path: Path, changes: dict[str, Any], size: int):
    reference = save_llama(tmp_path, **EIGHT_HEADS | changes)
    assert_equal_to_transformers(tmp_path, reference, size)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "changes",
    [{"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True}],
    ids=str,
)
def test_qwen3(tmp_path: Path, changes: dict[str, Any], size: int):
    reference = save_qwen3(tmp_path, **EIGHT_HEADS | changes)
    assert_equal_to_transformers(tmp_path, reference, size)


@pytest.mark.parametrize("save", [save_llama, save_qwen3])
def test_gguf_files_are_divided_too(tmp_path: Path, save: Any):
    reference = save(tmp_path, **EIGHT_HEADS)
    path = save_gguf(tmp_path / "model.gguf", reference)
    assert_equal_to_transformers(path, reference, 2)


def test_a_layer_exchanges_two_sums_and_nothing_else(tmp_path: Path):
    save_llama(tmp_path, **EIGHT_HEADS)
    ranks = thread_ranks(2)
    on_all(partial(Stepper(tmp_path, group=rank).prefill, 0, [1] * 8, [0, 1]) for rank in ranks)
    # Of the last of three layers only the rows that sample are wanted, here one and its padding.
    assert [rank.exchanged for rank in ranks] == [2 * (8 + 8 + 4) * 48] * 2


def test_what_a_rank_holds(tmp_path: Path):
    save_llama(tmp_path, **EIGHT_HEADS, num_key_value_heads=4)
    config = read_model_config(tmp_path)
    model = ARCHITECTURES[config.architecture](
        config, group=thread_ranks(2)[1], max_model_len=8, dtype=torch.float32, device=CPU
    )
    shapes = {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, Linear) and (".0." in name or "output." in name[:7])
    }
    assert shapes == {
        "layers.0.attention.qkv": (4 * 6 + 2 * 2 * 6, 48),
        "layers.0.attention.output.product": (48, 4 * 6),
        "layers.0.feed_forward.gate_up": (80, 48),
        "layers.0.feed_forward.down.product": (48, 40),
        "output.product": (65, 48),
    }
    assert sum(isinstance(m, RowParallelLinear) for m in model.modules()) == 6
