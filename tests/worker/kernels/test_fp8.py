import pytest
import torch

pytest.importorskip("triton")

from tests.worker.kernels.closeness import DTYPES
from worker.kernels.fp8 import quantize_rows
from worker.layers import fp8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 5), (3, 576), (2, 1024)], ids=str)
def test_as_plain_torch(shape: tuple[int, int], dtype: torch.dtype, device: torch.device):
    torch.manual_seed(0)
    x = (torch.randn(shape) * torch.logspace(-2, 2, shape[1])).to(device, dtype)
    x[-1, 2] = 0.0
    codes, scales = quantize_rows(x)
    expected, expected_scales = fp8.quantize_rows(x)
    assert torch.equal(scales, expected_scales)
    if device.type == "cuda":
        assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    else:
        # The interpreter's conversion does not round as a GPU's: it may miss by one number, which
        # is an eighth, or a fraction of the least one.
        close = torch.isclose(codes.float(), expected.float(), rtol=0.5, atol=2**-8)
        assert close.all()


def test_rows_may_lie_apart_and_be_zero(device: torch.device):
    apart = torch.full((3, 64), torch.nan, device=device)[:, :32]
    apart.copy_(torch.tensor([0.0, 1.0, -448.0])[:, None])
    codes, scales = quantize_rows(apart)
    assert codes.float()[:, 7].tolist() == [0.0, 448.0, -448.0]
    assert scales[1:, 0].tolist() == [pytest.approx(1 / 448), 1.0]


def test_nan_stays(device: torch.device):
    x = torch.ones(2, 8, device=device)
    x[0, 3] = torch.nan
    codes, _ = quantize_rows(x)
    assert codes[0, 3].float().isnan() or device.type == "cpu"  # the interpreter makes it 448
    assert codes[1].float().tolist() == [448.0] * 8
