import pytest
import torch

from tests.worker.kernels.closeness import DTYPES, assert_as_close
from worker.kernels.norm import add_rms_norm, rms_norm

EPS = 1e-6
SHAPES = [
    *((rows, 576) for rows in (1, 2, 7, 8, 9, 31, 33, 255, 256)),
    (3, 1024),
    (2, 4096),
    (1, 5),
]


def plain(x, weight):
    """Hugging Face's norm, which rounds once more."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return normed.to(x.dtype) * weight


def exact(x, weight):
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def make(shape, dtype, device):
    generator = torch.Generator().manual_seed(shape[0])
    numbers = [torch.randn(size, generator=generator) for size in (shape, shape, shape[-1])]
    return [tensor.to(device, dtype) for tensor in numbers]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_alone(shape, dtype, device):
    x, _, weight = make(shape, dtype, device)
    before = x.clone()
    result = rms_norm(x, weight, EPS, weight.dtype)
    assert_as_close(result, plain(x, weight), exact(x, weight))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_after_adding(shape, dtype, device):
    delta, residual, weight = make(shape, dtype, device)
    total = residual + delta
    result = add_rms_norm(delta, residual, weight, EPS, weight.dtype)
    assert torch.equal(residual, total)
    assert_as_close(result, plain(total, weight), exact(total, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES[::4], ids=str)
def test_of_a_residual_in_float32(shape, dtype, device):
    delta, residual, weight = make(shape, dtype, device)
    residual = residual.float() * 1.0009765625  # of which the dtype has no such number
    total = residual + delta
    alone = rms_norm(total, weight, EPS, weight.dtype)
    result = add_rms_norm(delta, residual, weight, EPS, weight.dtype)
    assert torch.equal(residual, total)
    assert torch.equal(result, alone)
    assert_as_close(result, plain(total.to(dtype), weight), exact(total, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_zeros_and_of_tiny_numbers_stay_finite(dtype, device):
    x = torch.zeros(2, 576, dtype=dtype, device=device)
    x[1] = torch.finfo(dtype).tiny
    result = rms_norm(x, torch.ones(576, dtype=dtype, device=device), EPS, dtype)
    assert result.isfinite().all()
    assert not result[0].any()


def test_no_rows(device):
    x = torch.empty(0, 576, device=device)
    assert rms_norm(x, torch.ones(576, device=device), EPS, torch.float32).shape == (0, 576)
