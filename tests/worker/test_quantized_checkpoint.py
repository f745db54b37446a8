"""Quantised checkpoints against transformers with the values that they stand for."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.errors import ModelFileError
from tests.worker.quantized_models import (
    Quantize,
    by_channel,
    by_tensor,
    compressed,
    in_blocks,
    save_quantized,
)
from tests.worker.thread_ranks import ThreadRank, on_all, thread_ranks
from tests.worker.tiny_models import CPU, Stepper, reference_logits
from worker.model_files import read_model_config
from worker.model_loading import load_model
from worker.quantized_checkpoint import Span

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
    assert 1e-4 < (fp8 - expected).norm() / expected.norm() < 0.1


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
    assert torch.equal(down.codes.float(), whole["weight"][:, 48:].float())
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


def test_spans():
    span = Span(100, 30, 70)
    assert span.coarse(40) == (3, 0, 2)
    assert span.run_of_each(40).tolist() == [0] * 10 + [1] * 30
    assert Span(100, 50, 100).coarse(40) == (3, 1, 3)
    assert Span(100, 50, 100).run_of_each(40).tolist() == [0] * 30 + [1] * 20
