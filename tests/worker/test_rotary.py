"""Frequencies by hand, and tables and turned heads against transformers' modules."""

import cmath
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, GptOssConfig, LlamaConfig, Phi3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding, apply_rotary_pos_emb

from worker.json_object import JsonObject
from worker.layers.rotary import Rotary, Rotation, inverse_frequencies
from worker.rope_config import (
    DynamicScaling,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)
from worker.rope_json import LayerType, read_rope

CPU = torch.device("cpu")
HEAD_DIM = 16
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 9.0, 27.0, 40.0],
}


def frequencies(
    theta: float, rotary_dim: int, scaling: RopeScaling | None = None, max_positions: int = 64
) -> torch.Tensor:
    rope = RopeConfig(theta=theta, rotary_dim=rotary_dim, scaling=scaling)
    return inverse_frequencies(rope, max_positions)


def test_plain_frequencies():
    torch.testing.assert_close(frequencies(10_000.0, 8), torch.tensor([1.0, 0.1, 0.01, 0.001]))


def test_linear_and_factor_scaling():
    plain = frequencies(10_000.0, 8)
    torch.testing.assert_close(frequencies(10_000.0, 8, LinearScaling(factor=2.0)), plain / 2)
    scaling = FactorScaling(factors=(1.0, 2.0, 4.0, 8.0))
    torch.testing.assert_close(
        frequencies(10_000.0, 8, scaling), plain / torch.tensor([1.0, 2.0, 4.0, 8.0])
    )


def test_llama3_keeps_short_and_stretches_long_wavelengths():
    scaling = Llama3Scaling(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    plain = frequencies(500_000.0, 128)
    ratio = plain / frequencies(500_000.0, 128, scaling)
    turns = 8192 * plain / (2 * math.pi)
    assert torch.all(ratio[turns > 4.0] == 1.0)
    torch.testing.assert_close(ratio[turns < 1.0], torch.full_like(ratio[turns < 1.0], 8.0))
    between = ratio[(turns >= 1.0) & (turns <= 4.0)]
    assert len(between) > 3
    assert torch.all(between.diff() > 0)


def test_a_dynamic_base_depends_on_the_longest_sequence():
    scaling = DynamicScaling(factor=2.0, original_max_position_embeddings=64)
    plain = frequencies(100.0, 8)
    for length in (1, 63, 64):
        assert torch.equal(frequencies(100.0, 8, scaling, length), plain)
    stretched = frequencies(100.0, 8, scaling, 128)
    # Three times in the slowest pair, whose turn 128 positions make is then 2/3 of what 64 made.
    torch.testing.assert_close(plain / stretched, 3.0 ** (torch.arange(4) / 3))


def test_longrope_has_long_factors_where_sequences_may_be_long():
    scaling = LongRopeScaling(
        short_factors=(1.0, 1.0, 2.0, 2.0),
        long_factors=(1.0, 4.0, 8.0, 16.0),
        original_max_position_embeddings=64,
        attention_factor=1.0,
    )
    plain = frequencies(100.0, 8)
    short, long = (plain / torch.tensor(f) for f in (scaling.short_factors, scaling.long_factors))
    torch.testing.assert_close(frequencies(100.0, 8, scaling, 64), short)
    torch.testing.assert_close(frequencies(100.0, 8, scaling, 65), long)


def test_yarn_ramps_between_its_two_pairs():
    scaling = YarnScaling(factor=4.0, original_max_position_embeddings=4096, attention_factor=1.0)
    plain = frequencies(10_000.0, 128)
    ratio = plain / frequencies(10_000.0, 128, scaling)
    # 32 turns in 4,096 positions are those of pair 20.9, one turn that of pair 45.03.
    torch.testing.assert_close(ratio[:21], torch.ones(21))
    torch.testing.assert_close(ratio[46:], torch.full((18,), 4.0))
    divided = (torch.arange(20, 47) - 20) / 26
    torch.testing.assert_close(1 / ratio[20:47], 1 - divided + divided / 4)


def read_like_a_file(
    config: Any, layer_type: LayerType = "full_attention", head_dim: int = HEAD_DIM
) -> RopeConfig:
    """What is read from the config.json that transformers would write."""
    values = JsonObject(Path("config.json"), config.to_dict())
    positions = config.max_position_embeddings
    return read_rope(
        values, head_dim=head_dim, max_position_embeddings=positions, layer_type=layer_type
    )


def rotation_of(rope: RopeConfig, max_positions: int, dtype: torch.dtype) -> Rotation:
    rope.check(Path("config.json"), HEAD_DIM)
    rotary = Rotary(rope, max_positions=max_positions, dtype=dtype, device=CPU)
    rotation: Rotation = rotary(torch.arange(max_positions))
    return rotation


def assert_same_table(
    rope: RopeConfig, module: torch.nn.Module, length: int, dtype: torch.dtype, **kind: Any
) -> None:
    """Compare every position of sequences that may be `length` long."""
    rotation = rotation_of(rope, length, dtype)
    cos, sin = module(torch.zeros(1, dtype=dtype), torch.arange(length)[None], **kind)
    half = rope.rotary_dim // 2
    atol = 2e-5 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(rotation.cos[:, 0], cos[0], rtol=0, atol=atol)
    torch.testing.assert_close(rotation.sin[:, 0, half:], sin[0, :, half:], rtol=0, atol=atol)
    torch.testing.assert_close(rotation.sin[:, 0, :half], -sin[0, :, :half], rtol=0, atol=atol)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5},
        {"rope_type": "dynamic", "factor": 2.5},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 4.0,
            "beta_slow": 1.5,
            "truncate": False,
            "partial_rotary_factor": 0.75,
        },
        # So little context that the ramp has no width.
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 0.7,
            "mscale_all_dim": 0.4,
        },
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 1.3,
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [256, 400])
def test_llamas_table(rope: dict[str, Any], length: int):
    config = LlamaConfig(**SIZES, head_dim=HEAD_DIM, rope_parameters=rope | {"rope_theta": 500.0})
    module = LlamaRotaryEmbedding(config)
    assert_same_table(read_like_a_file(config), module, length, torch.float32)


