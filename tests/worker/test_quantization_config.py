from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ModelFileError
from tests.worker.quantized_models import compressed
from worker.quantization_config import (
    Fp8Checkpoint,
    Int4Checkpoint,
    Unquantized,
    read_quantization,
)

SOURCE = Path("config.json")


def test_none():
    assert read_quantization(SOURCE, None) is None


def test_compressed_tensors():
    config = compressed() | {"ignore": ["lm_head", "re:.*gate$"]}
    form = read_quantization(SOURCE, config)
    assert form == Fp8Checkpoint(
        scale_name="weight_scale",
        block=None,
        is_by_tensor=False,
        unquantized=Unquantized(("lm_head",), (".*gate$",)),
    )
    blocks = compressed(strategy="block", block_structure=[128, 128])
    assert read_quantization(SOURCE, blocks).block == (128, 128)
    assert read_quantization(SOURCE, compressed(strategy="tensor")).is_by_tensor


def test_fp8():
    config = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
    }
    assert read_quantization(SOURCE, config) == Fp8Checkpoint(
        scale_name="weight_scale_inv",
        block=(128, 128),
        is_by_tensor=False,
        unquantized=Unquantized(("lm_head", "model.layers.0.mlp.gate")),
    )


@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_awq(group: int):
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    config |= {"version": "gemm", "modules_to_not_convert": None}
    assert read_quantization(SOURCE, config) == Int4Checkpoint(
        is_awq=True,
        group_size=group,
        has_order=False,
        zero_offset=0,
        unquantized=Unquantized(),
    )


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": False}


def test_gptq():
    form = read_quantization(SOURCE, GPTQ)
    assert form == Int4Checkpoint(
        is_awq=False,
        group_size=128,
        has_order=True,
        zero_offset=1,
        unquantized=Unquantized(),
    )
    second = read_quantization(SOURCE, GPTQ | {"checkpoint_format": "gptq_v2", "desc_act": False})
    assert (second.zero_offset, second.has_order) == (0, False)
    assert read_quantization(SOURCE, GPTQ | {"format": "gptq_v2"}).zero_offset == 0


@pytest.mark.parametrize(
    ("names", "patterns", "covered"),
    [
        (("lm_head",), (), False),
        (("model.layers.1.mlp.gate_proj",), (), True),
        (("model.layers.1",), (), True),
        (("gate_proj",), (), True),
        (("gate",), (), False),
        (("layers.1.mlp",), (), False),
        ((), (r".*\.mlp\..*",), True),
        ((), ("mlp",), False),
    ],
)
def test_names_that_keep_16_bits(names: tuple[str, ...], patterns: tuple[str, ...], covered: bool):
    assert Unquantized(names, patterns).covers("model.layers.1.mlp.gate_proj") is covered


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (3, "is no object"),
        ({}, "quant_method is None"),
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'; supported are"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is"),
        ({"quant_method": "fp8", "activation_scheme": "odd"}, "activation_scheme is 'odd'"),
        ({"quant_method": "fp8", "modules_to_not_convert": "a"}, "no list of strings"),
        (compressed(num_bits=4), r"config_groups\.group_0\.weights: num_bits is 4"),
        (compressed(type="int"), "type is 'int'"),
        (compressed(symmetric=False), "symmetric is False"),
        (compressed(strategy="group"), "strategy is 'group'"),
        (compressed(strategy="block"), "block_structure is missing"),
        ({"quant_method": "awq", "bits": 8}, "bits is 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 16}, "group_size is 16"),
        (GPTQ | {"bits": 3}, "bits is 3"),
        (GPTQ | {"group_size": True}, "group_size is True"),
        (GPTQ | {"dynamic": {"-:mlp": {}}}, "dynamic is"),
        (compressed() | {"sparsity_config": {"format": "sparse-24"}}, "format is 'sparse-24'"),
        (compressed() | {"transform_config": {"config_groups": {}}}, "transform_config is"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        (compressed() | {"format": "pack-quantized"}, "format is 'pack-quantized'"),
        (compressed() | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is"),
        (compressed() | {"config_groups": {}}, "there are 0 groups"),
        (compressed() | {"ignore": ["re:("]}, "no regular expression"),
    ],
    ids=str,
)
def test_whatever_else_is_refused(config: Any, words: str):
    with pytest.raises(ModelFileError, match=words) as error:
        read_quantization(SOURCE, config)
    assert str(error.value).startswith("config.json: quantization_config")
    assert "supported are" in str(error.value)
