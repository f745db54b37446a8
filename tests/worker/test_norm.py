import pytest
import torch

from worker.layers.norm import RMSNorm

CPU = torch.device("cpu")


def make(dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(48, 1e-3, dtype=dtype, device=CPU)
    norm.weight.copy_(torch.linspace(0.5, 2.0, 48))
    return norm


def expected(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    x = x.double()
    mean_square = x.square().mean(-1, keepdim=True)
    return x / (mean_square + 1e-3).sqrt() * norm.weight.double()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 1e3])
def test_both_ways_agree(dtype: torch.dtype, tolerance: float, scale: float):
    torch.manual_seed(0)
    norm = make(dtype)
    x = (torch.randn(5, 48) * scale).to(dtype)
    before = norm(x)
    norm.prepare()
    for y in (before, norm(x)):
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), expected(x, norm), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("prepared", [False, True])
def test_a_residual_in_float32_is_rounded_once(prepared: bool):
    norm = make(torch.bfloat16)
    if prepared:
        norm.prepare()
    x, residual = torch.randn(3, 48).bfloat16(), torch.randn(3, 48)
    total = residual + x
    normed, residual = norm.add(x, residual)
    assert torch.equal(residual, total)
    assert normed.dtype == torch.bfloat16
    torch.testing.assert_close(normed.double(), expected(total, norm), rtol=2**-8, atol=0)


def test_add():
    norm = make(torch.float32)
    norm.prepare()
    x, residual = torch.randn(3, 48), torch.randn(3, 48)
    total = x + residual
    normed, residual = norm.add(x, residual)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(normed, norm(total))


def test_nan_stays_in_its_row():
    norm = make(torch.float32)
    norm.prepare()
    x = torch.ones(2, 48)
    x[1, 3] = float("nan")
    y = norm(x)
    assert y[0].isfinite().all()
    assert y[1].isnan().all()
