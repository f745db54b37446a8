"""Arrays to the device, all of a step in one copy.

Each copy costs microseconds of host time and, from memory that the device cannot read by itself, a
wait for everything before it. So a step's arrays are laid side by side in one pinned block:

    host     positions │ lengths │ block tables │ …      every one aligned to 16 bytes
                 └──────────┬─ one copy, not waited for
    device   positions │ lengths │ block tables │ …      views of one block

torch's allocator gives a pinned block to somebody else only once the copy from it has been done.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.step_rows import Int32Array

Int64Array = NDArray[np.int64]

_ALIGNMENT = 16


def upload(
    arrays: Sequence[Int32Array | Int64Array],
    device: torch.device,
    *,
    into: Tensor | None = None,
) -> list[Tensor]:
    """Return the arrays as tensors of the same shapes and types on the device.

    On CPU they share the arrays' memory. Elsewhere they are views of `into`, a [bytes] uint8 tensor
    on the device that must be large enough (`upload_bytes`), or of fresh memory; the copy is in the
    current stream. Arrays of the same sizes in the same order get the same places.
    """
    if into is None and device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    size = upload_bytes([array.nbytes for array in arrays])
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    block = torch.empty(size, dtype=torch.uint8, device=device) if into is None else into[:size]
    host_bytes = host.numpy()
    tensors: list[Tensor] = []
    start = 0
    for array in arrays:
        end = start + array.nbytes
        host_bytes[start:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        dtype = torch.int64 if array.itemsize == 8 else torch.int32
        tensors.append(block[start:end].view(dtype).view(array.shape))
        start += _aligned(array.nbytes)
    block.copy_(host, non_blocking=True)
    return tensors


def upload_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes that arrays of these sizes, in bytes, take together."""
    return sum(map(_aligned, sizes))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
