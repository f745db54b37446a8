from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ModelFileError
from worker.gguf_config import gguf_config
from worker.gguf_file import GgufHeader, GgufTensor
from worker.rope_config import LinearScaling

HEADER = GgufHeader(
    path=Path("model.gguf"),
    file_bytes=1000,
    metadata={
        "general.architecture": "llama",
        "general.file_type": 7,
        "llama.block_count": 2,
        "llama.context_length": 256,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 5,
    },
    array_lengths={"tokenizer.ggml.tokens": 40},
    tensors={"output.weight": GgufTensor((40, 32), 0, 500)},
)


def changed(**metadata: Any) -> GgufHeader:
    changes = {key.replace("__", "."): value for key, value in metadata.items()}
    kept = {key: value for key, value in (HEADER.metadata | changes).items() if value is not None}
    return replace(HEADER, metadata=kept)


def test_what_follows_from_what():
    config = gguf_config(HEADER)
    assert config.vocab_size == 40
    assert config.head_dim == 8
    assert config.eos_token_ids == (2, 5)
    assert config.bos_token_id is None
    assert config.dtype == "bfloat16"
    assert not config.tie_word_embeddings
    assert not config.qkv_bias


def test_vocabulary_is_what_the_embedding_has():
    tensors = {"token_embd.weight": GgufTensor((48, 32), 0, 100)}
    config = gguf_config(replace(HEADER, tensors=tensors))
    assert config.vocab_size == 48
    assert config.tie_word_embeddings


def test_qwen3():
    metadata = {
        key.replace("llama.", "qwen3."): value for key, value in HEADER.metadata.items()
    } | {"general.architecture": "qwen3", "qwen3.attention.key_length": 16}
    config = gguf_config(replace(HEADER, metadata=metadata))
    assert config.architecture == "Qwen3ForCausalLM"
    assert config.head_dim == 16


def gemma3(**changes: Any) -> GgufHeader:
    keys = {
        "block_count": 7,
        "attention.key_length": 16,
        "attention.sliding_window": 512,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    } | changes
    metadata = {key.replace("llama.", "gemma3."): value for key, value in HEADER.metadata.items()}
    metadata |= {"general.architecture": "gemma3"}
    metadata |= {f"gemma3.{key}": value for key, value in keys.items() if value is not None}
    return replace(HEADER, metadata=metadata)


def test_gemma3_as_most_files_leave_it_to_the_reader():
    config = gguf_config(gemma3())
    assert config.architecture == "Gemma3ForCausalLM"
    assert config.windows == (512,) * 5 + (None, 512)
    thetas = [(rope.theta, rope.scaling) for rope in config.ropes if rope is not None]
    assert thetas[4:6] == [(10_000.0, None), (10_000.0, LinearScaling(factor=8.0))]
    assert config.attention_scale == 16**-0.5
    assert config.embedding_multiplier == 32**0.5
    assert (config.norm_offset, config.activation) == (1.0, "gelu_tanh")


def test_gemma3_as_some_files_say_it():
    header = gemma3(
        **{"attention.sliding_window_pattern": 3, "rope.freq_base_swa": 5e3, "rope.freq_base": 1e6}
    )
    config = gguf_config(header)
    assert config.windows == (512, 512, None) * 2 + (512,)
    assert [rope.theta for rope in config.ropes if rope is not None][1:3] == [5e3, 1e6]


def test_gemma3_27b_scales_scores_by_another_size():
    config = gguf_config(gemma3(block_count=62))
    assert config.attention_scale == 8**-0.5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention.sliding_window": None}, ["sliding_window is None", "integer"]),
        ({"attention.sliding_window": 0}, ["sliding_window is 0"]),
        ({"attention.sliding_window_pattern": (True,)}, ["pattern", "each of 7 layers"]),
        ({"attention.sliding_window_pattern": 0}, ["pattern is 0", "above 0"]),
    ],
)
def test_bad_windows(changes: dict[str, Any], words: list[str]):
    with pytest.raises(ModelFileError) as error:
        gguf_config(gemma3(**changes))
    for word in ["model.gguf", *words]:
        assert word in str(error.value)


def test_qwen2_has_biases():
    metadata = {key.replace("llama.", "qwen2."): value for key, value in HEADER.metadata.items()}
    metadata |= {"general.architecture": "qwen2"}
    with pytest.raises(ModelFileError, match=r"blk\.0\.attn_q\.bias is missing"):
        gguf_config(replace(HEADER, metadata=metadata))
    tensors = {f"blk.0.attn_{name}.bias": GgufTensor((32,), 0, 0) for name in "qkv"}
    config = gguf_config(replace(HEADER, metadata=metadata, tensors=tensors))
    assert (config.architecture, config.qkv_bias) == ("Qwen2ForCausalLM", True)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general__architecture": "qwen2moe"}, ["qwen2moe", "llama"]),
        ({"general__architecture": None}, ["general.architecture", "string"]),
        ({"llama__block_count": None}, ["llama.block_count is None", "integer"]),
        ({"llama__block_count": 2.0}, ["llama.block_count", "integer"]),
        ({"llama__attention__head_count": 0}, ["head_count", "at least 1"]),
        ({"llama__attention__head_count_kv": (2, 2)}, ["head_count_kv", "integer"]),
        ({"llama__attention__value_length": 16}, ["value_length", "head size, 8"]),
        ({"llama__expert_count": 8}, ["expert_count", "mixtures"]),
        ({"llama__attention__layer_norm_rms_epsilon": "x"}, ["epsilon", "number"]),
    ],
)
def test_bad_values(metadata: dict[str, Any], words: list[str]):
    with pytest.raises(ModelFileError) as error:
        gguf_config(changed(**metadata))
    for word in ["model.gguf", *words]:
        assert word in str(error.value)
