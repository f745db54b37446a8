import pytest
import torch

from benchmarks.attention_cases import plain_attention
from worker.attention.base import LayerAttention
from worker.attention.sinks import share_with_sinks_


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_if_the_sink_had_been_in_the_softmax(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 8, generator=generator).to(dtype)
    contents = torch.randn(5, 2, 2, 8, generator=generator).to(dtype)
    sinks = torch.tensor([-40.0, -1.0, 1.0, 40.0])
    how = LayerAttention(0.5, None)
    without = plain_attention(query, contents, 4, torch.float64, how=how)
    expected = plain_attention(query, contents, 4, torch.float64, how=how, sinks=sinks)
    keys = contents[:, 0].double().repeat_interleave(2, dim=1)
    lse = torch.einsum("hd,nhd->hn", query[0].double(), keys).mul(0.5).logsumexp(-1)
    output = without.view(1, 4, 8).to(dtype)
    shared = share_with_sinks_(output, lse.float()[None], sinks)
    assert shared.data_ptr() == output.data_ptr()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(shared.double().flatten(1), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("lse", [float("inf"), float("-inf")])
def test_a_row_of_no_tokens_stays_zero(lse: float):
    output = share_with_sinks_(torch.zeros(1, 2, 8), torch.full((1, 2), lse), torch.ones(2))
    assert torch.equal(output, torch.zeros(1, 2, 8))
