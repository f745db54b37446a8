import pytest
import torch

from worker.kernels.routing import choose_experts, sort_by_expert
from worker.layers.experts import choose_routes

DTYPES = [torch.float32, torch.float16]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_renormalised", [False, True])
@pytest.mark.parametrize(("rows", "experts", "k"), [(3, 20, 3), (1, 128, 8)])
def test_chooses_as_torch_does(rows, experts, k, is_renormalised, dtype, device):
    torch.manual_seed(experts)
    scores = torch.randn(rows, experts, device=device).mul(3).to(dtype)
    bias = torch.randn(experts, device=device).to(dtype)
    for offset in (None, bias):
        chosen, weights = choose_experts(scores, offset, k, is_renormalised=is_renormalised)
        whole = scores.double() if offset is None else scores.double() + offset.double()
        probabilities = whole.softmax(dim=-1)
        expected, expected_ids = probabilities.topk(k, dim=-1)
        if is_renormalised:
            expected = expected / expected.sum(dim=-1, keepdim=True)
        assert chosen.dtype == torch.int32
        assert torch.equal(chosen.long(), expected_ids)
        torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)
        plain = choose_routes(whole.float(), k, is_renormalised=is_renormalised)
        assert torch.equal(plain.experts, expected_ids)
        torch.testing.assert_close(plain.weights.double(), expected, rtol=1e-5, atol=1e-7)


def test_a_row_without_numbers_goes_to_experts_that_exist(device):
    scores = torch.full((2, 5), torch.nan, device=device)
    scores[1] = torch.arange(5.0)
    experts, weights = choose_experts(scores, None, 2, is_renormalised=True)
    assert ((experts >= 0) & (experts < 5)).all()
    assert experts[1].tolist() == [4, 3]
    assert weights[1].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "k", "num_experts"),
    [(1, 1, 1), (9, 4, 5), (20, 8, 128), (600, 2, 20)],
)
def test_sorts_as_torch_does(rows, k, num_experts, device):
    torch.manual_seed(rows)
    experts = torch.randint(num_experts, (rows, k), dtype=torch.int32, device=device)
    order, counts = sort_by_expert(experts, num_experts)
    assert order.tolist() == experts.flatten().argsort(stable=True).tolist()
    assert counts.tolist() == experts.flatten().bincount(minlength=num_experts).tolist()
