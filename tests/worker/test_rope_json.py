from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ModelFileError
from worker.json_object import JsonObject
from worker.rope_config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
    longrope_attention_factor,
    yarn_attention_factor,
)
from worker.rope_json import LayerType, read_rope

YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"short_factor": [1, 1.5], "long_factor": [2, 4]}


def read(values: dict[str, Any], layer_type: LayerType = "full_attention", **defaults: float):
    config = JsonObject(Path("config.json"), values)
    return read_rope(
        config, head_dim=8, max_position_embeddings=512, layer_type=layer_type, **defaults
    )


def test_nothing_said():
    assert read({}) == RopeConfig(theta=10_000.0, rotary_dim=8)
    assert read({}, default_theta=5e6) == RopeConfig(theta=5e6, rotary_dim=8)
    assert read({"rope_scaling": None, "rope_parameters": None, "rope_theta": None}).theta == 1e4


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("default", {}, None),
        ("linear", {"factor": 2}, LinearScaling(factor=2.0)),
        (
            "dynamic",
            {"factor": 2.0, "original_max_position_embeddings": 1},
            DynamicScaling(factor=2.0, original_max_position_embeddings=512),
        ),
        (
            "llama3",
            LLAMA3 | {"original_max_position_embeddings": 128},
            Llama3Scaling(**LLAMA3, original_max_position_embeddings=128),
        ),
        (
            "llama3",
            LLAMA3,
            Llama3Scaling(**LLAMA3, original_max_position_embeddings=512),
        ),
        ("yarn", YARN, YarnScaling(**YARN, attention_factor=yarn_attention_factor(4.0))),
        (
            "yarn",
            {"factor": None, "original_max_position_embeddings": 64, "truncate": False},
            YarnScaling(
                factor=8.0,
                original_max_position_embeddings=64,
                attention_factor=yarn_attention_factor(8.0),
                truncate=False,
            ),
        ),
        (
            "yarn",
            YARN | {"mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 16, "beta_slow": 2},
            YarnScaling(
                **YARN,
                attention_factor=yarn_attention_factor(4.0, 0.7, 1.0),
                beta_fast=16.0,
                beta_slow=2.0,
            ),
        ),
        ("yarn", YARN | {"attention_factor": 1.5}, YarnScaling(**YARN, attention_factor=1.5)),
    ],
    ids=str,
)
def test_types_in_both_generations(key: str, name: str, values: dict[str, Any], expected: object):
    scaling = values | {key: name}
    expected_rope = RopeConfig(theta=5e5, rotary_dim=8, scaling=expected)
    assert read({"rope_theta": 5e5, "rope_scaling": scaling}) == expected_rope
    assert read({"rope_parameters": scaling | {"rope_theta": 5e5}}) == expected_rope


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_longrope_as_phi3_has_it(name: str):
    config = {
        "rope_scaling": LONG | {"type": name},
        "original_max_position_embeddings": 128,
        "partial_rotary_factor": 0.5,
    }
    expected = LongRopeScaling(
        short_factors=(1.0, 1.5),
        long_factors=(2.0, 4.0),
        original_max_position_embeddings=128,
        attention_factor=longrope_attention_factor(4.0, 128),
    )
    assert read(config) == RopeConfig(theta=1e4, rotary_dim=4, scaling=expected)
    rope = LONG | {"rope_type": name, "attention_factor": 1.5, "partial_rotary_factor": 0.5}
    scaling = read({"rope_parameters": rope, "original_max_position_embeddings": 128}).scaling
    assert isinstance(scaling, LongRopeScaling)
    assert scaling.attention_factor == 1.5


def test_the_part_that_is_turned_is_rounded_down():
    assert read({"partial_rotary_factor": 0.8}).rotary_dim == 6
    assert read({"rope_parameters": {"partial_rotary_factor": 0.25}}).rotary_dim == 2


def test_parameters_by_layer_type():
    config = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default"},
        }
    }
    scaled = RopeConfig(theta=1e6, rotary_dim=8, scaling=LinearScaling(factor=8.0))
    assert read(config) == scaled
    assert read(config, "sliding_attention", default_local_theta=2e4).theta == 2e4
    assert read(config, "sliding_attention", default_theta=3e4).theta == 3e4
    assert read(config, "sliding_attention").scaling is None


def test_sliding_layers_of_older_files():
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6}
    local = RopeConfig(theta=2e4, rotary_dim=8)
    assert read(scaled | {"rope_local_base_freq": 2e4}, "sliding_attention") == local
    # Gemma 3's smaller files leave out what is the default.
    assert read(scaled, "sliding_attention", default_local_theta=2e4) == local
    assert read(scaled, default_local_theta=2e4).scaling == LinearScaling(factor=8.0)
    # Families that have but one rotation have it in all layers.
    assert read(scaled, "sliding_attention") == read(scaled)


def test_a_scaling_added_by_hand_beside_parameters():
    config = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_scaling": YARN | {"rope_type": "yarn"},
    }
    expected = YarnScaling(**YARN, attention_factor=yarn_attention_factor(4.0))
    assert read(config) == RopeConfig(theta=1e6, rotary_dim=8, scaling=expected)
    config["rope_scaling"] = {}
    assert read(config) == RopeConfig(theta=1e6, rotary_dim=8)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rope_scaling": {"type": "mrope"}}, ["rope_scaling.type is 'mrope'", "longrope"]),
        ({"rope_scaling": {"type": 3}}, ["rope_scaling.type is 3", "string"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling is 'yarn'", "object"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor is None", "number"]),
        ({"rope_parameters": {"rope_theta": "x"}}, ["rope_parameters.rope_theta is 'x'"]),
        ({"rope_parameters": {"full_attention": 3}}, ["rope_parameters.full_attention is 3"]),
        ({"partial_rotary_factor": 0}, ["partial_rotary_factor is 0", "at most 1"]),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, ["rope_parameters.partial_rotary"]),
        ({"rope_scaling": LONG | {"type": "su", "long_factor": [1, "a"]}}, ["long_factor is [1"]),
        ({"rope_scaling": YARN | {"type": "yarn", "mscale": -1}}, ["rope_scaling.mscale is -1"]),
        ({"rope_scaling": YARN | {"type": "yarn", "truncate": 1}}, ["rope_scaling.truncate is 1"]),
    ],
    ids=str,
)
def test_bad_values_name_file_and_key(values: dict[str, Any], words: list[str]):
    with pytest.raises(ModelFileError) as error:
        read(values)
    for word in ["config.json: ", *words]:
        assert word in str(error.value)


def test_absurd_numbers_do_not_overflow():
    config = JsonObject(
        Path("config.json"),
        {
            "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 0},
            "partial_rotary_factor": 0.5,
        },
    )
    rope = read_rope(config, head_dim=10**400, max_position_embeddings=10**400)
    with pytest.raises(ModelFileError, match="original_max_position_embeddings is 0"):
        rope.check(Path("config.json"), head_dim=1 << 16)
