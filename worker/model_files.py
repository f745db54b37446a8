"""Where a model's config and weights are: a directory in Hugging Face's layout, or a GGUF file.

Imports no torch.
"""

import hashlib
from pathlib import Path

from protocol.errors import ModelFileError
from worker.config_json import read_config_json
from worker.gguf_config import read_gguf_config
from worker.model_config import ModelConfig

WEIGHT_SUFFIXES = (".safetensors", ".gguf")


def is_gguf(path: Path) -> bool:
    """Whether a model path names a GGUF file rather than a directory."""
    return path.suffix == ".gguf"


def read_model_config(path: Path) -> ModelConfig:
    """Read the config of a model directory or a GGUF file. Raises ModelFileError."""
    if is_gguf(path):
        return read_gguf_config(path)
    if not path.is_dir():
        raise ModelFileError(f"{path} is neither a model directory nor a .gguf file")
    files = sorted(path.glob("*.gguf"))
    if files and not (path / "config.json").exists():
        raise ModelFileError(f"{path} holds no config.json but GGUF files: name one, {files[0]}")
    return read_config_json(path)


def model_digest(path: Path) -> str:
    """Return a sha256 over a model's config bytes and the names and sizes of its weight files.

    Ranks that load the same model agree on it, wherever their copies lie. The weights themselves
    are not read.
    """
    digest = hashlib.sha256()
    try:
        if is_gguf(path):
            files = [path]
            with open(path, "rb") as file:
                # The header, and the first weights where the header is shorter.
                digest.update(file.read(1 << 20))
        else:
            digest.update((path / "config.json").read_bytes())
            files = sorted(file for file in path.iterdir() if file.suffix in WEIGHT_SUFFIXES)
        for file_path in files:
            digest.update(f"\0{file_path.name}\0{file_path.stat().st_size}".encode())
    except OSError as error:
        raise ModelFileError(f"{error.filename} cannot be read: {error.strerror}") from error
    return digest.hexdigest()
