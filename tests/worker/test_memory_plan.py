"""The arithmetic of memory, and its estimate against models that are built."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from protocol.errors import ConfigError, ModelFileError
from tests.worker.quantized_models import awq, save_quantized
from tests.worker.thread_ranks import thread_ranks
from tests.worker.tiny_models import CPU, save_llama, save_qwen3
from worker.layers.linear import Linear
from worker.memory_plan import (
    DRIVER_BYTES,
    GRAPH_BYTES,
    GRAPH_POOL_BYTES,
    MemoryPlan,
    estimate_memory,
    graph_reserve,
    require_weights_fit,
    weight_bytes,
    weight_count,
)
from worker.model_files import read_model_config
from worker.models import ARCHITECTURES
from worker.parallel import OneRank
from worker.quantizing import quantize_to_fp8

GIB = 1 << 30
AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "group_size": 32}


def plan(*, utilization: float = 0.5, weights: int = 18 * GIB) -> MemoryPlan:
    return MemoryPlan(
        total=100 * GIB,
        utilization=utilization,
        weights=weights,
        workspace=GIB,
        other=GIB,
        graphs=GIB,
        block_bytes=GIB // 2,
    )


def test_blocks_take_what_is_left():
    assert plan().num_blocks == 2 * (50 - 18 - 1 - 1 - 1)


def test_nothing_left():
    with pytest.raises(
        ConfigError,
        match=r"of 100\.00 GiB .* 0\.5 allows 50\.00 GiB; weights take 47\.00 GiB, ",
    ):
        _ = plan(weights=47 * GIB).num_blocks


def test_table():
    assert plan().table().splitlines() == [
        "weights               18.00 GiB  --dtype, --quantization, --tp",
        "step's tensors         1.00 GiB  --max-num-batched-tokens",
        "CUDA graphs            1.00 GiB  --max-num-seqs, --enforce-eager",
        "driver and others      1.00 GiB",
        "KV cache              29.00 GiB  --num-blocks, --gpu-memory-utilization, --kv-cache-dtype",
        "left free             50.00 GiB",
    ]


def test_graph_reserve():
    assert graph_reserve(0, 256, 1000) == 0
    assert graph_reserve(3, 256, 1000) == GRAPH_POOL_BYTES + 3 * GRAPH_BYTES + 2 * 256 * 1000 * 4


@pytest.mark.parametrize("save", [save_llama, save_qwen3])
@pytest.mark.parametrize("tp", [1, 2])
def test_as_many_weights_as_the_model_has(tmp_path: Path, save, tp: int):
    save(tmp_path)
    config = read_model_config(tmp_path)
    model = ARCHITECTURES[config.architecture](
        config,
        group=OneRank() if tp == 1 else thread_ranks(tp)[0],
        max_model_len=32,
        dtype=torch.float32,
        device=CPU,
    )
    numbers = sum(weight.target.numel() for weight in model.weights())
    assert weight_count(config, tp=tp) == numbers


@pytest.mark.parametrize("tp", [1, 2])
def test_as_many_bytes_as_the_model_has(tmp_path: Path, tp: int):
    # The product `down` of a rank of two has 40 inputs, no multiple of 16.
    save_llama(tmp_path, intermediate_size=80, num_attention_heads=4)
    config = read_model_config(tmp_path)
    model = ARCHITECTURES[config.architecture](
        config,
        group=OneRank() if tp == 1 else thread_ranks(tp)[0],
        max_model_len=32,
        dtype=torch.bfloat16,
        device=CPU,
    )
    whole = sum(weight.target.nbytes for weight in model.weights())
    assert weight_bytes(config, tp=tp, item_bytes=2, storage="none") == whole
    quantize_to_fp8(model)
    saved = 0
    for module in model.layers.modules():
        if isinstance(module, Linear) and module.is_quantized:
            weight = module._quantized
            saved += weight.codes.numel() - weight.scales.nbytes
    assert saved > 0
    assert weight_bytes(config, tp=tp, item_bytes=2, storage="fp8") == whole - saved


def test_four_bits_need_scratch_for_many_rows(tmp_path: Path):
    save_quantized(tmp_path, awq(32), AWQ)
    sizes = {"tp": 1, "item_bytes": 2, "block_size": 16, "total": GIB, "utilization": 0.9}
    sizes |= {"max_num_batched_tokens": 64, "max_num_seqs": 4, "num_graphs": 0}
    sizes |= {"kv_item_bytes": 2}
    config = read_model_config(tmp_path)
    plain = estimate_memory(config, storage="none", **sizes)
    four = estimate_memory(config, storage="int4", **sizes)
    assert four.workspace == plain.workspace + 2 * 64 * 2 * 192  # gate and up
    assert plain.weights - four.weights == 2 * sum(
        outputs * (2 * inputs - inputs // 2 - 3 * inputs // 32)
        for outputs, inputs in ((128, 64), (64, 64), (384, 64), (64, 192))
    )


@pytest.mark.parametrize("kv_item_bytes", [1, 2])
def test_estimate(tmp_path: Path, kv_item_bytes: int):
    save_llama(tmp_path)
    config = read_model_config(tmp_path)
    estimated = estimate_memory(
        config,
        tp=1,
        item_bytes=2,
        kv_item_bytes=kv_item_bytes,
        block_size=16,
        total=GIB,
        utilization=0.9,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        num_graphs=0,
    )
    assert estimated.weights == 2 * weight_count(config, tp=1)
    assert estimated.other == DRIVER_BYTES
    numbers = 2 * config.num_layers * config.num_kv_heads * 16 * config.head_dim
    assert estimated.block_bytes == numbers * kv_item_bytes
    assert estimated.workspace > 2 * 64 * 3 * config.intermediate_size


def test_weights_that_no_memory_holds(tmp_path: Path):
    save_llama(tmp_path)
    model = read_model_config(tmp_path)
    needed = 4 * weight_count(model, tp=2)
    require_weights_fit(model, tp=2, item_bytes=4, storage="none", available_bytes=needed)
    huge = replace(model, vocab_size=1 << 22, hidden_size=1 << 17)
    for size, words in ((model, "vocab_size 131 make weights of"), (huge, "4194304 make")):
        with pytest.raises(ModelFileError, match=f"config.json: hidden_size .* {words}"):
            require_weights_fit(
                size, tp=2, item_bytes=4, storage="none", available_bytes=needed - 1
            )
