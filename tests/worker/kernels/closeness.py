"""Kernels are held to float64: they may be at most twice as far off as plain torch is."""

import pytest
import torch

DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(
        torch.bfloat16,  # the interpreter rounds it in its own way
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
        ],
    ),
]


def gpu_only(test):
    """Mark a test that needs a GPU."""
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    return pytest.mark.gpu(skip(test))


def assert_as_close(result, plain, exact):
    """Fail if `result` is more than twice as far from `exact`, float64, as `plain` is."""
    assert result.shape == plain.shape == exact.shape
    assert result.dtype == plain.dtype
    error, allowed = _error(result, exact), _error(plain, exact)
    # In float32 a plain result may be right by luck to the last bit of nearly every number.
    floor = torch.finfo(torch.float32).eps / 2
    assert error <= 2 * allowed + floor, f"{error:.3g} from float64, plain torch {allowed:.3g}"


def _error(values, exact):
    assert values.isfinite().all()
    return float((values.double() - exact).norm() / exact.norm().clamp(min=1e-30))
