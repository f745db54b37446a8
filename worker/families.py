"""What each family's config.json says beyond Llama's, one small function a family.

Imports no torch. Defaults are those of transformers' configuration of the family: files written by
it leave out what has its default where the model is a part of another. What a family's model does
with these values is in `worker.models`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from worker.config_fields import layer_types, num_hidden_layers, plain_config
from worker.json_object import JsonObject
from worker.mixture_families import read_gpt_oss, read_qwen3_moe
from worker.model_config import ModelConfig
from worker.rope_json import read_rope

FamilyReader: TypeAlias = Callable[[JsonObject], ModelConfig]
"""Reads a whole config.json. Raises ModelFileError naming file and key."""


def _llama(config: JsonObject) -> ModelConfig:
    return plain_config(config)


def _mistral(config: JsonObject) -> ModelConfig:
    """Every layer attends to `sliding_window` tokens, if it is not null."""
    plain = plain_config(config)
    window = config.optional_integer("sliding_window")
    return replace(
        plain,
        windows=(window,) * plain.num_layers,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
    )


def _qwen2(config: JsonObject) -> ModelConfig:
    """q, k and v always have biases; layers may attend to windows."""
    plain = plain_config(config, computes=("use_sliding_window",))
    return replace(
        plain,
        qkv_bias=True,
        output_bias=False,
        mlp_bias=False,
        windows=_qwen_windows(config, plain.num_layers),
    )


def _qwen3(config: JsonObject) -> ModelConfig:
    """Queries and keys are normalised head by head; windows as Qwen2's."""
    config = config.with_defaults({"head_dim": 128})
    plain = plain_config(config, computes=("use_sliding_window",))
    return replace(
        plain,
        query_key_norm="head",
        mlp_bias=False,
        windows=_qwen_windows(config, plain.num_layers),
    )


def _phi3(config: JsonObject) -> ModelConfig:
    """No biases; windows as Mistral's."""
    return _mistral(config.with_defaults({"rms_norm_eps": 1e-5}))


def _smollm3(config: JsonObject) -> ModelConfig:
    """Some layers do not rotate: those with a 0 in `no_rope_layers`, or every so manieth.

    Where windows are used, it is these layers that attend to them, unless `layer_types` says else.
    """
    config = config.with_defaults({"num_key_value_heads": 4, "tie_word_embeddings": True})
    plain = plain_config(
        config, computes=("use_sliding_window", "no_rope_layers"), default_theta=2_000_000.0
    )
    if config.has("no_rope_layers"):
        rotates = config.integers("no_rope_layers")[: plain.num_layers]
        if len(rotates) != plain.num_layers or set(rotates) - {0, 1}:
            raise config.bad(
                "no_rope_layers", f"must have a 0 or 1 for each of {plain.num_layers} layers"
            )
    else:
        interval = config.integer("no_rope_layer_interval", 4)
        if interval < 1:
            raise config.bad("no_rope_layer_interval", "must be at least 1")
        rotates = tuple(int((layer + 1) % interval != 0) for layer in range(plain.num_layers))
    types = layer_types(config, plain.num_layers) or tuple(
        "full_attention" if rotated else "sliding_attention" for rotated in rotates
    )
    window = config.optional_integer("sliding_window")
    return replace(
        plain,
        ropes=tuple(
            rope if rotated else None for rope, rotated in zip(plain.ropes, rotates, strict=True)
        ),
        windows=_windows(types, window if config.flag("use_sliding_window") else None),
    )


def _granite(config: JsonObject) -> ModelConfig:
    """Embedding, residual, scores and logits are scaled."""
    plain = plain_config(
        config,
        computes=(
            "embedding_multiplier",
            "residual_multiplier",
            "attention_multiplier",
            "logits_scaling",
        ),
    )
    return replace(
        plain,
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        residual_multiplier=config.number("residual_multiplier", 1.0),
        attention_scale=config.number("attention_multiplier", 1.0),
        logits_divisor=config.number("logits_scaling", 1.0),
    )


def _olmo2(config: JsonObject) -> ModelConfig:
    """Queries and keys are normalised over their whole projections."""
    plain = plain_config(config.with_defaults({"rms_norm_eps": 1e-5}))
    return replace(plain, query_key_norm="projection", mlp_bias=False)


def _gemma3(config: JsonObject) -> ModelConfig:
    """Most layers attend to a window and rotate by a base of their own.

    Older files give every how manieth layer is the other kind, newer ones each layer's type.
    """
    config = config.with_defaults(
        {
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131_072,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
            "bos_token_id": 2,
            "eos_token_id": 1,
        }
    )
    num_layers = num_hidden_layers(config)
    types = layer_types(config, num_layers)
    if types is None:
        pattern = config.integer("sliding_window_pattern", 6)
        if pattern < 1:
            raise config.bad("sliding_window_pattern", "must be at least 1")
        types = tuple(
            "sliding_attention" if (layer + 1) % pattern else "full_attention"
            for layer in range(num_layers)
        )
    plain = plain_config(config, default_theta=1_000_000.0, activation_key="hidden_activation")
    local_rope = read_rope(
        config,
        head_dim=plain.head_dim,
        max_position_embeddings=plain.max_position_embeddings,
        layer_type="sliding_attention",
        default_local_theta=10_000.0,
    )
    scalar = config.number("query_pre_attn_scalar", 256.0)
    if scalar <= 0.0:
        raise config.bad("query_pre_attn_scalar", "must be above 0")
    return replace(
        plain,
        norm_offset=1.0,
        query_key_norm="head",
        num_norms=4,
        ropes=tuple(
            local_rope if kind == "sliding_attention" else rope
            for rope, kind in zip(plain.ropes, types, strict=True)
        ),
        windows=_windows(types, config.integer("sliding_window")),
        attention_scale=scalar**-0.5,
        embedding_multiplier=math.sqrt(plain.hidden_size),
        mlp_bias=False,
    )


def _gemma3_text_part(config: JsonObject) -> ModelConfig:
    """The text model of one that reads images too, whose config is an object inside the file's."""
    outer = ("architectures", "dtype", "torch_dtype", "eos_token_id", "quantization_config")
    text = config.object_or_empty("text_config").with_some_of(config, outer)
    is_tied = config.flag("tie_word_embeddings", default=True)
    return replace(_gemma3(text), tie_word_embeddings=is_tied)


def _qwen_windows(config: JsonObject, num_layers: int) -> tuple[int | None, ...]:
    """Return the windows: of layers from `max_window_layers` on, or those that are said to."""
    if not config.flag("use_sliding_window"):
        return (None,) * num_layers
    first = config.integer("max_window_layers", 28)
    types = layer_types(config, num_layers) or tuple(
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    )
    # Null is no window; a file without the field means transformers' default.
    window = config.with_defaults({"sliding_window": 4096}).optional_integer("sliding_window")
    return _windows(types, window)


def _windows(types: tuple[str, ...], window: int | None) -> tuple[int | None, ...]:
    return tuple(window if kind == "sliding_attention" else None for kind in types)


FAMILIES: Mapping[str, FamilyReader] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "SmolLM3ForCausalLM": _smollm3,
    "GraniteForCausalLM": _granite,
    "Phi3ForCausalLM": _phi3,
    "Olmo2ForCausalLM": _olmo2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3_text_part,
    "Qwen3MoeForCausalLM": read_qwen3_moe,
    "GptOssForCausalLM": read_gpt_oss,
}
"""By the name that config.json gives as its architecture."""

SUPPORTED_ARCHITECTURES = tuple(FAMILIES)
"""Keys of `worker.models.ARCHITECTURES` too, known here without importing torch."""
