"""GPT-OSS from a checkpoint whose experts are in MXFP4, as they are published."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from protocol.errors import ModelFileError
from tests.worker.models.families import FAMILIES
from tests.worker.models.harness import assert_equal_to_transformers, save_family
from tests.worker.tiny_models import Stepper
from worker.layers.experts import Routes
from worker.model_files import read_model_config
from worker.model_loading import load_model
from worker.parallel import OneRank

(FAMILY,) = [family for family in FAMILIES if family.model_type == "gpt_oss"]
# Two ranks have one and a half blocks of inputs each, four three quarters of one.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


def save_packed(directory: Path) -> Any:
    """Save a model with its experts packed, and return it with the same numbers."""
    reference = save_family(FAMILY, directory, **SIZES)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    parameters = dict(reference.named_parameters())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, inputs, outputs = tensors.pop(name).shape
        shape = (num_experts, outputs, inputs // 32)
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8)
        scales = torch.randint(122, 126, shape, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        with torch.no_grad():
            parameters[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, file)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (directory / "config.json").write_text(json.dumps(config))
    return reference


@pytest.mark.slow
def test_logits_of_packed_experts(tmp_path: Path):
    reference = save_packed(tmp_path)
    for size in (1, 2, 4):
        assert_equal_to_transformers(tmp_path, reference, size)


def test_a_config_that_says_packed_of_files_that_are_not(tmp_path: Path):
    save_family(FAMILY, tmp_path, **SIZES)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match=r"no file holds .*gate_up_proj_blocks"):
        Stepper(tmp_path)


def test_dummies_of_packed_experts(tmp_path: Path):
    save_packed(tmp_path)
    config = read_model_config(tmp_path)
    model, _ = load_model(
        tmp_path,
        config,
        group=OneRank(),
        max_model_len=8,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        dummy_seed=0,
    )
    with torch.inference_mode():
        routes = Routes(torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]]))
        hidden = torch.ones(1, 64, dtype=torch.bfloat16)
        assert model.layers[0].feed_forward.experts(hidden, routes).isfinite().all()


def test_packed_experts_that_are_not_bytes(tmp_path: Path):
    save_packed(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file(tensors | {name: tensors[name].float()}, file)
    with pytest.raises(ModelFileError, match=r"down_proj_scales is stored as F32; supported: U8$"):
        Stepper(tmp_path)
