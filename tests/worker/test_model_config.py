from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ModelFileError
from worker.model_config import ModelConfig, merge_token_ids
from worker.rope_config import DynamicScaling, RopeConfig, YarnScaling

SMOL = ModelConfig(
    source=Path("config.json"),
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    norm_offset=0.0,
    query_key_norm=None,
    num_norms=2,
    ropes=(RopeConfig(theta=100_000.0, rotary_dim=64),) * 30,
    windows=(None,) * 30,
    attention_scale=0.125,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    activation="silu",
    embedding_multiplier=1.0,
    residual_multiplier=1.0,
    logits_divisor=1.0,
    experts=None,
    bos_token_id=1,
    eos_token_ids=(2,),
    dtype="bfloat16",
)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, (1, 3)),
        ({"num_heads": 8, "num_kv_heads": 8}, (1, 2, 4, 8)),
        # KV heads are replicated when there are more ranks than heads.
        ({"num_heads": 8, "num_kv_heads": 2}, (1, 2, 4, 8)),
        ({"num_heads": 12, "num_kv_heads": 4}, (1, 2, 4, 12)),
        ({"num_heads": 8, "num_kv_heads": 8, "intermediate_size": 1538}, (1, 2)),
    ],
)
def test_legal_tp_sizes(sizes: dict[str, int], expected: tuple[int, ...]):
    assert replace(SMOL, **sizes).legal_tp_sizes() == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_kv_heads": 10}, ["num_key_value_heads is 10", "1 to 9"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps is nan"]),
        ({"attention_scale": float("nan")}, ["attention scale is nan"]),
        ({"logits_divisor": 0.0}, ["logits divisor is 0.0", "above 0"]),
        ({"windows": (8,) * 29 + (0,)}, ["sliding_window is 0"]),
        ({"ropes": (RopeConfig(theta=0.0, rotary_dim=64),) * 30}, ["rope_theta is 0.0"]),
        ({"head_dim": 32}, ["rotary part of a head is 64", "2 to 32"]),
        ({"bos_token_id": -1}, ["bos_token_id is -1", "0 to 49151"]),
    ],
)
def test_bad_values(changes: dict[str, Any], words: list[str]):
    with pytest.raises(ModelFileError) as error:
        replace(SMOL, **changes)
    for word in ["config.json", *words]:
        assert word in str(error.value)


def test_the_longest_sequence_is_what_was_asked_for_or_what_the_model_and_a_frame_hold():
    assert SMOL.sequence_limit(None) == 8192
    assert SMOL.sequence_limit(100) == 100
    assert replace(SMOL, max_position_embeddings=10_485_760).sequence_limit(None) == 1 << 20


def test_what_rope_stretches_counts():
    yarn = YarnScaling(factor=4.0, original_max_position_embeddings=8000, attention_factor=1.0)
    dynamic = DynamicScaling(factor=2.0, original_max_position_embeddings=8192)
    ropes = [RopeConfig(theta=1e4, rotary_dim=64, scaling=scaling) for scaling in (yarn, dynamic)]
    stretched, grown = (replace(SMOL, ropes=(None, *[rope] * 29)) for rope in ropes)
    assert (stretched.sequence_limit(None), stretched.longest_context()) == (32000, 32000)
    assert (grown.sequence_limit(None), grown.longest_context()) == (8192, 16384)
    unturned = replace(SMOL, ropes=(None,) * 30)
    assert (unturned.sequence_limit(None), unturned.longest_context()) == (8192, 8192)


def test_merge_token_ids():
    assert merge_token_ids((3, 1), (), (1, 2)) == (3, 1, 2)
