from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ModelFileError
from worker.gguf_config import gguf_config
from worker.gguf_file import GgufHeader, GgufTensor

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
