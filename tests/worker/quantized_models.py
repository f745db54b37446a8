"""Tiny models saved as tools save quantised checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.worker.tiny_models import save_llama

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "initializer_range": 0.1,
}
FILE = "model.safetensors"
Quantize = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]
"""(name without ".weight", weight) -> (tensors by what follows the name's dot, what they mean)"""


def save_quantized(
    directory: Path, quantize: Quantize, config: dict[str, Any], *, kept: tuple[str, ...] = ()
) -> torch.nn.Module:
    """Save a Llama whose layers' products are quantised; return transformers' with their values.

    `kept` are products that stay as they are, by what is in their name.
    """
    model = save_llama(directory, **SIZES)
    tensors = load_file(directory / FILE)
    parameters = dict(model.named_parameters())
    for name in [*tensors]:
        if not name.endswith("_proj.weight") or any(part in name for part in kept):
            continue
        module = name.removesuffix(".weight")
        parts, meant = quantize(module, tensors.pop(name))
        tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        parameters[name].data.copy_(meant)
    save_file(tensors, directory / FILE)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return model


def compressed(**weights: Any) -> dict[str, Any]:
    """Return what llm-compressor writes for 8-bit floats, with changes to `weights`."""
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": common | {"strategy": "channel", "dynamic": False} | weights,
                "input_activations": common | {"strategy": "token", "dynamic": True},
            }
        },
    }


def by_channel(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """As llm-compressor's FP8_DYNAMIC: scales are bfloat16, [out, 1]."""
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (weight / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


def by_tensor(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """As its static FP8: one float32 scale, and one for rows."""
    scale = weight.abs().max() / 448
    codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor([0.1])}
    return tensors, codes.float() * scale


def in_blocks(size: int) -> Quantize:
    """As DeepSeek and Qwen: squares of `size`, of which the last may be smaller."""

    def quantize(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        outputs, inputs = weight.shape
        rows, columns = torch.arange(outputs) // size, torch.arange(inputs) // size
        scale = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
        for row in range(len(scale)):
            for column in range(scale.shape[1]):
                square = weight[rows == row][:, columns == column]
                scale[row, column] = square.abs().max() / 448
        wide = scale[rows][:, columns]
        codes = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": scale}, codes.float() * wide

    return quantize
