import pytest
import torch
import torch.nn.functional as F  # noqa: N812

pytest.importorskip("triton")

from worker.layers.linear import Linear, PlainProduct
from worker.product_table import Gemv, ProductEntry, ProductTable, Tiles
from worker.tuned_products import TunedProduct, TunedProducts, scratch_sizes

TABLE = ProductTable(
    "any",
    "float16",
    {
        (24, 64): ProductEntry((1, 4, 20), (Gemv(4, 64, 1), None, Tiles(16, 16, 16, 4, 4, 2))),
        (32, 64): ProductEntry((1, 4), (None, None)),
        (48, 64): ProductEntry((1,), (Gemv(4, 128, 1),)),
    },
)


def make(outputs: int, device: torch.device, dtype=torch.float16, *, bias=False) -> Linear:
    torch.manual_seed(0)
    linear = Linear(64, outputs, bias=bias, dtype=dtype, device=device)
    linear.weight.copy_(torch.randn(outputs, 64))
    if linear.bias is not None:
        linear.bias.copy_(torch.randn(outputs))
    return linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 5, 20, 21])
def test_a_tuned_product_equals_plain(rows: int, bias: bool, device: torch.device):
    linear = make(24, device, bias=bias)
    x = torch.randn(rows, 64, device=device).half()
    expected = F.linear(x, linear.weight, linear.bias)
    linear.prepare(TunedProducts(TABLE, device))
    assert isinstance(linear._product, TunedProduct)
    torch.testing.assert_close(linear(x), expected, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("rows", [1, 20])
def test_a_product_may_be_left_unrounded(rows: int, device: torch.device):
    linear = make(24, device)
    x = torch.randn(rows, 64, device=device).half()
    tuned = TunedProducts(TABLE, device).choose(linear.weight, None, torch.float32)
    assert tuned is not None
    y = tuned(x)
    assert y.dtype == torch.float32
    exact = x.double() @ linear.weight.double().t()
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)
    assert [launch.arguments[3].dtype for launch in tuned.launches()] == [torch.float32] * 2


def test_what_the_table_knows_nothing_better_for(device: torch.device):
    products = TunedProducts(TABLE, device)
    for linear in (make(24, device, torch.float32), make(32, device), make(48, device)):
        assert products.choose(linear.weight, linear.bias, linear.weight.dtype) is None
    other = make(40, torch.device("cuda") if device.type == "cuda" else device, torch.float64)
    other.prepare(products)
    assert isinstance(other._product, PlainProduct)
    shifted = torch.randn(24 * 64 + 1, device=device).half()[1:].view(24, 64)
    assert (
        products.choose(shifted, None, torch.float16) is None
    )  # its rows do not start at 16 bytes


def test_scratch_is_that_of_the_largest_split():
    assert scratch_sizes(TABLE) == (2 * 2 * 4 * 16 * 16, 4)
    assert scratch_sizes(ProductTable("any", "float16", {})) == (0, 0)


def test_a_launch_of_each_kernel(device: torch.device):
    linear = make(24, device)
    tuned = TunedProducts(TABLE, device).choose(linear.weight, None, torch.float16)
    assert tuned is not None
    launches = tuned.launches()
    assert [launch.grid for launch in launches] == [(6,), (2, 2, 4)]
    for launch in launches:
        launch.kernel[launch.grid](*launch.arguments, **launch.options)
