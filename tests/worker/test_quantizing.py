"""Whole models with quantised products."""

import logging
from pathlib import Path

import pytest
import torch

from tests.worker.tiny_models import Stepper, reference_logits, save_llama
from worker.layers.fp8 import Fp8Weight

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
}
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
