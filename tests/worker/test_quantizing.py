"""Whole models with quantised products."""

import logging
from pathlib import Path

import pytest
import torch

from tests.worker.kernels.closeness import gpu_only
from tests.worker.models import harness
from tests.worker.models.families import FAMILIES
from tests.worker.quantized_models import awq, by_channel, compressed, save_quantized
from tests.worker.tiny_models import Stepper, reference_logits, save_llama
from worker.layers.experts import Router
from worker.layers.fp8 import Fp8Weight
from worker.layers.linear import Linear
from worker.model_files import read_model_config
from worker.model_loading import load_model
from worker.parallel import OneRank
from worker.quantization import Storage

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
}
AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "group_size": 32}
FAMILY_SIZES = {"hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.1}
TOKENS = [1, 2, 3, 100, 7, 7, 90]


def round_to_fp8(model) -> None:
    """Give the products inside a transformers model's layers the values of their codes."""
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            weight = Fp8Weight.quantize(parameter.data)
            parameter.data.copy_(weight.codes.float() * weight.scales[:, None])


def test_weights_become_fp8_and_nothing_else_changes(tmp_path: Path):
    reference = save_llama(tmp_path, **SIZES, initializer_range=0.1)
    plain = reference_logits(reference, TOKENS)[-1]
    stepper = Stepper(tmp_path, storage="fp8")
    ours = stepper.prefill(0, TOKENS, range(2))
    round_to_fp8(reference)
    rounded = reference_logits(reference, TOKENS)[-1]
    # What is left is the rounding of rows.
    assert (ours - rounded).norm() < 0.08 * rounded.norm()
    assert (ours - plain).norm() > 0.005 * plain.norm()
    quantized = [m for m in stepper.model.modules() if getattr(m, "is_quantized", False)]
    assert len(quantized) == 4 * 3
    assert not stepper.model.output.product.is_quantized


def test_products_of_other_sizes_keep_their_dtype(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    reference = save_llama(tmp_path, **SIZES | {"intermediate_size": 88})
    with caplog.at_level(logging.WARNING):
        stepper = Stepper(tmp_path, storage="fp8")
    assert [record.getMessage() for record in caplog.records] == [
        "products=3 outputs=48 inputs=88 keep their dtype: fp8 needs multiples of 16"
    ]
    logits = stepper.prefill(0, TOKENS, range(2))
    expected = reference_logits(reference, TOKENS)[-1]
    assert (logits - expected).norm() < 0.3 * expected.norm()


def test_dummies_too(tmp_path: Path):
    save_llama(tmp_path, **SIZES)
    stepper = Stepper(tmp_path, storage="fp8", dtype=torch.bfloat16)
    assert stepper.prefill(0, TOKENS, range(2)).isfinite().all()


@pytest.mark.parametrize("name", ["phi3", "gemma3_text", "qwen2", "qwen3_moe"])
def test_families_in_fp8(tmp_path: Path, name: str):
    (family,) = [family for family in FAMILIES if family.model_type == name]
    reference = harness.save_family(family, tmp_path, **FAMILY_SIZES)
    plain = reference_logits(reference, harness.TOKENS)[-1]
    stepper = Stepper(tmp_path, storage="fp8")
    logits = stepper.prefill(0, harness.TOKENS, range(10))
    assert 0 < (logits - plain).norm() < 0.5 * plain.norm()
    for module in stepper.model.modules():
        if isinstance(module, Router):
            assert not module.product.is_quantized


@gpu_only
@pytest.mark.parametrize("storage", ["fp8", "int4"])
def test_a_gpu_multiplies_what_a_cpu_does(tmp_path: Path, storage: Storage):
    """Every product of a checkpoint, by few rows and by many."""
    if storage == "fp8":
        save_quantized(tmp_path, by_channel, compressed())
    else:
        save_quantized(tmp_path, awq(32), AWQ)
    models = []
    for device in ("cpu", "cuda"):
        model, _ = load_model(
            tmp_path,
            read_model_config(tmp_path),
            group=OneRank(),
            max_model_len=32,
            dtype=torch.bfloat16,
            device=torch.device(device),
            storage=storage,
        )
        models.append([m for m in model.layers.modules() if isinstance(m, Linear)])
    for ours, theirs in zip(*models, strict=True):
        assert ours.is_quantized
        assert theirs.is_quantized
        for rows in (1, 7, 80, 600):
            x = torch.randn(rows, ours.in_features).bfloat16()
            expected = ours(x).float()
            result = theirs(x.cuda()).cpu().float()
            # Sums in another order, rounded to bfloat16.
            assert (result - expected).norm() < 2**-7 * expected.norm()
