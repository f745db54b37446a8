from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it

from tests.worker.thread_ranks import ThreadRank, on_all, thread_ranks
from worker.layers.projection_norm import ProjectionNorm
from worker.shard import divide_heads
from worker.weights import projection_norm_weights

HEADS, KV_HEADS, HEAD_DIM, ROWS, EPS = 8, 2, 6, 3, 1e-5


@pytest.mark.parametrize("size", [1, 2, 4])
def test_as_over_whole_projections(size: int):
    torch.manual_seed(0)
    query, key = torch.randn(ROWS, HEADS * HEAD_DIM), torch.randn(ROWS, KV_HEADS * HEAD_DIM)
    weights = {"q.weight": torch.randn(HEADS * HEAD_DIM), "k.weight": torch.randn(12)}

    def run(rank: ThreadRank) -> torch.Tensor:
        heads = divide_heads(HEADS, KV_HEADS, rank=rank.rank, size=size)
        norm = ProjectionNorm(
            heads, HEAD_DIM, EPS, group=rank, dtype=torch.float32, device=torch.device("cpu")
        )
        for weight in projection_norm_weights(norm, "q", "k"):
            weight.fill(weights[weight.name])
        mine = [
            whole.view(ROWS, -1, HEAD_DIM)[:, part.start : part.start + part.size]
            for whole, part in ((query, heads.query), (key, heads.key_value))
        ]
        values = torch.full((ROWS, heads.key_value.size, HEAD_DIM), 5.0)
        projected = torch.cat([*mine, values], dim=1)
        with torch.inference_mode():
            norm.normalize_(projected)
        assert projected[:, -heads.key_value.size :].eq(5.0).all()
        assert rank.exchanged == 2 * ROWS
        return projected

    expected_query = F.rms_norm(query, query.shape[1:], weights["q.weight"], EPS)
    expected_key = F.rms_norm(key, key.shape[1:], weights["k.weight"], EPS)
    results = on_all(partial(run, rank) for rank in thread_ranks(size))
    for rank, result in enumerate(results):
        heads = divide_heads(HEADS, KV_HEADS, rank=rank, size=size)
        for first, whole, part in (
            (0, expected_query, heads.query),
            (heads.query.size, expected_key, heads.key_value),
        ):
            wanted = whole.view(ROWS, -1, HEAD_DIM)[:, part.start : part.start + part.size]
            torch.testing.assert_close(
                result[:, first : first + part.size], wanted, rtol=1e-5, atol=1e-6
            )
