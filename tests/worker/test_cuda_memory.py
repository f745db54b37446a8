import pytest
import torch

from protocol.errors import ConfigError
from worker.cuda_memory import (
    GRAPH_BYTES,
    GRAPH_POOL_BYTES,
    GpuMemory,
    cuda_num_blocks,
    graph_reserve,
    worst_batch,
    worst_sampled,
)
from worker.kv_cache import KVCache, KVCacheShape

CPU = torch.device("cpu")
GIB = 1 << 30


def test_blocks_take_what_is_left():
    memory = GpuMemory(total=100 * GIB, used_at_peak=20 * GIB)
    blocks = cuda_num_blocks(memory, utilization=0.5, graph_reserve=GIB, block_bytes=GIB // 2)
    assert blocks == 2 * (50 - 20 - 1)


def test_nothing_left():
    memory = GpuMemory(total=100 * GIB, used_at_peak=50 * GIB)
    with pytest.raises(
        ConfigError, match=r"of 100\.00 GiB .* 0\.5 allows 50\.00 GiB, .*50\.00 GiB"
    ):
        cuda_num_blocks(memory, utilization=0.5, graph_reserve=0, block_bytes=1)


def test_graph_reserve():
    assert graph_reserve(0, 256, 1000, torch.bfloat16) == 0
    assert graph_reserve(3, 256, 1000, torch.bfloat16) == (
        GRAPH_POOL_BYTES + 3 * GRAPH_BYTES + 256 * 1000 * 2
    )


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
    assert batch.logit_rows.tolist() == [9, 19, 20]
    assert (batch.num_rows, batch.num_tokens, batch.num_decode) == (21, 21, 0)


def test_worst_sampled():
    rows = worst_sampled(3, CPU)
    assert (len(rows), rows.slots.tolist(), rows.indices.tolist()) == (3, [0, 1, 2], [0, 1, 2])
