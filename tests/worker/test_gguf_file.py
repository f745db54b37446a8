import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from protocol.errors import ModelFileError
from worker.gguf_config import read_gguf_config
from worker.gguf_file import GgufTensor, read_gguf_header
from worker.rope_config import FactorScaling


def write(path: Path, *, factors: bool = False, architecture: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_file_type(1)
    writer.add_token_list([f"token {i}" for i in range(40)])
    writer.add_token_scores([0.5] * 40)
    writer.add_array("long", list(range(5000)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_tensor("token_embd.weight", np.zeros((40, 32), np.float32))
    if factors:
        writer.add_tensor("rope_freqs.weight", np.array([1, 1, 2, 8], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_header(tmp_path: Path):
    path = write(tmp_path / "model.gguf")
    header = read_gguf_header(path)
    assert header.metadata["llama.block_count"] == 2
    assert header.metadata["general.architecture"] == "llama"
    assert header.array_lengths["tokenizer.ggml.tokens"] == 40
    assert header.metadata["tokenizer.ggml.scores"] == (0.5,) * 40
    assert "long" not in header.metadata
    assert header.array_lengths["long"] == 5000
    (expected,) = gguf.GGUFReader(path).tensors
    assert header.tensors == {
        "token_embd.weight": GgufTensor((40, 32), int(expected.tensor_type), expected.data_offset)
    }


def test_config(tmp_path: Path):
    config = read_gguf_config(write(tmp_path / "model.gguf"))
    assert config.architecture == "LlamaForCausalLM"
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (40, 32, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 8)
    assert [(rope.theta, rope.scaling) for rope in config.ropes] == [(5000.0, None)] * 2
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.dtype == "float16"


def test_frequency_factors(tmp_path: Path):
    config = read_gguf_config(write(tmp_path / "model.gguf", factors=True))
    assert config.ropes[0].scaling == FactorScaling(factors=(1.0, 1.0, 2.0, 8.0))


def test_unsupported_architecture(tmp_path: Path):
    path = write(tmp_path / "model.gguf", architecture="gpt2")
    with pytest.raises(ModelFileError, match="gpt2, which is not supported; supported: llama"):
        read_gguf_config(path)


def test_every_truncation_of_the_header_is_refused(tmp_path: Path):
    path = write(tmp_path / "model.gguf")
    header = read_gguf_header(path)
    data = path.read_bytes()
    data_start = header.tensors["token_embd.weight"].offset
    cut = tmp_path / "cut.gguf"
    for length in range(0, data_start + 1, 37):
        cut.write_bytes(data[:length])
        with pytest.raises(ModelFileError, match=r"cut\.gguf"):
            read_gguf_header(cut)


@pytest.mark.parametrize(
    ("counts", "word"), [((2**63, 0), "tensors"), ((0, 2**63), "metadata entries")]
)
def test_absurd_counts(tmp_path: Path, counts: tuple[int, int], word: str):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts))
    with pytest.raises(ModelFileError, match=word):
        read_gguf_header(path)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"GGML" + bytes(20), "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "bytes in a string"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 99), "type 99"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**40), "elements in k"),
    ],
)
def test_bad_headers(tmp_path: Path, data: bytes, word: str):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=word):
        read_gguf_header(path)


def test_not_a_file(tmp_path: Path):
    with pytest.raises(ModelFileError, match="regular file"):
        read_gguf_header(tmp_path)
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_gguf_header(tmp_path / "absent.gguf")
