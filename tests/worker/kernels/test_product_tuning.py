import pytest
import torch

pytest.importorskip("triton")

from worker.product_tuning import check_kernels


@pytest.mark.slow
def test_every_kind_of_kernel_is_right(device: torch.device):
    assert check_kernels(device) == 0
