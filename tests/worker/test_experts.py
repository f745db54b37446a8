from functools import partial

import pytest
import torch

from tests.worker.thread_ranks import ThreadRank, on_all, thread_ranks
from worker.layers.experts import Experts, Router, Routes, choose_routes
from worker.model_config import SwigluClamp
from worker.parallel import OneRank

CPU = torch.device("cpu")
CLAMP = SwigluClamp(alpha=1.702, limit=7.0)
NUM_EXPERTS, HIDDEN, INNER = 5, 12, 8
ROUTES = Routes(
    torch.tensor([[3, 0], [0, 1], [1, 3], [3, 1]]),
    torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.9, 0.2], [0.1, 0.4]]),
)


def whole_weights() -> tuple[torch.Tensor, ...]:
    # A generator of its own: ranks draw at the same time.
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    return (
        normal(NUM_EXPERTS, 2 * INNER, HIDDEN),
        normal(NUM_EXPERTS, 2 * INNER),
        normal(NUM_EXPERTS, HIDDEN, INNER),
        normal(NUM_EXPERTS, HIDDEN),
    )


def fill(experts: Experts) -> None:
    """Give a rank its part of `whole_weights`."""
    gate_up, gate_up_bias, down, down_bias = whole_weights()
    inner = experts.inner
    both = slice(2 * inner.start, 2 * (inner.start + inner.size))
    experts.gate_up.copy_(gate_up[:, both])
    experts.down.copy_(down[:, :, inner.start : inner.start + inner.size])
    if experts.gate_up_bias is not None:
        experts.gate_up_bias.copy_(gate_up_bias[:, both])
    if experts.down_bias is not None:
        experts.down_bias.copy_(down_bias)


def expected(hidden: torch.Tensor, *, clamp: SwigluClamp | None) -> torch.Tensor:
    """Return the sum in float64, row by row; with the clamp there are biases."""
    gate_up, gate_up_bias, down, down_bias = whole_weights()
    result = torch.zeros(hidden.shape, dtype=torch.float64)
    for row, chosen in enumerate(ROUTES.experts.tolist()):
        for choice, expert in enumerate(chosen):
            both = gate_up[expert] @ hidden[row].double()
            if clamp is None:
                gate, up = both[0::2], both[1::2]
                part = down[expert] @ (gate * gate.sigmoid() * up)
            else:
                both = both + gate_up_bias[expert]
                gate = both[0::2].clamp(max=clamp.limit)
                up = both[1::2].clamp(-clamp.limit, clamp.limit)
                part = down[expert] @ (gate * (clamp.alpha * gate).sigmoid() * (up + 1))
                part = part + down_bias[expert]
            result[row] += part * ROUTES.weights[row, choice].double()
    return result


@pytest.mark.parametrize("clamp", [None, CLAMP], ids=["silu", "clamped"])
@pytest.mark.parametrize("is_prepared", [False, True])
def test_divided_among_ranks(clamp: SwigluClamp | None, is_prepared: bool):
    torch.manual_seed(0)
    hidden = torch.randn(4, HIDDEN)

    def run(rank: ThreadRank) -> torch.Tensor:
        experts = Experts(
            *(NUM_EXPERTS, HIDDEN, INNER),
            bias=clamp is not None,
            clamp=clamp,
            group=rank,
            dtype=torch.float32,
            device=CPU,
        )
        with torch.inference_mode():
            fill(experts)
            if is_prepared:
                experts.prepare()
            return experts(hidden, ROUTES)

    for size in (1, 4):
        for y in on_all(partial(run, rank) for rank in thread_ranks(size)):
            torch.testing.assert_close(
                y.double(), expected(hidden, clamp=clamp), rtol=1e-5, atol=1e-4
            )


def one_rank(dtype: torch.dtype = torch.float32) -> Experts:
    experts = Experts(
        *(NUM_EXPERTS, HIDDEN, INNER),
        bias=False,
        clamp=None,
        group=OneRank(),
        dtype=dtype,
        device=CPU,
    )
    fill(experts)
    return experts


@torch.inference_mode()
def test_experts_without_rows_are_not_touched():
    torch.manual_seed(0)
    hidden = torch.randn(4, HIDDEN)
    experts = one_rank()
    for unused in (2, 4):
        experts.gate_up[unused] = torch.nan
        experts.down[unused] = torch.nan
    experts.prepare()
    assert experts(hidden, ROUTES).isfinite().all()


@torch.inference_mode()
def test_results_are_added_in_float32():
    torch.manual_seed(0)
    hidden = torch.randn(4, HIDDEN).bfloat16()
    experts = one_rank(torch.bfloat16)
    y = experts(hidden, ROUTES)
    assert y.dtype == torch.bfloat16
    single = torch.zeros(4, HIDDEN)
    for choice in range(2):
        own = Routes(ROUTES.experts[:, choice : choice + 1], torch.ones(4, 1))
        single += experts(hidden, own).float() * ROUTES.weights[:, choice : choice + 1]
    assert torch.equal(y, single.bfloat16())


@pytest.mark.parametrize("is_renormalised", [False, True])
def test_routes_are_qwens_and_gpt_oss(is_renormalised: bool):
    torch.manual_seed(0)
    scores = torch.randn(6, 7) * 4
    routes = choose_routes(scores, 3, is_renormalised=is_renormalised)
    weights, experts = scores.double().softmax(-1).topk(3)  # Qwen3-MoE: softmax, then the greatest
    if is_renormalised:
        weights = weights / weights.sum(-1, keepdim=True)
        # GPT-OSS: the greatest, then their softmax
        torch.testing.assert_close(weights, scores.double().topk(3).values.softmax(-1))
    assert torch.equal(routes.experts, experts)
    torch.testing.assert_close(routes.weights.double(), weights, rtol=1e-5, atol=1e-7)


@torch.inference_mode()
@pytest.mark.parametrize("bias", [False, True])
def test_the_routers_bias_is_added_to_scores(bias: bool):
    torch.manual_seed(0)
    router = Router(4, 6, 2, bias=bias, is_renormalised=True, dtype=torch.float32, device=CPU)
    router.product.weight.normal_()
    offset = 0
    if router.bias is not None:
        offset = router.bias.normal_()
    x = torch.randn(3, 4)
    routes = router(x)
    scores = x @ router.product.weight.T + offset
    assert torch.equal(routes.experts, scores.topk(2).indices)
