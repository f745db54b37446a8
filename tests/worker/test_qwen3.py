"""Qwen3 on one rank against transformers; on several it is test_causal_lm's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from protocol.errors import ModelFileError
from tests.worker.tiny_models import Stepper, reference_logits, save_llama, save_qwen3

TOKENS = [(11 * i + 5) % 131 for i in range(30)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"head_dim": 32, "num_key_value_heads": 6},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-3},
    ],
    ids=str,
)
def test_logits(tmp_path: Path, changes: dict[str, Any]):
    reference = save_qwen3(tmp_path, **changes)
    expected = reference_logits(reference, TOKENS)
    stepper = Stepper(tmp_path)
    logits = [stepper.prefill(2, TOKENS[:26], range(8))[None]]
    logits += [stepper.decode({2: token}) for token in TOKENS[26:]]
    torch.testing.assert_close(torch.cat(logits), expected[25:], rtol=0, atol=1e-4)


def test_bfloat16(tmp_path: Path):
    save_qwen3(tmp_path)
    ours = Stepper(tmp_path, dtype=torch.bfloat16).prefill(0, TOKENS, range(8)).float()
    theirs = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = reference_logits(theirs, TOKENS)
    assert (ours - expected[-1]).abs().max() / expected.std() < 0.2


def test_a_checkpoint_without_head_norms(tmp_path: Path):
    save_llama(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace("LlamaForCausalLM", "Qwen3ForCausalLM"))
    with pytest.raises(ModelFileError, match=r"no file holds .*layers\.0\.self_attn\.q_norm"):
        Stepper(tmp_path)
