"""What all ranks must agree on before they compute together, as one digest.

Ranks that read different files, or read one file differently, would compute plausible nonsense
together. Only headers are read: names, shapes and sizes of weights, not the weights.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from protocol.errors import ModelFileError
from protocol.messages import PROTOCOL_VERSION

GGUF_HEAD_BYTES = 16 << 20
"""How much of a GGUF file counts: its header, for any vocabulary there is."""
MAX_HEADER_BYTES = 100 << 20
"""Longest header that the safetensors format allows."""


def fingerprint(model: str, *, dtype: str, tp: int, max_model_len: int) -> str:
    """Return the sha256, in hex, of a model's identity and how it is run.

    `model` is a directory, a GGUF file, or empty where there is none. Raises ModelFileError for a
    file that cannot be read.
    """
    digest = hashlib.sha256()
    for part in (
        f"protocol={PROTOCOL_VERSION} dtype={dtype} tp={tp} max_model_len={max_model_len}".encode(),
        *_model_parts(Path(model) if model else None),
    ):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _model_parts(model: Path | None) -> Iterator[bytes]:
    """Yield what identifies a model, in an order that does not depend on the file system."""
    if model is None:
        return
    try:
        if model.is_file():
            yield str(model.stat().st_size).encode()
            with model.open("rb") as file:
                yield file.read(GGUF_HEAD_BYTES)
            return
        yield (model / "config.json").read_bytes()
        for path in sorted(model.glob("*.safetensors")):
            yield f"{path.name} {path.stat().st_size}".encode()
            yield _safetensors_header(path)
    except OSError as error:
        raise ModelFileError(f"Cannot read {error.filename}: {error.strerror}.") from error


def _safetensors_header(path: Path) -> bytes:
    """Return the JSON that names each tensor with its type, shape and place in the file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= MAX_HEADER_BYTES else b""
    if not header or len(header) != length:
        raise ModelFileError(
            f"{path} is no safetensors file or was cut short: its header should have {length} "
            "bytes."
        )
    return header
