import pytest
import torch

pytest.importorskip("triton")

from tests.worker.kernels.closeness import DTYPES
from worker import kv_rounding
from worker.kernels.fp8 import quantize_rows, round_to_e4m3
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 3, 16), (5, 1, 9, 64)], ids=str)
def test_rounded_as_by_torch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
    torch.manual_seed(0)
    wider = torch.randn(*shape[:-2], shape[-2] + 2, shape[-1]) * torch.logspace(-3, 3, shape[-1])
    x = wider.to(device, dtype)[..., :-2, :]  # heads of a row that has others behind them
    rounded, expected = round_to_e4m3(x), kv_rounding.round_to_e4m3(x)
    assert rounded.shape == x.shape
    assert rounded.is_contiguous()
    if device.type == "cuda":
        assert torch.equal(rounded.view(torch.uint8), expected.view(torch.uint8))
    else:  # as above
        close = torch.isclose(rounded.float(), expected.float(), rtol=0.5, atol=2**-8)
        assert close.all()
    assert rounded.float().abs().max() == 448


def test_rounding_shows_what_is_not_finite(device: torch.device):
    x = torch.tensor([[float("nan"), float("inf"), float("-inf"), 500.0]], device=device)
    rounded = round_to_e4m3(x).float()[0]
    if device.type == "cuda":  # the interpreter has no NaN of this type
        assert rounded[:3].isnan().all()
    assert rounded[3] == 448
