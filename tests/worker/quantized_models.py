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
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "initializer_range": 0.1,
}
FILE = "model.safetensors"
Quantize = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]
"""(name without ".weight", weight) -> (tensors by what follows the name's dot, what they mean)"""


def save_quantized(
    directory: Path,
    quantize: Quantize,
    config: dict[str, Any],
    *,
    kept: tuple[str, ...] = (),
    save: Callable[..., Any] = save_llama,
) -> Any:
    """Save a model whose layers' products are quantised; return transformers' with their values.

    `save` saves it as it is. `kept` are products that stay as they are, by what is in their name.
    """
    model = save(directory, **SIZES)
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


def _codes_of(weight: Tensor, group: int, *, is_symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [out, in], scales and zero points [out, groups] of a weight."""
    groups = weight.view(len(weight), -1, group)
    if is_symmetric:
        scale = groups.abs().amax(2) / 7
        zero = torch.full_like(scale, 8)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scale = (high - low) / 15
        zero = (-low / scale).round().clamp(1, 15)
    scale = scale.half().float()
    codes = (groups / scale[:, :, None] + zero[:, :, None]).round().clamp(0, 15)
    return codes.view(weight.shape).long(), scale, zero.long()


def _words(codes: Tensor, places: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Tensor:
    """Pack the last dimension, code `places[i]` of each 8 at the bits from 4 · i on."""
    eights = codes.view(*codes.shape[:-1], -1, 8)
    words = sum(eights[..., place] << (4 * bits) for bits, place in enumerate(places))
    assert isinstance(words, Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def awq(group: int) -> Quantize:
    """As AutoAWQ's gemm version."""

    def quantize(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        size = weight.shape[1] if group < 0 else group
        codes, scale, zero = _codes_of(weight, size, is_symmetric=False)
        places = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {
            "qweight": _words(codes.t().contiguous(), places),
            "qzeros": _words(zero.t().contiguous(), places),
            "scales": scale.t().half(),
        }
        wide = scale.repeat_interleave(size, 1) * (codes - zero.repeat_interleave(size, 1))
        return tensors, wide

    return quantize


def gptq(
    group: int,
    *,
    is_symmetric: bool = True,
    offset: int = 1,
    has_order: bool = False,
    is_shared: bool = True,
) -> Quantize:
    """As GPTQModel and AutoGPTQ. `is_shared`: all products of an input have the same order."""

    def quantize(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        size = weight.shape[1] if group < 0 else group
        g_idx = torch.arange(weight.shape[1]) // size
        if has_order:
            seed = weight.shape[1] if is_shared else len(module) + weight.shape[0]
            generator = torch.Generator().manual_seed(seed)
            g_idx = g_idx[torch.randperm(len(g_idx), generator=generator)]
        order = torch.argsort(g_idx, stable=True)
        codes, scale, zero = _codes_of(weight[:, order], size, is_symmetric=is_symmetric)
        back = torch.empty_like(codes)
        back[:, order] = codes
        tensors = {
            "qweight": _words(back).t().contiguous(),
            "qzeros": _words((zero - offset).t().contiguous()),
            "scales": scale.t().half(),
            "g_idx": g_idx.int(),
            "bias": torch.zeros(len(weight)).half(),
        }
        return tensors, scale[:, g_idx] * (back - zero[:, g_idx])

    return quantize
