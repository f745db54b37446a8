import torch

from worker.layers.embedding import Embedding


def test_rows_of_the_table():
    embedding = Embedding(10, 4, dtype=torch.float32, device=torch.device("cpu"))
    embedding.weight.copy_(torch.arange(40.0).view(10, 4))
    assert embedding(torch.tensor([2, 0, 2])).tolist() == [
        [8.0, 9.0, 10.0, 11.0],
        [0.0, 1.0, 2.0, 3.0],
        [8.0, 9.0, 10.0, 11.0],
    ]
