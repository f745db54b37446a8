import pytest
import torch
import torch.nn.functional as F  # noqa: N812

pytest.importorskip("triton")

from tests.worker.kernels.closeness import DTYPES, assert_as_close, gpu_only
from worker.kernels.int4 import (
    Int4Setting,
    allocate_scratch,
    choose_setting,
    multiply_out,
    product,
)
from worker.kernels.products import Scratch
from worker.layers.int4 import FEW_ROWS, Int4Weight, SharedScratch

OUTPUTS = 40
"""They fill no whole number of blocks."""


def draw(rows: int, inputs: int, group: int, dtype: torch.dtype, device: torch.device):
    torch.manual_seed(rows)
    x = torch.randn(rows, inputs, device=device).to(dtype)
    wide = torch.randn(OUTPUTS, inputs, device=device).to(dtype)
    weight = Int4Weight.quantize(wide, group, SharedScratch(dtype, device))
    # GPTQ's first format has zero points of up to 16.
    weight.zeros[0, 0] = 16
    return x, weight, torch.randn(OUTPUTS, device=device).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "inputs", "group"), [(2, 256, 128), (16, 192, 32), (37, 96, 96), (3, 128, 64)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_as_close_as_plain(
    rows: int, inputs: int, group: int, has_bias: bool, dtype: torch.dtype, device: torch.device
):
    x, weight, bias = draw(rows, inputs, group, dtype, device)
    offset = bias if has_bias else None
    y = product(x, weight, offset, allocate_scratch(device), dtype)
    values = weight.values()
    exact = F.linear(x.double(), values.double(), None if offset is None else offset.double())
    assert_as_close(y, F.linear(x, values, offset), exact)


@pytest.mark.slow
@pytest.mark.parametrize("split", [1, 3])
def test_partial_sums(split: int, device: torch.device):
    x, weight, bias = draw(20, 256, 32, torch.float32, device)
    setting = Int4Setting(16, 16, 32, split)
    scratch = Scratch.allocate(
        setting.num_sums(20, OUTPUTS), setting.num_tiles(20, OUTPUTS), device
    )
    y = product(x, weight, bias, scratch, x.dtype, setting)
    torch.testing.assert_close(y, F.linear(x, weight.values(), bias), rtol=1e-4, atol=1e-4)
    assert not scratch.tickets.any()


@pytest.mark.slow
def test_a_row_depends_on_no_other(device: torch.device):
    x, weight, _ = draw(8, 256, 64, torch.float16, device)
    scratch = allocate_scratch(device)
    whole = product(x, weight, None, scratch, x.dtype)
    others = x.clone()
    others[0] = torch.nan
    others[2:] = 1e4
    assert torch.equal(product(others, weight, None, scratch, x.dtype)[1], whole[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "group"), [(256, 128), (96, 32), (48, 48)])
def test_multiplied_out(inputs: int, group: int, dtype: torch.dtype, device: torch.device):
    _, weight, _ = draw(1, inputs, group, dtype, device)
    out = torch.full((OUTPUTS, inputs), torch.nan, dtype=dtype, device=device)
    multiply_out(weight, out)
    assert torch.equal(out, weight.values())


def test_settings():
    assert choose_setting(1, 24_576, 4096, 128) == Int4Setting(32, 16, 128, 1)
    assert choose_setting(33, 1024, 4096, 32) == Int4Setting(32, 64, 32, 8)
    assert choose_setting(64, 32, 256, 2752) == Int4Setting(32, 64, 64, 2)
    with pytest.raises(AssertionError, match="multiple of 16"):
        choose_setting(1, 32, 96, 24)


@gpu_only
@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1, 600])
@pytest.mark.parametrize("group", [32, 128])
def test_whole_product_on_a_gpu(rows: int, group: int, device: torch.device):
    x, weight, bias = draw(rows, 1024, group, torch.bfloat16, device)
    multiply = weight.product(bias, x.dtype)
    values = weight.values()
    exact = F.linear(x.double(), values.double(), bias.double())
    assert_as_close(multiply(x), F.linear(x, values, bias), exact)


@gpu_only
@pytest.mark.parametrize("rows", [8, 100])
def test_in_a_graph(rows: int, device: torch.device):
    x, weight, _ = draw(rows, 1024, 128, torch.bfloat16, device)
    multiply = weight.product(None, x.dtype)
    expected = multiply(x)
    taken, graph = torch.zeros_like(x), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = multiply(taken)
    taken.copy_(x)
    graph.replay()
    graph.replay()
    assert torch.equal(y, expected)
