from functools import partial

import pytest
import torch

from tests.worker.thread_ranks import ThreadRank, on_all, thread_ranks
from worker.layers.linear import ADDS_FROM_ROWS
from worker.layers.row_parallel import RowParallelLinear
from worker.parallel import OneRank
from worker.weights import row_parallel_weights

CPU = torch.device("cpu")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_whole_product_on_every_rank(size: int, bias: bool):
    torch.manual_seed(0)
    x, weight, added = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)

    def run(rank: ThreadRank | OneRank) -> torch.Tensor:
        linear = RowParallelLinear(8, 5, bias=bias, group=rank, dtype=torch.float32, device=CPU)
        for part in row_parallel_weights(linear, "o"):
            part.fill({"o.weight": weight, "o.bias": added}[part.name])
        inputs = linear.inputs
        with torch.inference_mode():
            part = x[:, inputs.start : inputs.start + inputs.size]
            residual = torch.zeros(3, 5)
            torch.testing.assert_close(linear.add(part, residual), linear(part))
            assert not residual.any()
            return linear(part)

    ranks = [OneRank()] if size == 1 else thread_ranks(size)
    expected = x @ weight.T + (added if bias else 0.0)
    for y in on_all(partial(run, rank) for rank in ranks):
        torch.testing.assert_close(y, expected)


def test_every_rank_checks_the_bias_and_rank_0_takes_it():
    for rank in thread_ranks(2):
        linear = RowParallelLinear(8, 5, bias=True, group=rank, dtype=torch.float32, device=CPU)
        weight, bias = row_parallel_weights(linear, "o")
        assert (weight.shape, weight.target.shape) == ((5, 8), (5, 4))
        assert bias.shape == (5,)
        assert bias.target.shape == ((0,) if rank.rank else (5,))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rows", [ADDS_FROM_ROWS - 1, ADDS_FROM_ROWS])
def test_many_rows_are_added_to_the_residual_on_a_gpu(rows: int):
    device = torch.device("cuda")
    linear = RowParallelLinear(
        64, 128, bias=False, group=OneRank(), dtype=torch.float32, device=device
    )
    linear.product.weight.copy_(torch.randn(128, 64))
    x, residual = torch.randn(rows, 64, device=device), torch.randn(rows, 128, device=device)
    expected = residual.double() + x.double() @ linear.product.weight.double().T
    delta = linear.add(x, residual)
    assert (delta is None) == (rows == ADDS_FROM_ROWS)
    total = residual if delta is None else residual + delta
    torch.testing.assert_close(total.double(), expected, rtol=1e-4, atol=1e-4)
