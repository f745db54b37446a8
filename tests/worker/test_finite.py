import pytest
import torch

from worker.finite import all_finite

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def finite(values: torch.Tensor) -> bool:
    return all_finite(values.view(torch.uint8).numpy(), values.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_nan_and_infinity_are_found(dtype: torch.dtype):
    limits = torch.finfo(dtype)
    fine = [0.0, -0.0, 1.0, -1.0, limits.max, limits.min, limits.tiny, -limits.tiny]
    values = torch.tensor(fine * 40, dtype=dtype)
    assert finite(values)
    assert finite(values.clamp(-1.9, 1.9))
    for bad in (float("inf"), float("-inf"), float("nan"), -float("nan")):
        for place in (0, 101, len(values) - 1):
            broken = values.clone()
            broken[place] = bad
            assert not finite(broken), f"{bad} at {place}"


@pytest.mark.parametrize("bits", [0x7F81, 0x7FFF, 0xFF80, 0xFFFF])
def test_every_kind_of_nan(bits: int):
    pair = torch.tensor([0, bits - (1 << 16 if bits >> 15 else 0)], dtype=torch.int16)
    assert not finite(pair.view(torch.bfloat16))


def test_integers_and_nothing_are_finite():
    assert finite(torch.full((8,), -1, dtype=torch.int8))
    assert finite(torch.empty(0))


def test_eight_bits_have_nan_alone():
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    for code in every.tolist():
        value = torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn)
        assert finite(value) == bool(value.float().isfinite())
