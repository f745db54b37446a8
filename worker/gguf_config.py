"""A GGUF file's header as a `ModelConfig`.

The metadata leaves out what its readers are meant to know of a family, such as Gemma 3's order of
windows: those constants are llama.cpp's.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from protocol.errors import ModelFileError
from worker.gguf_file import GgufHeader, read_gguf_header
from worker.gguf_metadata import GgufMetadata
from worker.gguf_rope import gguf_rope
from worker.model_config import CheckpointDtype, ModelConfig, merge_token_ids
from worker.rope_config import RopeConfig

_GEMMA3_PATTERN = 6
"""One layer in so many attends to its whole context."""
_GEMMA3_LOCAL_THETA = 10_000.0
_GEMMA3_27B_LAYERS = 62
"""Gemma 3 27B, told by its layers, scales scores by hidden size over heads, not by head size."""
_CHECKPOINT_DTYPES: dict[int, CheckpointDtype] = {0: "float32", 1: "float16", 32: "bfloat16"}
"""By `general.file_type`; quantised files are computed in bfloat16, whose range always suffices."""


def read_gguf_config(path: Path) -> ModelConfig:
    """Read the config of a GGUF file. Raises ModelFileError naming the file and the key."""
    return gguf_config(read_gguf_header(path))


def gguf_config(header: GgufHeader) -> ModelConfig:
    """Return the config that a GGUF header describes. Raises ModelFileError."""
    keys = GgufMetadata(header)
    name = keys.text("general.architecture")
    if name not in FAMILIES:
        raise ModelFileError(
            f"{header.path}: general.architecture is {name}, which is not supported; supported: "
            f"{', '.join(FAMILIES)}"
        )
    return FAMILIES[name](keys, _plain_config(keys, header, name))


def _plain_config(keys: GgufMetadata, header: GgufHeader, name: str) -> ModelConfig:
    """Return what the keys common to all families say, the rest as Llama has it."""
    hidden_size = keys.integer(f"{name}.embedding_length")
    num_heads = keys.integer(f"{name}.attention.head_count")
    if num_heads < 1:
        raise keys.bad(f"{name}.attention.head_count", "must be at least 1")
    head_dim = keys.integer(f"{name}.attention.key_length", hidden_size // num_heads)
    key = f"{name}.attention.value_length"
    if keys.integer(key, head_dim) != head_dim:
        raise keys.bad(key, f"must equal the head size, {head_dim}")
    if keys.integer(f"{name}.expert_count", 0):
        raise keys.bad(f"{name}.expert_count", "must be 0: mixtures of experts are not supported")
    num_layers = keys.integer(f"{name}.block_count")
    if not 1 <= num_layers <= 1024:
        raise keys.bad(f"{name}.block_count", "must be 1 to 1024")
    if head_dim < 1:
        raise keys.bad(f"{name}.attention.key_length", "must be at least 2")
    context_length = keys.integer(f"{name}.context_length")
    rope = gguf_rope(keys, header, head_dim=head_dim, context_length=context_length)
    return ModelConfig(
        source=header.path,
        architecture="LlamaForCausalLM",
        vocab_size=_vocab_size(keys, header, f"{name}.vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.integer(f"{name}.feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=keys.integer(f"{name}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=keys.number(f"{name}.attention.layer_norm_rms_epsilon"),
        norm_offset=0.0,
        query_key_norm=None,
        num_norms=2,
        ropes=(rope,) * num_layers,
        windows=(None,) * num_layers,
        attention_scale=head_dim**-0.5,
        max_position_embeddings=context_length,
        tie_word_embeddings="output.weight" not in header.tensors,
        qkv_bias="blk.0.attn_q.bias" in header.tensors,
        output_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in header.tensors,
        activation="silu",
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
        logits_divisor=1.0,
        experts=None,
        bos_token_id=keys.optional_integer("tokenizer.ggml.bos_token_id"),
        eos_token_ids=merge_token_ids(
            keys.token_id("tokenizer.ggml.eos_token_id"),
            keys.token_id("tokenizer.ggml.eot_token_id"),
            keys.token_id("tokenizer.ggml.eom_token_id"),
        ),
        dtype=_CHECKPOINT_DTYPES.get(keys.integer("general.file_type", -1), "bfloat16"),
    )


def _llama(_keys: GgufMetadata, plain: ModelConfig) -> ModelConfig:
    return plain


def _qwen2(_keys: GgufMetadata, plain: ModelConfig) -> ModelConfig:
    if not plain.qkv_bias:
        raise ModelFileError(f"{plain.source}: the tensor blk.0.attn_q.bias is missing")
    return replace(plain, architecture="Qwen2ForCausalLM")


def _qwen3(_keys: GgufMetadata, plain: ModelConfig) -> ModelConfig:
    return replace(plain, architecture="Qwen3ForCausalLM", query_key_norm="head")


def _gemma3(keys: GgufMetadata, plain: ModelConfig) -> ModelConfig:
    """Most layers attend to a window and rotate unscaled by a base of their own."""
    windows = _gemma3_windows(keys, plain.num_layers)
    local_rope = RopeConfig(
        theta=keys.number("gemma3.rope.freq_base_swa", _GEMMA3_LOCAL_THETA),
        rotary_dim=plain.head_dim,
        scaling=None,
    )
    scalar = plain.head_dim
    if plain.num_layers == _GEMMA3_27B_LAYERS:
        scalar = plain.hidden_size // plain.num_heads
    return replace(
        plain,
        architecture="Gemma3ForCausalLM",
        norm_offset=1.0,
        query_key_norm="head",
        num_norms=4,
        ropes=tuple(
            rope if window is None else local_rope
            for rope, window in zip(plain.ropes, windows, strict=True)
        ),
        windows=windows,
        attention_scale=scalar**-0.5,
        activation="gelu_tanh",
        embedding_multiplier=math.sqrt(plain.hidden_size),
    )


def _gemma3_windows(keys: GgufMetadata, num_layers: int) -> tuple[int | None, ...]:
    """Return the windows: of the layers that are said to have one, or of all but every so manieth.

    Some files say each layer's kind, some how many layers make a round, most nothing.
    """
    window = keys.integer("gemma3.attention.sliding_window")
    key = "gemma3.attention.sliding_window_pattern"
    pattern = keys.value(key, _GEMMA3_PATTERN)
    if isinstance(pattern, tuple):
        if len(pattern) != num_layers:
            raise keys.bad(key, f"must have an entry for each of {num_layers} layers")
        return tuple(window if has_window else None for has_window in pattern)
    if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
        raise keys.bad(key, "must be an integer above 0 or an array of booleans")
    return tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))


_Family: TypeAlias = Callable[[GgufMetadata, ModelConfig], ModelConfig]
FAMILIES: Mapping[str, _Family] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
}
"""By `general.architecture`. What a family's tensors are called is in `worker.gguf_names`."""


def _vocab_size(keys: GgufMetadata, header: GgufHeader, key: str) -> int:
    tokens = header.array_lengths.get("tokenizer.ggml.tokens")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape:
        return embedding.shape[0]
    return keys.integer(key, tokens)
