import struct
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ModelFileError
from worker.gguf_file import GgufHeader, GgufTensor
from worker.gguf_metadata import GgufMetadata
from worker.gguf_rope import gguf_rope
from worker.rope_config import (
    FactorScaling,
    LinearScaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
    longrope_attention_factor,
    yarn_attention_factor,
)


def read(
    architecture: str = "qwen3",
    path: Path = Path("model.gguf"),
    tensors: dict[str, GgufTensor] | None = None,
    **rope: Any,
) -> RopeConfig:
    """Read keys of `rope`, of which two underlines mean a dot."""
    keys = {f"{architecture}.rope.{key.replace('__', '.')}": rope[key] for key in rope}
    header = GgufHeader(
        path=path,
        file_bytes=1000,
        metadata={"general.architecture": architecture} | keys,
        array_lengths={},
        tensors=tensors or {},
    )
    return gguf_rope(GgufMetadata(header), header, head_dim=8, context_length=512)


def write_factors(path: Path, **tables: list[float]) -> dict[str, GgufTensor]:
    """Write tables one behind the other and return where they are."""
    tensors, data = {}, b""
    for name, table in tables.items():
        tensors[f"{name}.weight"] = GgufTensor((len(table),), 0, len(data))
        data += struct.pack(f"<{len(table)}f", *table)
    path.write_bytes(data)
    return tensors


def test_defaults():
    assert read() == RopeConfig(theta=10_000.0, rotary_dim=8)
    assert read(freq_base=5e5, dimension_count=6) == RopeConfig(theta=5e5, rotary_dim=6)
    assert read(scaling__type="none", scaling__factor=4.0).scaling is None
    assert read(scaling__factor=0.0).scaling is None


def test_linear():
    assert read(scaling__type="linear", scaling__factor=4.0).scaling == LinearScaling(factor=4.0)
    assert read(scaling__factor=4.0).scaling == LinearScaling(factor=4.0)
    assert read(scale_linear=2.0).scaling == LinearScaling(factor=2.0)


def test_yarn():
    yarn: dict[str, Any] = {"scaling__type": "yarn", "scaling__original_context_length": 128}
    factor = yarn_attention_factor(4.0)
    expected = YarnScaling(
        factor=4.0, original_max_position_embeddings=128, attention_factor=factor
    )
    assert read(**yarn, scaling__factor=4.0).scaling == expected
    assert read(**yarn).scaling == expected
    changed = read(
        **yarn,
        scaling__attn_factor=1.5,
        scaling__yarn_beta_fast=16.0,
        scaling__yarn_beta_slow=2.0,
    )
    assert changed.scaling == YarnScaling(
        factor=4.0,
        original_max_position_embeddings=128,
        attention_factor=1.5 * factor,
        beta_fast=16.0,
        beta_slow=2.0,
    )
    gpt_oss = read("gpt-oss", **yarn).scaling
    assert isinstance(gpt_oss, YarnScaling)
    assert not gpt_oss.truncate


def test_frequency_factors(tmp_path: Path):
    path = tmp_path / "model.gguf"
    tensors = write_factors(path, rope_freqs=[1, 1, 2, 8])
    assert read(path=path, tensors=tensors).scaling == FactorScaling(factors=(1.0, 1.0, 2.0, 8.0))


def test_long_and_short_factors(tmp_path: Path):
    path = tmp_path / "model.gguf"
    tensors = write_factors(path, rope_factors_long=[2, 4], rope_factors_short=[1, 1.5])
    phi3: dict[str, Any] = {"dimension_count": 4, "scaling__original_context_length": 128}
    expected = LongRopeScaling(
        short_factors=(1.0, 1.5),
        long_factors=(2.0, 4.0),
        original_max_position_embeddings=128,
        attention_factor=longrope_attention_factor(4.0, 128),
    )
    rope = read("phi3", path, tensors, **phi3)
    assert rope == RopeConfig(theta=10_000.0, rotary_dim=4, scaling=expected)
    scaling = read("phi3", path, tensors, **phi3, scaling__attn_factor=1.25).scaling
    assert isinstance(scaling, LongRopeScaling)
    assert scaling.attention_factor == 1.25
    del tensors["rope_factors_short.weight"]
    with pytest.raises(ModelFileError, match=r"tensor rope_factors_short\.weight is missing"):
        read("phi3", path, tensors, **phi3)


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (GgufTensor((4,), 1, 0), "must be float32"),
        (GgufTensor((2, 2), 0, 0), "must be float32"),
        (GgufTensor((600,), 0, 0), "must be float32"),
        (GgufTensor((4,), 0, 4), "ends inside rope_freqs.weight; it is truncated"),
    ],
    ids=str,
)
def test_bad_factors(tmp_path: Path, tensor: GgufTensor, word: str):
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(16))
    with pytest.raises(ModelFileError, match=word):
        read(path=path, tensors={"rope_freqs.weight": tensor})


@pytest.mark.parametrize(
    ("architecture", "rope", "words"),
    [
        ("llama", {"dimension_count": 4}, ["llama.rope.dimension_count is 4", "head size, 8"]),
        ("qwen3", {"freq_base": "x"}, ["qwen3.rope.freq_base is 'x'", "number"]),
        ("qwen3", {"scaling__type": "su"}, ["scaling.type is 'su'", "none, linear, yarn"]),
        ("qwen3", {"scaling__type": "longrope"}, ["rope_factors_long.weight is missing"]),
        ("qwen3", {"scaling__attn_factor": 1.2}, ["attn_factor is 1.2", "must be 1"]),
        (
            "qwen3",
            {"scaling__type": "yarn", "scaling__yarn_ext_factor": 0.5},
            ["yarn_ext_factor is 0.5", "must be 1"],
        ),
        (
            "qwen3",
            {"scaling__type": "yarn", "scaling__yarn_log_multiplier": 0.1},
            ["yarn_log_multiplier is 0.1", "must be 0"],
        ),
    ],
    ids=str,
)
def test_bad_values(architecture: str, rope: dict[str, Any], words: list[str]):
    with pytest.raises(ModelFileError) as error:
        read(architecture, **rope)
    for word in ["model.gguf: ", *words]:
        assert word in str(error.value)
