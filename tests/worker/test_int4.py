import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from worker.layers.int4 import Int4Weight, OrderedProduct, SharedScratch, pack, unpack

CPU = torch.device("cpu")


def make(dtype: torch.dtype = torch.float32) -> Int4Weight:
    torch.manual_seed(0)
    return Int4Weight.quantize(torch.randn(24, 64).to(dtype), 32, SharedScratch(dtype, CPU))


def test_words():
    codes = torch.arange(16, dtype=torch.uint8).repeat(3, 2)
    words = pack(codes)
    assert words.shape == (3, 4)
    # Lowest bits first.
    assert words[0, 0].item() == 0x76543210
    assert words[0, 1].item() == 0xFEDCBA98 - (1 << 32)
    assert torch.equal(unpack(words).flatten(1), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_product_is_that_of_the_values(dtype: torch.dtype):
    weight = make(dtype)
    values = weight.values()
    assert (weight.group, values.shape, values.dtype) == (32, (24, 64), dtype)
    x, bias = torch.randn(3, 64).to(dtype), torch.randn(24).to(dtype)
    y = weight.product(bias, dtype)(x)
    exact = F.linear(x.double(), values.double(), bias.double())
    torch.testing.assert_close(y.double(), exact, rtol=1e-2, atol=5 * torch.finfo(dtype).eps)


def test_rounding_is_to_the_nearest_of_sixteen():
    torch.manual_seed(0)
    wide = torch.randn(24, 64)
    weight = Int4Weight.quantize(wide, 32, SharedScratch(wide.dtype, CPU))
    step = weight.scales.float().repeat_interleave(32, 1)
    assert ((weight.values() - wide).abs() <= 0.6 * step).all()


def test_inputs_in_an_order():
    weight = make()
    weight.order = torch.randperm(64)
    product = weight.product(None, torch.float32)
    assert isinstance(product, OrderedProduct)
    x = torch.randn(2, 64)
    expected = torch.zeros(2, 24)
    for place, source in enumerate(weight.order.tolist()):
        expected += x[:, source, None] * weight.values()[:, place]
    torch.testing.assert_close(product(x), expected)


def test_groups_are_whole():
    scratch = SharedScratch(torch.float32, CPU)
    with pytest.raises(AssertionError, match="multiple of 16"):
        Int4Weight.empty(8, 48, 24, dtype=torch.float32, device=CPU, scratch=scratch)


def test_scratch_is_as_large_as_the_largest_needs():
    scratch = SharedScratch(torch.float16, CPU)
    scratch.reserve(12)
    scratch.reserve(6)
    assert scratch.take(3, 4).shape == (3, 4)
    assert scratch.take(2, 3).data_ptr() == scratch.take(3, 4).data_ptr()
    with pytest.raises(AssertionError, match="all reserve before"):
        scratch.reserve(20)
