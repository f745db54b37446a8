import json
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ModelFileError
from worker.config_json import read_config_json
from worker.rope_config import LinearScaling, Llama3Scaling, RopeConfig

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "bfloat16",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def write(directory: Path, **changes: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    return directory


def test_old_style(tmp_path: Path):
    config = read_config_json(write(tmp_path, rope_theta=5e5, rope_scaling=LLAMA3))
    assert config.head_dim == 8
    scaling = Llama3Scaling(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=128,
    )
    assert config.ropes == (RopeConfig(theta=5e5, rotary_dim=8, scaling=scaling),) * 2
    assert config.dtype == "bfloat16"
    assert config.eos_token_ids == (2,)
    assert not config.tie_word_embeddings


def test_new_style(tmp_path: Path):
    rope = {"rope_theta": 1e5, "rope_type": "linear", "factor": 2.0}
    config = read_config_json(write(tmp_path, rope_parameters=rope, dtype="float16", head_dim=16))
    assert config.head_dim == 16
    scaling = LinearScaling(factor=2.0)
    assert config.ropes[0] == RopeConfig(theta=1e5, rotary_dim=16, scaling=scaling)
    assert config.dtype == "float16"


def test_defaults(tmp_path: Path):
    config = read_config_json(write(tmp_path, num_key_value_heads=None, eos_token_id=None))
    assert config.num_kv_heads == 4
    assert config.ropes[0] == RopeConfig(theta=10_000.0, rotary_dim=8)
    assert config.eos_token_ids == ()


@pytest.mark.parametrize("ids", ["-1", "[49152]", '"</s>"'])
def test_generation_config_is_named_for_its_own_faults(tmp_path: Path, ids: str):
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {ids}}}')
    with pytest.raises(
        ModelFileError, match=r"/generation_config\.json: eos_token_id is .* must be"
    ):
        read_config_json(tmp_path)


def test_generation_config_adds_eos_ids(tmp_path: Path):
    write(tmp_path, eos_token_id=[5, 6])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [6, 7]}')
    assert read_config_json(tmp_path).eos_token_ids == (5, 6, 7)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM"]),
        ({"architectures": None}, ["architectures"]),
        ({"architectures": []}, ["architectures"]),
        ({"vocab_size": "128"}, ["vocab_size", "integer"]),
        ({"vocab_size": 0}, ["vocab_size", "1 to"]),
        ({"hidden_size": True}, ["hidden_size", "integer"]),
        ({"hidden_size": 33}, ["hidden_size", "multiple"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "1 to 1024"]),
        ({"num_attention_heads": 0}, ["hidden_size"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "divisor of 4"]),
        ({"head_dim": 7}, ["head_dim", "even"]),
        ({"rms_norm_eps": -1}, ["rms_norm_eps"]),
        ({"max_position_embeddings": 10**12}, ["max_position_embeddings"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "silu"]),
        ({"rope_scaling": {"type": "mrope"}}, ["rope_scaling.type", "mrope", "llama3"]),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, ["rope factor", "above 0"]),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, ["low_freq_factor"]),
        ({"rope_theta": 10**400}, ["rope_theta", "finite"]),
        ({"eos_token_id": 128}, ["eos_token_id", "0 to 127"]),
        ({"eos_token_id": "2"}, ["eos_token_id"]),
        ({"torch_dtype": "int8"}, ["torch_dtype", "bfloat16"]),
        ({"use_sliding_window": True}, ["use_sliding_window", "false"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping", "left out"]),
        ({"logits_scaling": 8.0}, ["logits_scaling", "left out or 1"]),
        ({"attention_bias": 1}, ["attention_bias", "true or false"]),
    ],
)
def test_bad_values_name_file_and_key(tmp_path: Path, changes: dict[str, Any], words: list[str]):
    write(tmp_path, **changes)
    with pytest.raises(ModelFileError) as error:
        read_config_json(tmp_path)
    for word in ["config.json", *words]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "not valid JSON"),
        ("[1]", "object"),
        ('{"vocab_size": NaN}', "NaN"),
        ('{"vocab_size": 1, "vocab_size": 2}', "vocab_size"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_bad_json(tmp_path: Path, text: str, word: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelFileError, match=word):
        read_config_json(tmp_path)


def test_missing_file(tmp_path: Path):
    with pytest.raises(ModelFileError, match=r"config\.json is missing"):
        read_config_json(tmp_path)