@pytest.mark.parametrize("length", [64, 65, 256])
@pytest.mark.parametrize("attention_factor", [None, 1.25])
def test_phi3s_table(length: int, attention_factor: float | None):
    config = Phi3Config(
        **SIZES,
        original_max_position_embeddings=64,
        partial_rotary_factor=0.75,
        rope_parameters=LONG | {"attention_factor": attention_factor},
    )
    rope = read_like_a_file(config)
    assert rope.rotary_dim == 12
    assert_same_table(rope, Phi3RotaryEmbedding(config), length, torch.float32)


def test_gemma3s_two_tables():
    scaled = {"rope_type": "linear", "factor": 8.0}
    config = Gemma3TextConfig(
        **SIZES, head_dim=HEAD_DIM, rope_scaling=scaled, layer_types=["sliding_attention"] * 2
    )
    config.layer_types = ["sliding_attention", "full_attention"]
    module = Gemma3RotaryEmbedding(config)
    for kind in ("sliding_attention", "full_attention"):
        rope = read_like_a_file(config, kind)
        assert_same_table(rope, module, 256, torch.float32, layer_type=kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpt_osss_table_in_16_bits(dtype: torch.dtype):
    config = GptOssConfig(**SIZES, head_dim=HEAD_DIM)
    rope = read_like_a_file(config)
    assert isinstance(rope.scaling, YarnScaling)
    assert not rope.scaling.truncate
    # Theirs has each pair's angle once.
    module = GptOssRotaryEmbedding(config)
    cos, sin = module(torch.zeros(1, dtype=dtype), torch.arange(256)[None])
    rotation = rotation_of(rope, 256, dtype)
    torch.testing.assert_close(rotation.cos[:, 0, : HEAD_DIM // 2], cos[0], rtol=0, atol=5e-3)
    torch.testing.assert_close(rotation.sin[:, 0, HEAD_DIM // 2 :], sin[0], rtol=0, atol=5e-3)


def test_a_part_turns_as_phi3s():
    config = Phi3Config(**SIZES, original_max_position_embeddings=64, partial_rotary_factor=0.5)
    torch.manual_seed(0)
    heads = torch.randn(9, 3, HEAD_DIM)
    cos, sin = Phi3RotaryEmbedding(config)(heads, torch.arange(9)[None])
    expected, _ = apply_rotary_pos_emb(heads[None], heads[None], cos, sin, unsqueeze_dim=2)
    turned = heads.clone()
    rotation_of(read_like_a_file(config), 9, torch.float32).turn_(turned)
    torch.testing.assert_close(turned, expected[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(turned[..., 8:], heads[..., 8:])


def test_a_pair_turns_as_a_complex_number():
    rope = RopeConfig(theta=100.0, rotary_dim=8)
    rotary = Rotary(rope, max_positions=50, dtype=torch.float32, device=CPU)
    heads = torch.randn(3, 2, 8)
    before = heads.clone()
    positions = torch.tensor([0, 7, 49])
    rotary(positions).turn_(heads)
    torch.testing.assert_close(heads[0], before[0])
    angles = inverse_frequencies(rope, 50).tolist()
    for row, position in enumerate(positions.tolist()):
        for head in range(2):
            for pair in range(4):
                number = complex(before[row, head, pair], before[row, head, pair + 4])
                turned = number * cmath.exp(1j * position * angles[pair])
                assert abs(turned.real - heads[row, head, pair]) < 1e-5
                assert abs(turned.imag - heads[row, head, pair + 4]) < 1e-5
