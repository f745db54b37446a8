"""Weights from a GGUF file, dequantised by the `gguf` package some rows at a time.

Threads read and dequantise while the calling one copies into the model. A rank reads its rows
only; where it wants columns it reads whole rows, for blocks of quantised numbers do not end where
shards do. Plain numbers are read like safetensors' (`worker.tensor_reader`).

GGUF stores the rows of Llama's query and key projections with the two halves of each head
interleaved, as the original rotary layout wants them; here they are put back into halves. Other
architectures' are stored as they are.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from protocol.errors import ModelFileError
from worker.finite import all_finite
from worker.gguf_file import GgufHeader, GgufTensor
from worker.gguf_names import gguf_name
from worker.gguf_rope import ROPE_TENSORS
from worker.huge_pages import advise_huge_pages
from worker.tensor_reader import (
    StoredPart,
    finish,
    not_finite,
    open_to_read,
    read_exactly,
    read_parts,
    reading_pool,
)
from worker.weights import Weight

_PLAIN = {
    gguf.GGMLQuantizationType.F32: torch.float32,
    gguf.GGMLQuantizationType.F16: torch.float16,
    gguf.GGMLQuantizationType.BF16: torch.bfloat16,
}
READABLE = (
    *_PLAIN,
    gguf.GGMLQuantizationType.Q8_0,
    gguf.GGMLQuantizationType.Q4_0,
    gguf.GGMLQuantizationType.Q4_1,
    gguf.GGMLQuantizationType.Q5_0,
    gguf.GGMLQuantizationType.Q5_1,
    gguf.GGMLQuantizationType.Q2_K,
    gguf.GGMLQuantizationType.Q3_K,
    gguf.GGMLQuantizationType.Q4_K,
    gguf.GGMLQuantizationType.Q5_K,
    gguf.GGMLQuantizationType.Q6_K,
    gguf.GGMLQuantizationType.IQ4_NL,
    gguf.GGMLQuantizationType.IQ4_XS,
)
_PIECE_NUMBERS = 1 << 18
"""Numbers dequantised at a time: few enough to stay in a core's cache, with what they pass by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a weight's numbers are in the file, and in what order."""

    weight: Weight
    name: str
    """GGUF's."""
    tensor: GgufTensor
    kind: gguf.GGMLQuantizationType
    num_bytes: int
    head_dim: int | None
    """Rows of a head, where each head's halves are interleaved."""

    @property
    def is_plain(self) -> bool:
        return self.kind in _PLAIN and self.head_dim is None and not self.weight.offset

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield (first, last) rows of the target to dequantise at a time, whole heads of them.

        A vector is one piece: its blocks may lie across the ends of shards.
        """
        shape = self.weight.target.shape
        if len(shape) == 1:
            yield 0, shape[0]
            return
        unit = self.head_dim or 1
        step = max(1, _PIECE_NUMBERS // math.prod(self.tensor.shape[1:]) // unit) * unit
        for first in range(0, shape[0], step):
            yield first, min(first + step, shape[0])


def load_gguf(
    header: GgufHeader,
    weights: Sequence[Weight],
    *,
    head_dim: int,
    ignored: frozenset[str],
    threads: int,
) -> int:
    """Fill weights from a GGUF file by some threads and return the bytes read.

    Raises ModelFileError naming file and tensor.
    """
    family = str(header.metadata["general.architecture"])
    places = [_place(header, family, weight, head_dim) for weight in weights]
    known = {
        *ROPE_TENSORS,
        *(place.name for place in places),
        *(gguf_name(name, family) for name in ignored),
    }
    for name in sorted(header.tensors.keys() - known):
        raise ModelFileError(f"{header.path}: the tensor {name} is not part of this model")
    parts = [_stored_part(place) for place in places if place.is_plain]
    num_bytes = read_parts(header.path, parts, threads=threads)
    quantised = [place for place in places if not place.is_plain]
    return num_bytes + _dequantise(header, quantised, threads)


def _place(header: GgufHeader, family: str, weight: Weight, head_dim: int) -> _Place:
    name = gguf_name(weight.name, family)
    tensor = header.tensors.get(name)
    if tensor is None:
        raise ModelFileError(f"{header.path}: the tensor {name} is missing")
    num_bytes = _checked_bytes(header, weight, name, tensor)
    is_interleaved = family == "llama" and (".q_proj." in weight.name or ".k_proj." in weight.name)
    return _Place(
        weight=weight,
        name=name,
        tensor=tensor,
        kind=gguf.GGMLQuantizationType(tensor.type_id),
        num_bytes=num_bytes,
        head_dim=head_dim if is_interleaved else None,
    )


def _stored_part(place: _Place) -> StoredPart:
    return StoredPart(
        name=place.name,
        offset=place.tensor.offset,
        dtype=_PLAIN[place.kind],
        shape=place.tensor.shape,
        dim=place.weight.dim,
        start=place.weight.start,
        target=place.weight.target,
    )


def _dequantise(header: GgufHeader, places: Sequence[_Place], threads: int) -> int:
    """Fill weights that are not stored as the numbers they are; return the bytes read."""
    for place in places:
        advise_huge_pages(place.weight.target)
    descriptor = open_to_read(header.path)
    try:
        with reading_pool(threads) as pool:
            futures = [
                pool.submit(_dequantise_rows, header.path, descriptor, place, first, last)
                for place in sorted(places, key=lambda place: place.tensor.offset)
                for first, last in place.pieces()
            ]
            return finish(futures)
    finally:
        os.close(descriptor)


@torch.inference_mode()
def _dequantise_rows(path: Path, descriptor: int, place: _Place, first: int, last: int) -> int:
    """Fill some rows of a weight's target and return the bytes read. Raises ModelFileError."""
    weight, shape = place.weight, place.tensor.shape
    if len(shape) == 1:
        begin, count = 0, place.num_bytes
    else:
        row = place.num_bytes // shape[0]
        begin = (first + (weight.start if weight.dim == 0 else 0)) * row
        count = (last - first) * row
    data = np.empty(count, np.uint8)
    read_exactly(descriptor, path, place.name, data.data, place.tensor.offset + begin)
    rows = data if len(shape) == 1 else data.reshape(last - first, *shape[1:-1], -1)
    values = torch.from_numpy(gguf.dequantize(rows, place.kind))
    if not all_finite(values.view(-1).view(torch.uint8).numpy(), torch.float32):
        raise not_finite(path, place.name)
    if place.head_dim is not None:
        values = halves_from_pairs(values, place.head_dim)
    if len(shape) == 1 or weight.dim:
        values = values.narrow(weight.dim, weight.start, weight.target.shape[weight.dim])
    weight.target[first:last].copy_(values - weight.offset if weight.offset else values)
    return count


