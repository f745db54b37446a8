"""The header of a safetensors file: which tensors it holds and where. Imports no torch.

    header length u64 · header, a JSON object · the data
    "tensor name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}

Offsets count from the start of the data. Everything is checked before a byte of data is read:
tensors fill the file from end to end, each as long as its shape and dtype make it, and no two share
a name or a byte.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import ModelFileError

MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 65_536

_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits of a number, by the format's name of its dtype."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file's header."""

    path: Path
    dtype: str
    """The format's name of it: "BF16"."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return a file's tensors by name. Raises ModelFileError unless the file is all they say."""
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
    tensors = {name: _tensor(path, name, header[name], 8 + size) for name in header}
    _check_places(path, tensors, 8 + size, file_bytes)
    return tensors


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # JSON readers take the last of two of one name without a word.
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} appears twice")
    return result


def _tensor(path: Path, name: str, description: object, data_start: int) -> StoredTensor:
    match description:
        case {
            "dtype": str(dtype),
            "shape": list(shape),
            "data_offsets": [int(begin), int(end)],
        } if all(isinstance(size, int) and 0 <= size < 1 << 40 for size in shape):
            tensor = StoredTensor(path, dtype, tuple(shape), data_start + begin, end - begin)
        case _:
            raise ModelFileError(f"{path}: the header's entry of tensor {name} is malformed")
    if dtype not in _BITS:
        raise ModelFileError(f"{path}: the tensor {name} has the unknown dtype {dtype}")
    needed = -(-math.prod(shape) * _BITS[dtype] // 8)
    if tensor.num_bytes != needed:
        raise ModelFileError(
            f"{path}: the tensor {name} has data_offsets [{begin}, {end}], which are "
            f"{tensor.num_bytes} bytes; its shape {shape} of {dtype} makes {needed}"
        )
    return tensor


def _check_places(
    path: Path, tensors: dict[str, StoredTensor], data_start: int, file_bytes: int
) -> None:
    """Raise ModelFileError unless the tensors follow each other up to the end of the file."""
    end, before = data_start, "the header"
    for name, tensor in sorted(
        tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)
    ):
        if tensor.offset != end:
            what = "overlaps" if tensor.offset < end else "leaves a hole after"
            raise ModelFileError(f"{path}: data_offsets of the tensor {name}: it {what} {before}")
        end, before = end + tensor.num_bytes, name
    if file_bytes != end:
        raise ModelFileError(
            f"{path} is {file_bytes} bytes long; its header describes {end}: it is "
            "truncated or damaged"
        )
