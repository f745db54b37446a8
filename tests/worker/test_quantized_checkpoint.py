"""Quantised checkpoints against transformers with the values that they stand for."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.errors import ModelFileError
from tests.worker.models import harness
from tests.worker.models.families import FAMILIES
from tests.worker.quantized_models import (
    Quantize,
    awq,
    by_channel,
    by_tensor,
    compressed,
    gptq,
    in_blocks,
    save_quantized,
)
from tests.worker.thread_ranks import ThreadRank, on_all, thread_ranks
from tests.worker.tiny_models import CPU, Stepper, reference_logits
from worker.model_files import read_model_config
from worker.model_loading import load_model
from worker.quantization import Storage

TOKENS = [1, 2, 3, 100, 7, 7, 90]
FP8: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "channel": (by_channel, compressed()),
    "tensor": (by_tensor, compressed(strategy="tensor")),
    "fp8": (by_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "blocks": (
        in_blocks(40),
        {"quant_method": "fp8", "weight_block_size": [40, 40], "fmt": "e4m3"},
    ),
}


def logits_of(path: Path, **options: Any) -> torch.Tensor:
    return Stepper(path, **options).prefill(0, TOKENS, range(2))


@pytest.mark.parametrize("name", FP8)
def test_values_are_the_checkpoints(tmp_path: Path, name: str):
    quantize, config = FP8[name]
    reference = save_quantized(tmp_path, quantize, config)
    expected = reference_logits(reference, TOKENS)[-1]
    torch.testing.assert_close(logits_of(tmp_path), expected, rtol=0, atol=1e-4)
    # And then rows are rounded, too; blocks are rounded once more.
    fp8 = logits_of(tmp_path, storage="fp8")
    assert 1e-4 < (fp8 - expected).norm() / expected.norm() < 0.15


def test_codes_of_channels_stay_as_they_are(tmp_path: Path):
    seen = {}

    def quantize(module: str, weight: torch.Tensor):
        seen[module], meant = by_channel(module, weight)
        return seen[module], meant

    save_quantized(tmp_path, quantize, compressed())
    model, _ = load_model(
        tmp_path,
        read_model_config(tmp_path),
        group=thread_ranks(2)[1],
        max_model_len=16,
        dtype=torch.bfloat16,
        device=CPU,
        storage="fp8",
    )
    down = model.layers[1].feed_forward.down.product._quantized
    whole = seen["model.layers.1.mlp.down_proj"]
    assert torch.equal(down.codes.float(), whole["weight"][:, 96:].float())
    assert torch.equal(down.scales, whole["weight_scale"].float().view(-1))
    value = model.layers[1].attention.qkv._quantized
    whole = seen["model.layers.1.self_attn.v_proj"]
    assert torch.equal(value.codes[-16:].float(), whole["weight"][16:].float())
    assert torch.equal(value.scales[-16:], whole["weight_scale"][16:].float().view(-1))


@pytest.mark.parametrize("name", ["channel", "blocks"])
def test_ranks_have_their_parts(tmp_path: Path, name: str):
    quantize, config = FP8[name]
    reference = save_quantized(tmp_path, quantize, config)

    def run(rank: ThreadRank) -> torch.Tensor:
        return Stepper(tmp_path, group=rank).prefill(0, TOKENS, range(2))

    parts = on_all(partial(run, rank) for rank in thread_ranks(2))
    logits = torch.cat(parts)[:131]
    torch.testing.assert_close(logits, reference_logits(reference, TOKENS)[-1], rtol=0, atol=1e-4)


AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "sym": True, "desc_act": False}
ORDERED = GPTQ | {"desc_act": True, "group_size": 32}
INT4: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "awq": (awq(32), AWQ | {"group_size": 32}),
    "awq, all inputs": (awq(-1), AWQ | {"group_size": -1}),
    "gptq": (gptq(64), GPTQ | {"group_size": 64}),
    "gptq, zeros": (gptq(32, is_symmetric=False), GPTQ | {"sym": False, "group_size": 32}),
    "gptq, version 2": (
        gptq(32, is_symmetric=False, offset=0),
        GPTQ | {"sym": False, "group_size": 32, "checkpoint_format": "gptq_v2"},
    ),
    "gptq, in order": (gptq(32, has_order=True), ORDERED),
}


@pytest.mark.parametrize("storage", ["int4", "none"])
@pytest.mark.parametrize("name", INT4)
def test_four_bits(tmp_path: Path, name: str, storage: Storage):
    quantize, config = INT4[name]
    reference = save_quantized(tmp_path, quantize, config)
    expected = reference_logits(reference, TOKENS)[-1]
    logits = logits_of(tmp_path, storage=storage)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["awq", "awq, all inputs", "gptq", "gptq, zeros"])
def test_ranks_have_their_parts_of_four_bits(tmp_path: Path, name: str):
    # A rank of two has 96 inputs of `down`, one and a half groups of 64.
    quantize, config = INT4[name]
    reference = save_quantized(tmp_path, quantize, config)

    def run(rank: ThreadRank) -> torch.Tensor:
        return logits_of(tmp_path, group=rank, storage="int4")

    logits = torch.cat(on_all(partial(run, rank) for rank in thread_ranks(2)))[:131]
    torch.testing.assert_close(logits, reference_logits(reference, TOKENS)[-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["channel", "blocks", "awq", "gptq, zeros"])
def test_products_that_are_one_in_the_checkpoint(tmp_path: Path, name: str, size: int):
    (phi,) = [family for family in FAMILIES if family.model_type == "phi3"]
    quantize, config = (FP8 | INT4)[name]

    def save(directory: Path, **sizes: Any) -> Any:
        return harness.save_family(phi, directory, **sizes | {"num_attention_heads": 8})

    reference = save_quantized(tmp_path, quantize, config, save=save)
    storage: Storage = "int4" if name in INT4 else "none"

    def run(rank: ThreadRank) -> torch.Tensor:
        # Longer than what LongRoPE calls short, or transformers would take other factors.
        stepper = Stepper(tmp_path, group=rank, storage=storage)
        return stepper.prefill(0, harness.TOKENS, range(10))

    logits = torch.cat(on_all(partial(run, rank) for rank in thread_ranks(size)))[:131]
    expected = reference_logits(reference, harness.TOKENS)[-1]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_experts_are_not_read(tmp_path: Path):
    (moe,) = [family for family in FAMILIES if family.model_type == "qwen3_moe"]
    harness.save_family(moe, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": compressed()})
    )
    with pytest.raises(ModelFileError, match="must be absent where a model has experts"):
        Stepper(tmp_path)


def test_orders_that_cannot_be(tmp_path: Path):
    save_quantized(tmp_path, gptq(32, has_order=True), ORDERED)
    with pytest.raises(ModelFileError, match=r"o_proj: .* desc_act .* use --tp 1"):
        Stepper(tmp_path, group=thread_ranks(2)[0], storage="int4")
    save_quantized(tmp_path, gptq(32, has_order=True, is_shared=False), ORDERED)
    with pytest.raises(ModelFileError, match="orders inputs otherwise"):
        Stepper(tmp_path, storage="int4")
    # Each product for itself, they need not agree.
    assert logits_of(tmp_path).isfinite().all()
    save_quantized(tmp_path, gptq(64, has_order=True), ORDERED)
    with pytest.raises(ModelFileError, match=r"qzeros has shape|does not put 32 inputs"):
        Stepper(tmp_path, storage="int4")


def test_dummies_in_four_bits(tmp_path: Path):
    quantize, config = INT4["gptq"]
    save_quantized(tmp_path, quantize, config)
    model, _ = load_model(
        tmp_path,
        read_model_config(tmp_path),
        group=thread_ranks(2)[0],
        max_model_len=16,
        dtype=torch.bfloat16,
        device=CPU,
        dummy_seed=0,
        storage="int4",
    )
    assert model.layers[0].feed_forward.down.product._quantized.group == 32


def test_what_the_checkpoint_leaves_alone_stays(tmp_path: Path):
    config = compressed() | {
        "ignore": ["lm_head", "re:.*layers.0.mlp.*", "model.layers.1.self_attn"]
    }
    kept = ("layers.0.mlp", "layers.1.self_attn")
    reference = save_quantized(tmp_path, by_channel, config, kept=kept)
    stepper = Stepper(tmp_path, storage="fp8")
    first, second = stepper.model.layers
    quantized = [first.attention.qkv, first.attention.output.product]
    quantized += [second.feed_forward.gate_up, second.feed_forward.down.product]
    names = [m for m in stepper.model.modules() if getattr(m, "is_quantized", False)]
    assert set(names) == set(quantized)
    assert (
        stepper.prefill(0, TOKENS, range(2)) - reference_logits(reference, TOKENS)[-1]
    ).abs().max() < 0.2


def test_one_product_is_quantised_as_a_whole(tmp_path: Path):
    config = compressed() | {"ignore": ["model.layers.0.self_attn.q_proj"]}
    save_quantized(tmp_path, by_channel, config, kept=("layers.0.self_attn.q_proj",))
    with pytest.raises(ModelFileError, match=r"some but not all of .*q_proj.*k_proj"):
        Stepper(tmp_path)


def test_a_checkpoint_that_is_not_what_it_says(tmp_path: Path):
    save_quantized(tmp_path, by_channel, compressed(strategy="tensor"))
    with pytest.raises(ModelFileError, match=r"weight_scale has shape \[64, 1\]"):
        Stepper(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    del values["quantization_config"]
    path.write_text(json.dumps(values))
    with pytest.raises(ModelFileError, match="stored as F8_E4M3"):
        Stepper(tmp_path)
