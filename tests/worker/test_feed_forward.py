from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it

from tests.worker.thread_ranks import ThreadRank, on_all, thread_ranks
from worker.models.feed_forward import FeedForward

CPU = torch.device("cpu")


@pytest.mark.parametrize("bias", [False, True])
def test_divided_among_ranks(bias: bool):
    torch.manual_seed(0)
    x = torch.randn(3, 6)
    tensors = {
        "gate_proj.weight": torch.randn(8, 6),
        "up_proj.weight": torch.randn(8, 6),
        "down_proj.weight": torch.randn(6, 8),
        "gate_proj.bias": torch.randn(8),
        "up_proj.bias": torch.randn(8),
        "down_proj.bias": torch.randn(6),
    }

    def run(rank: ThreadRank) -> torch.Tensor:
        block = FeedForward(6, 8, bias=bias, group=rank, dtype=torch.float32, device=CPU)
        weights = list(block.weights(""))
        assert {weight.name for weight in weights} == {
            name for name in tensors if bias or name.endswith("weight")
        }
        for weight in weights:
            weight.fill(tensors[weight.name])
        with torch.inference_mode():
            delta = block.add(x, torch.zeros(3, 6))
            assert delta is not None, "on CPU the norm adds"
            return delta

    gate, up, down = (
        partial(
            F.linear,
            weight=tensors[f"{name}_proj.weight"],
            bias=tensors[f"{name}_proj.bias"] if bias else None,
        )
        for name in ("gate", "up", "down")
    )
    expected = down(F.silu(gate(x)) * up(x))
    for y in on_all(partial(run, rank) for rank in thread_ranks(4)):
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-4)
