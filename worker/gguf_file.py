"""The header of a GGUF file: its metadata and where its tensors lie. Knows no model.

    magic "GGUF" · version u32 · tensor count u64 · metadata count u64
    metadata     key string · type u32 · value          (a string: length u64, then UTF-8 bytes)
                 (an array: element type u32, length u64, then the elements)
    tensor infos name string · number of dimensions u32 · dimensions u64, innermost first
                 · type u32 · offset u64 from the start of the data
    padding to `general.alignment`, then the data

All little-endian. Arrays of strings and long arrays (a tokenizer's 50,000 tokens and merges) are
stepped over and only counted: reading SmolLM2's header takes 25 ms this way, against 2 s for
`gguf.GGUFReader`, which makes a numpy view of every string.
"""

import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

from protocol.errors import ModelFileError

Scalar: TypeAlias = int | float | bool | str
MetadataValue: TypeAlias = Scalar | tuple[Scalar, ...]

MAX_KEPT_ARRAY = 4096
"""Longest array of numbers whose elements are kept."""
MAX_STRING_BYTES = 16 << 20
MAX_METADATA = 65_536
MAX_TENSORS = 65_536
MAX_DIMENSIONS = 4

_STRING = 8
_ARRAY = 9
_NUMBERS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32 = _NUMBERS[4]
_U64 = _NUMBERS[10]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies and how it is stored."""

    shape: tuple[int, ...]
    """Outermost dimension first, in elements."""
    type_id: int
    """ggml's number of the storage format (`gguf.GGMLQuantizationType`)."""
    offset: int
    """Bytes from the start of the file."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything in a GGUF file but the data and the long arrays."""

    path: Path
    file_bytes: int
    metadata: dict[str, MetadataValue]
    array_lengths: dict[str, int]
    """Of every array, kept or not."""
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read a GGUF file's header. Raises ModelFileError if the file is not a sound GGUF file."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path} is not a regular file")
        with open(path, "rb", buffering=1 << 20) as file:
            return _Reader(path, file, status.st_size).header()
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error


class _Reader:
    """Reads a header front to back; every read is checked against the end of the file."""

    def __init__(self, path: Path, file: BinaryIO, file_bytes: int) -> None:
        self._path = path
        self._file = file
        self._file_bytes = file_bytes
        self._array_lengths: dict[str, int] = {}

    def header(self) -> GgufHeader:
        if self._bytes(4) != b"GGUF":
            raise ModelFileError(f"{self._path} is not a GGUF file: it does not begin with GGUF")
        version = self._u32()
        if version not in (2, 3):
            raise self._bad(f"has version {version}; versions 2 and 3 (little-endian) are read")
        num_tensors = self._bounded(self._u64(), MAX_TENSORS, "tensors")
        num_metadata = self._bounded(self._u64(), MAX_METADATA, "metadata entries")
        metadata: dict[str, MetadataValue] = {}
        seen: set[str] = set()
        for _ in range(num_metadata):
            key = self._string()
            if key in seen:
                raise self._bad(f"has the key {key} twice")
            seen.add(key)
            value = self._value(key)
            if value is not None:
                metadata[key] = value
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._bad(f"has alignment {alignment}; it must be a power of two")
        data_start = -(-self._file.tell() // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, tensor in infos:
            if name in tensors:
                raise self._bad(f"has the tensor {name} twice")
            offset = data_start + tensor.offset
            if offset >= self._file_bytes:
                raise self._bad(f"ends before tensor {name}; it is truncated")
            tensors[name] = GgufTensor(tensor.shape, tensor.type_id, offset)
        return GgufHeader(
            self._path, self._file_bytes, metadata, dict(self._array_lengths), tensors
        )

    def _value(self, key: str) -> MetadataValue | None:
        """Read a value. None: an array that is only counted."""
        type_id = self._u32()
        if type_id != _ARRAY:
            return self._scalar(key, type_id)
        element_type, length = self._u32(), self._u64()
        self._array_lengths[key] = length
        if element_type == _STRING:
            self._bounded(length, self._file_bytes // 8, f"elements in {key}")
            self._skip_strings(length)
            return None
        number = _NUMBERS.get(element_type)
        if number is None:
            raise self._bad(f"has arrays of type {element_type} under {key}, which is unknown")
        self._bounded(length, self._file_bytes // number.size, f"elements in {key}")
        if length > MAX_KEPT_ARRAY:
            self._skip(length * number.size)
            return None
        return tuple(value for (value,) in number.iter_unpack(self._bytes(length * number.size)))

    def _scalar(self, key: str, type_id: int) -> Scalar:
        if type_id == _STRING:
            return self._string()
        number = _NUMBERS.get(type_id)
        if number is None:
            raise self._bad(f"has a value of type {type_id} under {key}, which is unknown")
        value: Scalar = number.unpack(self._bytes(number.size))[0]
        return value

    def _tensor_info(self) -> tuple[str, GgufTensor]:
        """Read a tensor's name and place; its offset still counts from the start of the data."""
        name = self._string()
        num_dimensions = self._bounded(self._u32(), MAX_DIMENSIONS, f"dimensions in {name}")
        shape = [self._u64() for _ in range(num_dimensions)]
        for size in shape:
            self._bounded(size, 1 << 32, f"elements in a dimension of {name}")
        type_id, offset = self._u32(), self._u64()
        return name, GgufTensor(tuple(reversed(shape)), type_id, offset)

    def _string(self) -> str:
        data = self._bytes(self._string_length())
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self._bad(f"has a string that is not UTF-8: {data[:32]!r}") from error

    def _string_length(self) -> int:
        return self._bounded(self._u64(), MAX_STRING_BYTES, "bytes in a string")

    def _u32(self) -> int:
        value: int = _U32.unpack(self._bytes(4))[0]
        return value

    def _u64(self) -> int:
        value: int = _U64.unpack(self._bytes(8))[0]
        return value

    def _bytes(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) != count:
            raise self._bad("ends inside its header; it is truncated")
        return data

    def _skip_strings(self, count: int) -> None:
        read = self._file.read
        unpack = _U64.unpack
        try:
            for _ in range(count):
                (length,) = unpack(read(8))
                if length > MAX_STRING_BYTES or len(read(length)) != length:
                    raise self._bad("ends inside its header; it is truncated")
        except struct.error as error:
            raise self._bad("ends inside its header; it is truncated") from error

    def _skip(self, count: int) -> None:
        if self._file.seek(count, os.SEEK_CUR) > self._file_bytes:
            raise self._bad("ends inside its header; it is truncated")

    def _bounded(self, value: int, limit: int, what: str) -> int:
        if value > limit:
            raise self._bad(f"claims {value} {what}; at most {limit} are read")
        return value

    def _bad(self, what: str) -> ModelFileError:
        return ModelFileError(f"GGUF file {self._path} {what}")
