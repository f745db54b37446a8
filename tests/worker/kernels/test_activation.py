import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tests.worker.kernels.closeness import DTYPES, assert_as_close
from worker.kernels.activation import gelu_multiply, silu_multiply

SHAPES = [
    *((rows, 1536) for rows in (1, 2, 7, 8, 9, 31, 33)),
    (255, 576),
    (256, 576),
    (3, 1024),
    (2, 4096),
    (2, 5),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_close(rows, size, dtype, device):
    generator = torch.Generator().manual_seed(rows)
    gate_up = torch.randn(rows, 2 * size, generator=generator).mul(3).to(device, dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    result = silu_multiply(gate_up)
    assert_as_close(result, F.silu(gate) * up, F.silu(gate.double()) * up.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu(dtype, device):
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(5, 2 * 1100, generator=generator).mul(3).to(device, dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    expected = F.gelu(gate, approximate="tanh") * up
    exact = F.gelu(gate.double(), approximate="tanh") * up.double()
    assert_as_close(gelu_multiply(gate_up), expected, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_gates_neither_overflow_nor_vanish(dtype, device):
    gate = torch.tensor([[200.0, -200.0, 0.0]], dtype=dtype, device=device)
    result = silu_multiply(torch.cat((gate, torch.full_like(gate, 2.0)), dim=1))
    assert result.tolist() == [[400.0, 0.0, 0.0]]
    result = gelu_multiply(torch.cat((gate, torch.full_like(gate, 2.0)), dim=1))
    assert result.tolist() == [[400.0, 0.0, 0.0]]
