import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import worker.tensor_reader
from protocol.errors import ModelFileError
from worker.tensor_reader import StoredPart, read_parts, reading_threads

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch):
    # So that little tensors take several pieces, and pieces several reads.
    monkeypatch.setattr(worker.tensor_reader, "_READ_BYTES", 64)
    monkeypatch.setattr(worker.tensor_reader, "_DIRECT_BYTES", 200)
    monkeypatch.setattr(worker.tensor_reader, "_CONVERTED_BYTES", 160)


def write(path: Path, *tensors: Tensor) -> list[int]:
    """Write tensors one after the other; return where each begins."""
    offsets, data = [], b"x" * 10
    for tensor in tensors:
        offsets.append(len(data))
        data += tensor.contiguous().view(torch.uint8).numpy().tobytes()
    path.write_bytes(data)
    return offsets


def part(source: Tensor, offset: int, target: Tensor, **changes: Any) -> StoredPart:
    fields = {"dim": 0, "start": 0} | changes
    return StoredPart(
        name="t",
        offset=offset,
        dtype=source.dtype,
        shape=tuple(source.shape),
        target=target,
        **fields,
    )


@pytest.mark.parametrize("target_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_part_of_every_dimension(tmp_path: Path, dtype: torch.dtype, target_dtype):
    source = torch.randn(7, 5, 6).to(dtype)
    offset = write(tmp_path / "f", source)[0]
    for dim, (start, size) in [(0, (2, 4)), (1, (1, 3)), (2, (3, 3)), (1, (0, 5)), (0, (0, 0))]:
        expected = source.narrow(dim, start, size)
        target = torch.empty(expected.shape, dtype=target_dtype)
        parts = [part(source, offset, target, dim=dim, start=start)]
        num_bytes = read_parts(tmp_path / "f", parts, threads=3)
        assert torch.equal(target, expected.to(target_dtype))
        assert num_bytes == expected.numel() * dtype.itemsize, "read more than the part"


def test_a_target_with_gaps(tmp_path: Path):
    source = torch.randn(9, 4)
    offset = write(tmp_path / "f", source)[0]
    target = torch.zeros(4, 9).t()
    read_parts(tmp_path / "f", [part(source, offset, target)], threads=2)
    assert torch.equal(target, source)


def test_many_tensors_in_any_order(tmp_path: Path):
    sources = [torch.randn(50 + i).to(DTYPES[i % 2]) for i in range(40)]
    offsets = write(tmp_path / "f", *sources)
    targets = [torch.empty(s.shape, dtype=DTYPES[i % 3 % 2]) for i, s in enumerate(sources)]
    parts = [part(*each) for each in zip(sources, offsets, targets, strict=True)]
    read_parts(tmp_path / "f", parts[::-1], threads=2)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target, source.to(target.dtype))


@pytest.mark.parametrize("place", [0, 33, 79])
@pytest.mark.parametrize("target_dtype", DTYPES, ids=str)
def test_what_is_not_finite(tmp_path: Path, place: int, target_dtype: torch.dtype):
    source = torch.randn(80)
    source[place] = float("nan")
    offset = write(tmp_path / "f", source)[0]
    target = torch.empty(80, dtype=target_dtype)
    with pytest.raises(ModelFileError, match="f: the tensor t has values that are NaN or infinite"):
        read_parts(tmp_path / "f", [part(source, offset, target)], threads=2)


@pytest.mark.parametrize("target_dtype", DTYPES, ids=str)
def test_a_file_that_ends_early_and_one_that_is_gone(tmp_path: Path, target_dtype: torch.dtype):
    source = torch.randn(80)
    offset = write(tmp_path / "f", source)[0]
    os.truncate(tmp_path / "f", offset + 100)
    parts = [part(source, offset, torch.empty(80, dtype=target_dtype))]
    with pytest.raises(ModelFileError, match="f ends inside the tensor t: it is truncated"):
        read_parts(tmp_path / "f", parts, threads=2)
    with pytest.raises(ModelFileError, match="gone cannot be read: No such file"):
        read_parts(tmp_path / "gone", parts, threads=2)


def test_threads_are_shared_among_ranks():
    assert reading_threads(1) >= 2
    assert reading_threads(1000) == 2
