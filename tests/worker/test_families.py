"""What each family's config.json says beyond Llama's."""

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ModelFileError
from worker.config_json import read_config_json
from worker.model_config import ModelConfig

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
}


def read(directory: Path, architecture: str, **changes: Any) -> ModelConfig:
    config = SIZES | {"architectures": [f"{architecture}ForCausalLM"]} | changes
    (directory / "config.json").write_text(json.dumps(config))
    return read_config_json(directory)


@pytest.mark.parametrize("window", [None, 7])
def test_mistral_has_one_window_or_none(tmp_path: Path, window: int | None):
    assert read(tmp_path, "Mistral", sliding_window=window).windows == (window,) * 4


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 9}, (None,) * 4),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}, "fff9"),
        ({"use_sliding_window": True, "max_window_layers": 0}, (4096,) * 4),
        ({"use_sliding_window": True, "sliding_window": None}, (None,) * 4),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            "9f9f",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["Qwen2", "Qwen3"])
def test_windows_of_qwen(tmp_path: Path, name: str, changes: dict[str, Any], windows: Any):
    if isinstance(windows, str):
        windows = tuple(None if kind == "f" else int(kind) for kind in windows)
    assert read(tmp_path, name, **changes).windows == windows


def test_biases(tmp_path: Path):
    qwen2 = read(tmp_path, "Qwen2")
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.mlp_bias) == (True, False, False)
    llama = read(tmp_path, "Llama", attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(
    ("changes", "rotates"),
    [
        ({}, [True, True, True, False]),
        ({"no_rope_layer_interval": 2}, [True, False, True, False]),
        ({"no_rope_layers": [0, 1, 1, 0, 1]}, [False, True, True, False]),
    ],
    ids=str,
)
def test_layers_of_smollm3_that_rotate(
    tmp_path: Path, changes: dict[str, Any], rotates: list[bool]
):
    config = read(tmp_path, "SmolLM3", **changes)
    assert [rope is not None for rope in config.ropes] == rotates
    assert {rope.theta for rope in config.ropes if rope is not None} == {2e6}
    assert config.windows == (None,) * 4
    config = read(tmp_path, "SmolLM3", use_sliding_window=True, sliding_window=5, **changes)
    assert config.windows == tuple(None if rotated else 5 for rotated in rotates)


def test_multipliers_of_granite(tmp_path: Path):
    config = read(
        tmp_path,
        "Granite",
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.015625,
        logits_scaling=8.0,
    )
    assert config.embedding_multiplier == 12.0
    assert config.residual_multiplier == 0.22
    assert config.attention_scale == 0.015625
    assert config.logits_divisor == 8.0


GEMMA = {"head_dim": 8, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16}


def test_gemma3_old_style(tmp_path: Path):
    config = read(
        tmp_path,
        "Gemma3",
        **GEMMA,
        sliding_window=6,
        sliding_window_pattern=2,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert config.windows == (6, None) * 2
    local, full = config.ropes[:2]
    assert local is not None
    assert full is not None
    assert (local.theta, local.scaling) == (1e4, None)
    assert full.theta == 1e6
    assert full.scaling is not None
    assert config.attention_scale == 0.25
    assert config.activation == "gelu_tanh"
    assert config.embedding_multiplier == 32**0.5


def test_gemma3_as_transformers_leaves_out_its_defaults(tmp_path: Path):
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7})
    )
    config = read_config_json(tmp_path)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.windows == (4096,) * 5 + (None, 4096)
    assert [rope.theta for rope in config.ropes if rope is not None] == [1e4] * 5 + [1e6, 1e4]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("Gemma3", {"final_logit_softcapping": 30.0}, ["final_logit_softcapping is 30.0"]),
        ("Gemma3", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping is 50.0"]),
        ("Gemma3", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ("Gemma3", {"sliding_window_pattern": 0}, ["sliding_window_pattern", "at least 1"]),
        ("Gemma3", {"query_pre_attn_scalar": 0}, ["query_pre_attn_scalar", "above 0"]),
        ("Gemma3", {"hidden_activation": "gelu"}, ["hidden_activation", "gelu_pytorch_tanh"]),
        ("Gemma3", {"layer_types": ["full_attention"]}, ["layer_types", "4 entries"]),
        ("Gemma3", {"layer_types": ["linear_attention"] * 4}, ["layer_types", "sliding_attention"]),
        ("SmolLM3", {"no_rope_layers": [1, 0]}, ["no_rope_layers", "4 layers"]),
        ("SmolLM3", {"no_rope_layers": [1, 0, 2, 1]}, ["no_rope_layers", "0 or 1"]),
        ("SmolLM3", {"no_rope_layers": "none"}, ["no_rope_layers", "integers"]),
        ("SmolLM3", {"no_rope_layer_interval": 0}, ["no_rope_layer_interval", "at least 1"]),
        ("Mistral", {"sliding_window": 0}, ["sliding_window is 0", "1 to"]),
        ("Granite", {"residual_multiplier": -1.0}, ["residual multiplier is -1.0"]),
        ("Llama", {"residual_multiplier": 0.5}, ["residual_multiplier is 0.5", "left out or 1"]),
        ("Llama", {"quantization_config": {"bits": 4}}, ["quantization_config", "quant_method"]),
        ("Olmo2", {"clip_qkv": 8.0}, ["clip_qkv is 8.0", "left out"]),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], words: list[str]
):
    with pytest.raises(ModelFileError) as error:
        read(tmp_path, name, **changes)
    for word in ["config.json", *words]:
        assert word in str(error.value)


def test_a_text_model_that_is_part_of_another(tmp_path: Path):
    text = SIZES | GEMMA | {"sliding_window": 6, "eos_token_id": 1, "tie_word_embeddings": False}
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    config = read_config_json(tmp_path)
    assert config.eos_token_ids == (1, 106)
    assert config.dtype == "bfloat16"
    assert config.tie_word_embeddings
    assert config.windows == (6,) * 4
    (tmp_path / "config.json").write_text(
        json.dumps(outer | {"text_config": text | {"hidden_size": 0}})
    )
    with pytest.raises(ModelFileError, match="hidden_size is 0"):
        read_config_json(tmp_path)
