import math

import pytest
import torch

from worker.layers.output_head import OutputHead
from worker.shard import divide_vocabulary

CPU = torch.device("cpu")


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_ranks_together_score_every_token(size: int, prepared: bool):
    table, hidden = torch.randn(9, 6), torch.randn(3, 6)
    parts = []
    for rank in range(size):
        vocabulary = divide_vocabulary(9, rank=rank, size=size)
        head = OutputHead(6, vocabulary, dtype=torch.float32, device=CPU)
        head.tie(table)
        assert head.product.weight.untyped_storage().data_ptr() == table.data_ptr()
        if prepared:
            head.product.prepare()
        parts.append(head(hidden))
        assert parts[-1].shape == (3, vocabulary.width)
    whole = torch.cat(parts, dim=1)
    torch.testing.assert_close(whole[:, :9], hidden @ table.T)
    assert whole[:, 9:].eq(-math.inf).all()


def test_a_rank_without_tokens():
    vocabulary = divide_vocabulary(5, rank=3, size=4)
    head = OutputHead(6, vocabulary, dtype=torch.float32, device=CPU)
    head.product.prepare()
    assert head(torch.randn(2, 6)).tolist() == [[-math.inf] * 2] * 2
