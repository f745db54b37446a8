"""Loading whole models; that what was loaded computes the right thing is test_llama's."""

from pathlib import Path

import pytest
import torch

from protocol.errors import ModelFileError
from tests.worker.tiny_models import CPU, Stepper, reference_logits, save_llama
from worker.model_files import read_model_config
from worker.model_loading import load_model
from worker.parallel import OneRank

TOKENS = [1, 2, 3, 100]


def test_sharded(tmp_path: Path):
    reference = save_llama(tmp_path, shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    logits = Stepper(tmp_path).prefill(0, TOKENS, range(2))
    torch.testing.assert_close(logits, reference_logits(reference, TOKENS)[-1], rtol=0, atol=1e-4)


def test_report(tmp_path: Path):
    reference = save_llama(tmp_path)
    report = Stepper(tmp_path).report
    assert report.num_bytes == 4 * sum(p.numel() for p in reference.parameters())
    assert 0 < report.seconds < 60


def test_dummies_need_no_weights(tmp_path: Path):
    save_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    config = read_model_config(tmp_path)
    hidden = []
    for seed in (1, 1, 2):
        model, report = load_model(
            tmp_path,
            config,
            group=OneRank(),
            max_model_len=16,
            dtype=torch.bfloat16,
            device=CPU,
            dummy_seed=seed,
        )
        assert report.num_bytes > 0
        hidden.append(model.logits(torch.ones(1, 48, dtype=torch.bfloat16)))
    assert torch.equal(hidden[0], hidden[1])
    assert not torch.equal(hidden[0], hidden[2])


def test_a_checkpoint_of_another_size(tmp_path: Path):
    save_llama(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"vocab_size": 131', '"vocab_size": 132'))
    with pytest.raises(ModelFileError, match=r"embed_tokens.*\[131, 48\].*\[132, 48\]"):
        Stepper(tmp_path)
