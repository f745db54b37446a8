from dataclasses import replace

import torch

from tests.worker.test_model_config import SMOL
from tests.worker.tiny_models import CPU
from worker.layers.head_norm import HeadNorm
from worker.layers.projection_norm import ProjectionNorm
from worker.models.parts import config_attention, config_feed_forward
from worker.parallel import OneRank

PLACE = {"group": OneRank(), "dtype": torch.float32, "device": CPU}


def test_attention_is_as_the_config_says():
    plain = config_attention(SMOL, 0, **PLACE)
    assert plain.head_norm is None
    assert plain.projection_norm is None
    assert plain.qkv.bias is None
    biased = config_attention(replace(SMOL, qkv_bias=True, query_key_norm="head"), 0, **PLACE)
    assert biased.qkv.bias is not None
    assert not biased.output.has_bias
    assert isinstance(biased.head_norm, HeadNorm)
    assert biased.head_norm.offset == 0.0
    whole = config_attention(replace(SMOL, query_key_norm="projection"), 0, **PLACE)
    assert isinstance(whole.projection_norm, ProjectionNorm)
    names = [
        weight.name for weight in config_attention(SMOL, 0, is_fused=True, **PLACE).weights("")
    ]
    assert names == ["qkv_proj.weight"] * 3 + ["o_proj.weight"]


def test_feed_forward_is_as_the_config_says():
    block = config_feed_forward(
        replace(SMOL, hidden_size=4, intermediate_size=6, mlp_bias=True, activation="gelu_tanh"),
        **PLACE,
    )
    assert [weight.name for weight in block.weights("")] == [
        "gate_proj.weight",
        "gate_proj.bias",
        "up_proj.weight",
        "up_proj.bias",
        "down_proj.weight",
        "down_proj.bias",
    ]
