import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from protocol.errors import ModelFileError
from worker.safetensors_header import read_header


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def save(path: Path) -> None:
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros((), dtype=torch.bfloat16)}, path)


def write_raw(path: Path, header: bytes | dict[str, Any], data: bytes = b"") -> None:
    if isinstance(header, dict):
        header = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def fails(path: Path, *words: str) -> None:
    with pytest.raises(ModelFileError) as error:
        read_header(path)
    for word in (str(path), *words):
        assert word in str(error.value)


def test_what_the_library_wrote(path: Path):
    save(path)
    tensors = read_header(path)
    assert {name: (t.dtype, t.shape, t.num_bytes) for name, t in tensors.items()} == {
        "a": ("F32", (3, 4), 48),
        "b": ("BF16", (), 2),
    }
    assert max(t.offset + t.num_bytes for t in tensors.values()) == path.stat().st_size


@pytest.mark.parametrize("cut", [1, 8, 40, 10_000])
def test_truncated_file(path: Path, cut: int):
    save(path)
    path.write_bytes(path.read_bytes()[:-cut])
    fails(path, "truncated")


def test_trailing_bytes(path: Path):
    save(path)
    path.write_bytes(path.read_bytes() + b"x")
    fails(path, "damaged")


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"", ["bad safetensors header"]),
        (b"{", ["bad safetensors header"]),
        (b"\xff\xfe", ["bad safetensors header"]),
        (b"[]", ["must be an object"]),
        (b"[" * 100_000, ["bad safetensors header"]),
        (b'{"a": 1}', ["tensor a", "malformed"]),
        (b'{"a": {"dtype": "F32", "shape": [1]}}', ["malformed"]),
        (b'{"a": {}, "a": {}}', ["'a' appears twice"]),
        ({"a": entry([-1], 0, 4)}, ["malformed"]),
        ({"a": entry([1], 0, 4, "F33")}, ["tensor a", "unknown dtype F33"]),
        ({"a": entry([3, 4], 0, 48)}, ["truncated or damaged"]),
        ({"a": entry([2], 0, 4)}, ["tensor a", "data_offsets [0, 4]", "4 bytes", "makes 8"]),
        ({"a": entry([2], 8, 0)}, ["tensor a", "-8 bytes"]),
        ({"a": entry([1 << 39, 1 << 39], 0, 8)}, ["tensor a", "8 bytes"]),
        ({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, ["tensor b", "overlaps a"]),
        ({"a": entry([1], 0, 4), "b": entry([0], 2, 2)}, ["tensor b", "overlaps a"]),
        ({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, ["tensor b", "leaves a hole after a"]),
        ({"a": entry([1], 4, 8)}, ["tensor a", "leaves a hole after the header"]),
        ({"a": entry([1], -4, 0)}, ["tensor a", "overlaps the header"]),
        ({"a": entry([1], 1 << 60, (1 << 60) + 4)}, ["tensor a", "hole"]),
        ({"a": entry([3, 6], 0, 72)}, ["describes", "truncated or damaged"]),
    ],
    ids=str,
)
def test_bad_headers(path: Path, header: bytes | dict[str, Any], words: list[str]):
    write_raw(path, header, bytes(8))
    fails(path, *words)


@pytest.mark.parametrize("size", [0, 2**63, 101_000_000])
def test_absurd_header_sizes(path: Path, size: int):
    path.write_bytes(struct.pack("<Q", size))
    fails(path)


@pytest.mark.parametrize("content", [b"", b"1234567"])
def test_not_even_a_header(path: Path, content: bytes):
    path.write_bytes(content)
    fails(path, "not a safetensors file")
