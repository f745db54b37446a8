import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from worker.layers.linear import Linear, OneDnnProduct, PlainProduct, fewest_rows, runs_on_onednn

CPU = torch.device("cpu")


def make(dtype: torch.dtype, *, bias: bool) -> tuple[Linear, torch.Tensor]:
    torch.manual_seed(0)
    linear = Linear(40, 24, bias=bias, dtype=dtype, device=CPU)
    weight = torch.randn(24, 40).to(dtype)
    linear.weight.copy_(weight)
    if linear.bias is not None:
        linear.bias.copy_(torch.randn(24))
    return linear, weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 33])
def test_prepared_product_equals_plain(dtype: torch.dtype, bias: bool, rows: int):
    linear, weight = make(dtype, bias=bias)
    x = torch.randn(rows, 40).to(dtype)
    expected = F.linear(x.double(), weight.double(), None if not bias else linear.bias.double())
    before = linear(x)
    linear.prepare()
    for y in (before, linear(x)):
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=5 * torch.finfo(dtype).eps)


def test_preparing_gives_the_weight_back():
    linear, _ = make(torch.float32, bias=False)
    linear.prepare()
    assert isinstance(linear._product, OneDnnProduct)
    assert linear.weight.numel() == 0


def test_a_weight_takes_memory_when_asked_for():
    linear = Linear(40, 24, bias=False, dtype=torch.float32, device=CPU)
    assert linear._weight is None
    with torch.inference_mode():
        weight = linear.weight
    assert weight.shape == (24, 40)
    assert not weight.is_inference()
    assert linear.weight is weight


def test_what_onednn_cannot_multiply_is_torchs():
    linear = Linear(4, 3, bias=False, dtype=torch.float64, device=CPU)
    linear.weight.fill_(1.0)
    linear.prepare()
    assert isinstance(linear._product, PlainProduct)
    assert linear(torch.ones(2, 4, dtype=torch.float64)).tolist() == [[4.0] * 3] * 2


def test_a_tied_weight_stays_with_its_owner():
    linear, _ = make(torch.float32, bias=False)
    table = torch.nn.Parameter(torch.randn(24, 40), requires_grad=False)
    linear.tie(table)
    x = torch.randn(2, 40)
    expected = F.linear(x, table)
    torch.testing.assert_close(linear(x), expected)
    linear.prepare()
    torch.testing.assert_close(linear(x), expected)
    assert table.shape == (24, 40)


def test_where_onednn_is_used():
    assert runs_on_onednn(CPU, torch.float32)
    assert not runs_on_onednn(CPU, torch.float64)
    assert not runs_on_onednn(torch.device("cuda"), torch.float32)
    assert fewest_rows(CPU, torch.float32) == 4
    assert fewest_rows(torch.device("cuda"), torch.bfloat16) == 1