def halves_from_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder each head's rows from (a0, b0, a1, b1, …) to (a0, a1, …, b0, b1, …)."""
    pairs = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _checked_bytes(header: GgufHeader, weight: Weight, name: str, tensor: GgufTensor) -> int:
    """Return a tensor's size in the file, having checked shape, format and bounds."""
    if tensor.shape != weight.shape:
        raise ModelFileError(
            f"{header.path}: the tensor {name} has shape {list(tensor.shape)}; the header's "
            f"metadata makes it {list(weight.shape)}"
        )
    try:
        kind = gguf.GGMLQuantizationType(tensor.type_id)
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise ModelFileError(
            f"{header.path}: the tensor {name} has the unknown storage type {tensor.type_id}; "
            f"readable are {_readable()}"
        ) from error
    if kind not in READABLE:
        raise ModelFileError(
            f"{header.path}: the tensor {name} is stored as {kind.name}; readable are {_readable()}"
        )
    if tensor.shape[-1] % block_size:
        raise ModelFileError(
            f"{header.path}: rows of the tensor {name} are not whole blocks of {block_size}"
        )
    num_bytes: int = math.prod(tensor.shape) // block_size * block_bytes
    if tensor.offset + num_bytes > header.file_bytes:
        raise ModelFileError(f"{header.path} ends inside {name}; it is truncated")
    return num_bytes


def _readable() -> str:
    return ", ".join(kind.name for kind in READABLE)
