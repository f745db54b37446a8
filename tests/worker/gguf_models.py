"""Models of the families that GGUF files are read of, saved as GGUF the way llama.cpp does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA3_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
SCALES = {
    Kind.Q2_K: (slice(80, 82), slice(82, 84)),
    Kind.Q3_K: (slice(108, 110),),
    Kind.Q4_K: (slice(0, 2), slice(2, 4)),
    Kind.Q5_K: (slice(0, 2), slice(2, 4)),
    Kind.Q6_K: (slice(208, 210),),
    Kind.IQ4_NL: (slice(0, 2),),
    Kind.IQ4_XS: (slice(0, 2),),
}
"""Where a block of a kind that the package cannot write has its float16 scales."""


def gguf_name(name: str, family: str) -> str:
    name = name.replace("model.layers.", "blk.")
    for theirs, ours in (NAMES | (GEMMA3_NAMES if family == "gemma3" else {})).items():
        name = name.replace(theirs, ours)
    return name


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a query or key projection's rows."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def stored(values: NDArray[np.float32], kind: Kind) -> NDArray[Any]:
    """Return `values` in blocks of a kind; random blocks of its shape where nothing writes it."""
    if kind not in SCALES:
        return gguf.quantize(np.ascontiguousarray(values), kind)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(values.size)
    blocks = rng.integers(0, 256, (values.size // block, block_bytes), dtype=np.uint8)
    # Such that numbers are around 0.3 in size, whatever a kind multiplies its scales by.
    for scale in SCALES[kind]:
        blocks[:, scale] = np.frombuffer(np.float16(1.0).tobytes(), np.uint8)
    size = np.abs(gguf.dequantize(blocks, kind)).mean()
    for scale in SCALES[kind]:
        blocks[:, scale] = np.frombuffer(np.float16(0.3 / size).tobytes(), np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def quantise(model: Any, kind: Kind) -> dict[str, NDArray[Any]]:
    """Give a model's matrices the values of a kind, and return them by name as a file has them."""
    data = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                data[name] = stored(in_gguf_order(model, name, parameter), kind)
                values = torch.from_numpy(gguf.dequantize(data[name], kind))
                parameter.copy_(in_our_order(model, name, values))
    return data


def in_gguf_order(model: Any, name: str, parameter: torch.Tensor) -> NDArray[np.float32]:
    values: NDArray[np.float32] = parameter.detach().numpy()
    heads = _interleaved_heads(model, name)
    return interleaved(values, heads) if heads else values


def in_our_order(model: Any, name: str, values: torch.Tensor) -> torch.Tensor:
    heads = _interleaved_heads(model, name)
    if not heads:
        return values
    pairs = values.view(heads, -1, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)


def _interleaved_heads(model: Any, name: str) -> int:
    if model.config.model_type != "llama":
        return 0
    if ".q_proj." in name:
        return model.config.num_attention_heads
    return model.config.num_key_value_heads if ".k_proj." in name else 0


def save_gguf(
    path: Path,
    model: Any,
    kind: Kind = Kind.F32,
    data: Mapping[str, NDArray[Any]] | None = None,
    **metadata: int | float | list[bool],
) -> Path:
    """Save a transformers model; `data` are its matrices of `kind`, from `quantise`.

    `metadata` are keys of the family, their dots written as two underscores.
    """
    config = model.config
    family = config.model_type.removesuffix("_text")
    writer = gguf.GGUFWriter(path, family)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    if family == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_float32("gemma3.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    for key, value in metadata.items():
        writer.add_key_value(
            f"{family}.{key.replace('__', '.')}",
            value,
            gguf.GGUFValueType.get_type(value),
            gguf.GGUFValueType.BOOL if isinstance(value, list) else None,
        )
    writer.add_token_list([f"token {i}" for i in range(config.vocab_size)])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    for name, parameter in model.named_parameters():
        if data is not None and name in data:
            writer.add_tensor(gguf_name(name, family), data[name], raw_dtype=kind)
            continue
        values = in_gguf_order(model, name, parameter)
        if family == "gemma3" and "norm" in name:
            values = values + 1
        is_matrix = values.ndim == 2
        blocks = stored(values, kind if is_matrix else Kind.F32)
        writer.add_tensor(
            gguf_name(name, family), blocks, raw_dtype=kind if is_matrix else Kind.F32
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
