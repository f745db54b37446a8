import torch

from worker.cuda_memory import worst_batch, worst_sampled
from worker.kv_cache import KVCache, KVCacheShape

CPU = torch.device("cpu")


def test_worst_batch_fills_the_budget_from_the_pad_block():
    shape = KVCacheShape(num_layers=1, num_kv_heads=1, head_dim=2, block_size=4)
    cache = KVCache(shape, 0, dtype=torch.float32, device=CPU)
    batch = worst_batch(cache, num_tokens=21, max_model_len=10)
    assert [(chunk.first_row, chunk.start, chunk.count) for chunk in batch.chunks] == [
        (0, 0, 10),
        (10, 0, 10),
        (20, 0, 1),
    ]
    assert batch.positions.tolist() == [*range(10), *range(10), 0]
    assert batch.cache_positions.tolist() == [position % 4 for position in batch.positions]
    assert batch.wanted_rows.tolist() == [9, 19, 20]
    assert (batch.num_rows, batch.num_tokens, batch.num_decode) == (21, 21, 0)


def test_worst_sampled():
    rows = worst_sampled(3, CPU)
    assert (len(rows), rows.slots.tolist(), rows.indices.tolist()) == (3, [0, 1, 2], [0, 1, 2])
