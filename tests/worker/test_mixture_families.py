from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ConfigError, ModelFileError
from worker.json_object import JsonObject
from worker.mixture_families import read_gpt_oss, read_qwen3_moe
from worker.model_config import ModelConfig, SwigluClamp
from worker.rope_config import RopeConfig, YarnScaling

QWEN_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "dtype": "bfloat16",
    "eos_token_id": 151_645,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40_960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151_936,
}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200_002,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4"},
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150_000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 201_088,
}


def qwen(**changes: Any) -> ModelConfig:
    return read_qwen3_moe(JsonObject(Path("config.json"), QWEN_30B | changes))


def gpt_oss(**changes: Any) -> ModelConfig:
    return read_gpt_oss(JsonObject(Path("config.json"), GPT_OSS_20B | changes))


def test_a_published_qwen3_moe():
    config = qwen()
    experts = config.experts
    assert experts is not None
    assert experts.layers == (True,) * 48
    assert (experts.num_experts, experts.experts_per_token) == (128, 8)
    assert experts.intermediate_size == 768
    assert experts.is_renormalised
    assert not experts.has_bias
    assert experts.clamp is None
    assert config.query_key_norm == "head"
    assert config.windows == (None,) * 48


def test_which_layers_have_experts():
    experts = qwen(num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]).experts
    assert experts is not None
    assert experts.layers == (False, True, False, False, False, True)


def test_windows_are_every_layers():
    config = qwen(num_hidden_layers=2, use_sliding_window=True, sliding_window=99)
    assert config.windows == (99, 99)


def test_the_newer_name_of_the_number_of_experts():
    config = {key: value for key, value in QWEN_30B.items() if key != "num_experts"}
    experts = read_qwen3_moe(JsonObject(Path("c"), config | {"num_local_experts": 9})).experts
    assert experts is not None
    assert experts.num_experts == 9


def test_a_published_gpt_oss():
    config = gpt_oss()
    experts = config.experts
    assert experts is not None
    assert experts.layers == (True,) * 24
    assert (experts.num_experts, experts.experts_per_token) == (32, 4)
    assert experts.intermediate_size == 2880
    assert experts.clamp == SwigluClamp(alpha=1.702, limit=7.0)
    assert experts.has_bias
    assert experts.is_renormalised
    assert experts.is_packed
    assert config.has_sinks
    assert config.qkv_bias
    assert config.output_bias
    assert config.windows == (128, None) * 12
    rope = config.ropes[0]
    assert isinstance(rope, RopeConfig)
    assert isinstance(rope.scaling, YarnScaling)
    assert not rope.scaling.truncate


def test_gpt_oss_scaling_where_the_file_has_none():
    config = {key: value for key, value in GPT_OSS_20B.items() if not key.startswith("rope")}
    assert read_gpt_oss(JsonObject(Path("config.json"), config)).ropes == gpt_oss().ropes


@pytest.mark.parametrize(
    ("read", "changes", "words"),
    [
        (qwen, {"decoder_sparse_step": 0}, ["decoder_sparse_step", "at least 1"]),
        (qwen, {"mlp_only_layers": "x"}, ["mlp_only_layers", "list of integers"]),
        (qwen, {"num_experts_per_tok": 129}, ["num_experts_per_tok is 129", "1 to 128"]),
        (qwen, {"num_experts": 0}, ["number of experts is 0"]),
        (qwen, {"moe_intermediate_size": 0}, ["moe_intermediate_size is 0"]),
        (
            gpt_oss,
            {"quantization_config": {"quant_method": "fp8"}},
            ["quantization_config.quant_method", '"mxfp4"'],
        ),
        (gpt_oss, {"swiglu_limit": 0.0}, ["swiglu_limit"]),
        (gpt_oss, {"intermediate_size": 2900}, ["intermediate_size is 2900", "multiple of 32"]),
    ],
)
def test_refused(read, changes: dict[str, Any], words: list[str]):
    with pytest.raises(ModelFileError) as caught:
        read(**changes)
    for word in ["config.json", *words]:
        assert word in str(caught.value)


def test_ranks_divide_the_experts_intermediate_size():
    assert qwen().legal_tp_sizes() == (1, 2, 4, 8, 16, 32)
    assert gpt_oss().legal_tp_sizes() == (1, 2, 4, 8, 16, 32, 64)
    with pytest.raises(ConfigError) as caught:
        qwen(moe_intermediate_size=760).require_legal_tp(16)
    assert str(caught.value) == (
        "--tp 16 does not divide this model's 32 query heads, 4 KV heads and the experts' "
        "intermediate size 760; legal are 1, 2, 4, 8."
    )
    some = qwen(mlp_only_layers=[0], intermediate_size=6142)
    with pytest.raises(ConfigError, match="intermediate size 6142 and the experts' intermediate"):
        some.require_legal_tp(4)
