"""Converted tokenizers, kept between starts.

Converting a GGUF file's tokenizer takes seconds and imports a training framework; reading the
result takes a tenth of a second. So a conversion is written down, one directory a model:

    <root>/<key>/tokenizer.json    the tokenizer
    <root>/<key>/model.json        the digest of tokenizer.json, and the model's other text facts

The key is a digest of the paths, sizes and times of the files converted. `model.json` is written
last and names the digest of the other file, so a half-written or damaged entry is seen as such; it
is converted again. Nothing here is needed: a cache that cannot be written costs time only.
"""

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from frontend.text.text_model import TextModel

FORMAT = 4
"""Part of every key: raise it when a conversion would give something else."""

log = logging.getLogger(__name__)


class Conversion(NamedTuple):
    """What a conversion gives."""

    tokenizer_json: bytes
    """Empty where the model has no tokenizer."""
    model: TextModel


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    tokenizer_sha256: str | None
    """None: the model has no tokenizer."""
    model: TextModel


class TokenizerCache:
    """A directory of converted tokenizers."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def load(self, key: str) -> TextModel | None:
        """Return the entry of a key, or None if there is none that is whole."""
        directory = self._root / key
        tokenizer_file = directory / "tokenizer.json"
        try:
            entry = msgspec.json.decode((directory / "model.json").read_bytes(), type=_Entry)
            if entry.tokenizer_sha256 is None:
                return entry.model
            digest = hashlib.sha256(tokenizer_file.read_bytes()).hexdigest()
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, RecursionError) as error:
            log.warning("tokenizer cache entry ignored path=%s: %s", directory, error)
            return None
        if digest != entry.tokenizer_sha256:
            log.warning("tokenizer cache entry ignored path=%s: damaged", directory)
            return None
        return msgspec.structs.replace(entry.model, tokenizer_file=str(tokenizer_file.absolute()))

    def store(self, key: str, conversion: Conversion) -> bool:
        """Write an entry; False, with a warning, if it cannot be written."""
        directory = self._root / key
        tokenizer_json = conversion.tokenizer_json
        digest = hashlib.sha256(tokenizer_json).hexdigest() if tokenizer_json else None
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            if tokenizer_json:
                _write(directory / "tokenizer.json", tokenizer_json)
            entry = _Entry(tokenizer_sha256=digest, model=conversion.model)
            _write(directory / "model.json", msgspec.json.encode(entry))
        except OSError as error:
            log.warning("tokenizer cache not written path=%s: %s", directory, error)
            return False
        return True


def cache_key(files: Iterable[Path]) -> str:
    """Return the key of a conversion of these files."""
    digest = hashlib.sha256(f"tokenwire tokenizer {FORMAT}\n".encode())
    for file in files:
        status = file.stat()
        path = str(file.resolve())
        digest.update(f"{status.st_size} {status.st_mtime_ns} {len(path)} {path}\n".encode())
    return digest.hexdigest()[:32]


def _write(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
