import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tests.worker.kernels.closeness import gpu_only
from worker.layers.fp8 import E4M3_MAX, Fp8Weight, quantize_rows
from worker.layers.linear import ADDS_FROM_ROWS, Linear

CPU = torch.device("cpu")


def make(dtype: torch.dtype, *, bias: bool, device: torch.device = CPU) -> Linear:
    torch.manual_seed(0)
    linear = Linear(64, 48, bias=bias, dtype=dtype, device=device)
    linear.weight.copy_(torch.randn(48, 64) * torch.logspace(-3, 3, 48)[:, None])
    if linear.bias is not None:
        linear.bias.copy_(torch.randn(48))
    return linear


def exact_product(x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the product of the codes in float64."""
    codes, scales = quantize_rows(x)
    rows = codes.double() * scales.double()
    channels = weight.codes.double() * weight.scales.double()[:, None]
    return F.linear(rows, channels, None if bias is None else bias.double())


def test_codes_and_scales():
    x = torch.tensor([[0.0, 0.0, 0.0], [448.0, -1.0625, 17.0], [0.001, -0.002, 0.0]])
    codes, scales = quantize_rows(x)
    assert codes.float()[0].tolist() == [0, 0, 0]
    # Between 1 and 1.125, and between 16 and 18: to the even one.
    assert codes.float()[1].tolist() == [448, -1, 16]
    assert scales[1].item() == 1.0
    assert codes.float()[2].tolist() == [224, -448, 0]
    assert scales[2].item() == pytest.approx(0.002 / E4M3_MAX)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_with_its_row(bad: float):
    codes, _ = quantize_rows(torch.tensor([[1.0, bad], [1.0, 2.0]]))
    assert codes[0].float().isnan().any()
    assert codes[1].float().tolist() == [224, 448]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
def test_the_product_is_that_of_the_codes(dtype: torch.dtype, bias: bool, rows: int):
    linear = make(dtype, bias=bias)
    whole = linear.weight.double()
    weight = Fp8Weight.quantize(linear.weight)
    linear.quantize(weight)
    assert linear.weight.numel() == 0
    linear.prepare()
    x = torch.randn(rows, 64).to(dtype)
    y = linear(x)
    assert y.dtype == dtype
    exact = exact_product(x, weight, linear.bias)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), exact, rtol=eps, atol=float(exact.std()) * 1e-6)
    # And it is what was to be multiplied, but for 3 bits of fraction on either side.
    true = F.linear(x.double(), whole, None if linear.bias is None else linear.bias.double())
    assert (y.double() - true).norm() < 0.05 * true.norm()


def test_a_weight_is_quantised_piece_by_piece(monkeypatch: pytest.MonkeyPatch):
    weight = torch.randn(48, 64)
    whole = Fp8Weight.quantize(weight)
    monkeypatch.setattr("worker.layers.fp8._NUMBERS_AT_ONCE", 7 * 64 + 5)
    pieces = Fp8Weight.quantize(weight)
    assert torch.equal(pieces.codes.float(), whole.codes.float())
    assert torch.equal(pieces.scales, whole.scales)


def test_shards_have_scales_of_their_own():
    torch.manual_seed(0)
    weight = torch.randn(16, 64)
    weight[:, :32] *= 100
    right = Fp8Weight.quantize(weight[:, 32:])
    assert torch.equal(right.scales, weight[:, 32:].abs().amax(1) / E4M3_MAX)


def test_products_that_keep_their_dtype():
    head = Linear(16, 16, bias=False, dtype=torch.float32, device=CPU, keeps_dtype=True)
    with pytest.raises(AssertionError, match="not to be quantised"):
        head.quantize(Fp8Weight.empty(16, 16, CPU))


@gpu_only
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 17, 64, 129, ADDS_FROM_ROWS])
def test_on_a_gpu(rows: int, bias: bool):
    device = torch.device("cuda")
    linear = make(torch.bfloat16, bias=bias, device=device)
    weight = Fp8Weight.quantize(linear.weight)
    linear.quantize(weight)
    linear.prepare()
    x = torch.randn(rows, 64, device=device).to(torch.bfloat16)
    exact = exact_product(x, weight, linear.bias)
    torch.testing.assert_close(
        linear(x).double(), exact, rtol=2**-8, atol=float(exact.std()) * 1e-3
    )
    residual = torch.randn(rows, 48, device=device).to(torch.bfloat16)
    assert not linear.add_to(residual, x)


@gpu_only
def test_in_a_graph():
    device = torch.device("cuda")
    linear = make(torch.bfloat16, bias=False, device=device)
    linear.quantize(Fp8Weight.quantize(linear.weight))
    linear.prepare()
    x = torch.randn(8, 64, device=device).to(torch.bfloat16)
    expected = linear(x)
    graph = torch.cuda.CUDAGraph()
    taken = torch.zeros_like(x)
    with torch.cuda.graph(graph):
        y = linear(taken)
    taken.copy_(x)
    graph.replay()
    assert torch.equal(y, expected)
