import numpy as np
import pytest
import torch

from worker.upload import upload, upload_bytes

CPU = torch.device("cpu")
ARRAYS = (
    np.array([3, -(2**63), 2**63 - 1], dtype=np.int64),
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.zeros((0, 4), dtype=np.int32),
    np.arange(10, dtype=np.int32)[::2],
)


def check(tensors: list[torch.Tensor]) -> None:
    for array, tensor in zip(ARRAYS, tensors, strict=True):
        assert tensor.shape == array.shape
        assert tensor.dtype == (torch.int64 if array.itemsize == 8 else torch.int32)
        assert tensor.tolist() == array.tolist()


def test_values_types_and_shapes():
    check(upload(ARRAYS, CPU))


def test_into_a_block_that_is_there():
    size = upload_bytes([array.nbytes for array in ARRAYS])
    assert size == 32 + 32 + 0 + 32
    block = torch.full((size + 16,), 7, dtype=torch.uint8)
    check(upload(ARRAYS, CPU, into=block))
    assert block[size:].tolist() == [7] * 16
    # The same sizes in the same order have the same places.
    tensors = upload(ARRAYS, CPU, into=block)
    upload([array + 1 for array in ARRAYS], CPU, into=block)
    assert tensors[3].tolist() == [1, 3, 5, 7, 9]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_to_a_gpu():
    check(upload(ARRAYS, torch.device("cuda")))
