"""Weights from safetensors files: one file, or shards named by an index.

Before anything is read, every header is checked: sizes against the file, names for duplicates,
the model's tensors for presence, shape and dtype. The library maps files into memory, and a file
shorter than its header says would kill the process, not raise.
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from protocol.errors import ModelFileError
from worker.json_object import read_json
from worker.weights import Weight

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 65_536

_DTYPES = ("F64", "F32", "F16", "BF16")
_ROTARY_BUFFER = ".rotary_emb.inv_freq"
"""Old checkpoints carry the rotary frequencies, which follow from the config."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor in a file's header."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


def load_safetensors(
    directory: Path, weights: Sequence[Weight], *, ignored: frozenset[str]
) -> None:
    """Fill weights from a model directory. Raises ModelFileError naming file and tensor.

    `ignored` are tensors that the files may have although no weight wants them; a name that ends
    in a dot stands for all that begin with it.
    """
    entries = _read_headers(_weight_files(directory))
    wanted: dict[Path, list[Weight]] = {}
    for weight in weights:
        entry = entries.get(weight.name)
        if entry is None:
            raise ModelFileError(f"{directory}: no file holds the tensor {weight.name}")
        _check(weight, entry)
        wanted.setdefault(entry.path, []).append(weight)
    taken = {weight.name for weight in weights}
    ignored_prefixes = tuple(name for name in ignored if name.endswith("."))
    for name, entry in entries.items():
        if name in taken or name in ignored or name.startswith(ignored_prefixes):
            continue
        if not name.endswith(_ROTARY_BUFFER):
            raise ModelFileError(f"{entry.path}: the tensor {name} is not part of this model")
    for path, weights_of_file in wanted.items():
        _read(path, weights_of_file)


def _weight_files(directory: Path) -> Mapping[Path, frozenset[str] | None]:
    """Return the files to read, each with the tensors an index says it holds (None: any)."""
    index_path = directory / INDEX_FILE
    if not index_path.exists():
        if not (directory / SINGLE_FILE).exists():
            raise ModelFileError(f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        return {directory / SINGLE_FILE: None}
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index_path}: weight_map must be an object of tensor: file")
    shards: dict[str, set[str]] = {}
    for name, file_name in weight_map.items():
        # A plain name cannot lead out of the directory, whatever the file system does with dots.
        if not isinstance(file_name, str) or Path(file_name).name != file_name or not file_name:
            raise ModelFileError(
                f"{index_path}: {name} is said to be in {file_name!r}; it must be the name of a "
                "file in the same directory"
            )
        shards.setdefault(file_name, set()).add(name)
    return {directory / file_name: frozenset(names) for file_name, names in shards.items()}


def _read_headers(files: Mapping[Path, frozenset[str] | None]) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    for path, expected in files.items():
        header = _read_header(path)
        if expected is not None:
            for name in sorted(expected - header.keys()):
                raise ModelFileError(f"{path}: the index says it holds {name}, but it does not")
        for name, entry in header.items():
            if name in entries:
                raise ModelFileError(f"{path}: the tensor {name} is also in {entries[name].path}")
            entries[name] = entry
    return entries


def _read_header(path: Path) -> dict[str, _Entry]:
    """Read a file's header and check that the file is exactly as long as it says."""
    try:
        if not path.is_file():
            raise ModelFileError(f"{path} is missing or is not a regular file")
        file_bytes = path.stat().st_size
        with open(path, "rb") as file:
            prefix = file.read(8)
            size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
            if size > min(MAX_HEADER_BYTES, file_bytes - 8):
                raise ModelFileError(f"{path} is truncated or not a safetensors file")
            header = json.loads(file.read(size), object_pairs_hook=_unique_names)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: bad safetensors header: {error}") from error
    if not isinstance(header, dict) or len(header) > MAX_TENSORS:
        raise ModelFileError(f"{path}: its header must be an object of at most {MAX_TENSORS}")
    header.pop("__metadata__", None)
    ends = [0]
    entries: dict[str, _Entry] = {}
    for name, description in header.items():
        entries[name], end = _entry(path, name, description)
        ends.append(end)
    expected_bytes = 8 + size + max(ends)
    if file_bytes != expected_bytes:
        raise ModelFileError(
            f"{path} is {file_bytes} bytes long; its header describes {expected_bytes}: it is "
            "truncated or damaged"
        )
    return entries


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # The library takes the last of two tensors of one name without a word.
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} appears twice")
    return result


def _entry(path: Path, name: str, description: object) -> tuple[_Entry, int]:
    """Return a tensor's entry and the offset of its end in the data."""
    match description:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(), int(end)]} if all(
            isinstance(size, int) and 0 <= size < 1 << 40 for size in shape
        ):
            return _Entry(path, dtype, tuple(shape)), end
        case _:
            raise ModelFileError(f"{path}: the header's entry of tensor {name} is malformed")


def _check(weight: Weight, entry: _Entry) -> None:
    if entry.shape != weight.shape:
        raise ModelFileError(
            f"{entry.path}: the tensor {weight.name} has shape {list(entry.shape)}; "
            f"config.json makes it {list(weight.shape)}"
        )
    if entry.dtype not in _DTYPES:
        raise ModelFileError(
            f"{entry.path}: the tensor {weight.name} is stored as {entry.dtype}; supported: "
            f"{', '.join(_DTYPES)}"
        )


def _read(path: Path, weights: Iterable[Weight]) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            for weight in weights:
                whole = file.get_slice(weight.name)
                index = [slice(None)] * len(weight.shape)
                index[weight.dim] = slice(weight.start, weight.end)
                weight.target.copy_(whole[tuple(index)])
    except SafetensorError as error:
        raise ModelFileError(f"{path} cannot be read: {error}") from error
