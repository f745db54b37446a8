import pytest
import torch

from worker.layers.head_norm import HeadNorm
from worker.weights import head_norm_weights

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_keys_have_a_weight_each(dtype: torch.dtype):
    torch.manual_seed(0)
    norm = HeadNorm(4, 2, 8, 1e-5, dtype=dtype, device=CPU)
    query_weight, key_weight = torch.randn(2, 8).to(dtype)
    weights = list(head_norm_weights(norm, "q_norm", "k_norm"))
    assert [weight.name for weight in weights] == ["q_norm.weight", "k_norm.weight"]
    assert all(weight.is_norm for weight in weights)
    weights[0].fill(query_weight)
    weights[1].fill(key_weight)
    norm.prepare()

    heads = torch.randn(3, 8, 8).mul(5).to(dtype)
    before = heads.clone()
    norm.normalize_(heads[:, :6])
    assert torch.equal(heads[:, 6:], before[:, 6:])
    expected = [
        torch.nn.functional.rms_norm(part.float(), (8,), weight.float(), 1e-5).to(dtype)
        for part, weight in ((before[:, :4], query_weight), (before[:, 4:6], key_weight))
    ]
    tolerance = 1e-6 if dtype == torch.float32 else 0.04
    torch.testing.assert_close(heads[:, :6], torch.cat(expected, 1), rtol=0, atol=tolerance)


def test_zeros_stay_zeros():
    norm = HeadNorm(1, 1, 4, 1e-6, dtype=torch.float32, device=CPU)
    norm.weight.fill_(2.0)
    norm.prepare()
    heads = torch.zeros(1, 2, 4)
    norm.normalize_(heads)
    assert heads.eq(0).all()
