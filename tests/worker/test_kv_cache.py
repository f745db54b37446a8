import itertools

import pytest
import torch

from protocol.errors import ConfigError
from worker.kv_cache import (
    KVCache,
    KVCacheShape,
    KVLayout,
    available_memory_bytes,
    cpu_num_blocks,
    require_cpu_memory,
)

SHAPE = KVCacheShape(num_layers=2, num_kv_heads=3, head_dim=8, block_size=4)
GIB = 1 << 30


def test_block_bytes():
    assert SHAPE.block_bytes(torch.float32) == 2 * 2 * 3 * 4 * 8 * 4
    assert SHAPE.block_bytes(torch.bfloat16) == 2 * 2 * 3 * 4 * 8 * 2
    assert SHAPE.block_bytes(torch.float8_e4m3fn) == 2 * 2 * 3 * 4 * 8


@pytest.mark.parametrize(
    ("available", "tp", "expected"),
    [
        (16 * GIB, 1, 2 * GIB // 1000),
        (16 * GIB, 3, 2 * GIB // 3 // 1000),
        (4 * GIB, 1, GIB // 1000),
        (4 * GIB, 2, GIB // 2 // 1000),
        (4000, 1, 1),
    ],
)
def test_cpu_num_blocks(available: int, tp: int, expected: int):
    assert cpu_num_blocks(1000, tp=tp, available_bytes=available) == expected


def test_too_little_memory_for_a_block():
    with pytest.raises(ConfigError, match="less than one block"):
        cpu_num_blocks(1000, tp=1, available_bytes=3999)


def test_a_cache_beyond_the_memory_is_refused():
    require_cpu_memory(10, 1 << 20, available_bytes=10 << 20)
    with pytest.raises(ConfigError, match=r"11 blocks needs 11\.0 GiB, and 10\.0 GiB are free"):
        require_cpu_memory(11, 1 << 30, available_bytes=10 << 30)


def test_available_memory():
    assert 1 << 20 < available_memory_bytes() < 1 << 46


@pytest.fixture(params=itertools.product(KVLayout, (torch.float32, torch.float8_e4m3fn)))
def cache(request: pytest.FixtureRequest) -> KVCache:
    """A cache whose blocks are filled with 1, 2, 3, 4 and 5."""
    layout, dtype = request.param
    cache = KVCache(SHAPE, 5, dtype=dtype, device=torch.device("cpu"), layout=layout)
    blocks_last = cache.data.movedim(block_dim(cache), -1)
    blocks_last[..., :5] = torch.arange(1.0, 6.0).to(dtype)
    return cache


def block_dim(cache: KVCache) -> int:
    return 3 if cache.layout is KVLayout.HEADS_FIRST else 2


def contents(cache: KVCache) -> list[float]:
    """Return the number that fills each block."""
    blocks = cache.data.float().movedim(block_dim(cache), 0).flatten(1)
    assert torch.equal(blocks.amin(1), blocks.amax(1))
    return blocks[:, 0].tolist()


def test_layouts():
    sizes = {KVLayout.HEADS_FIRST: (2, 2, 3, 6, 4, 8), KVLayout.BLOCKS_FIRST: (2, 2, 6, 4, 3, 8)}
    for layout, size in sizes.items():
        cache = KVCache(SHAPE, 5, dtype=torch.float32, device=torch.device("cpu"), layout=layout)
        assert tuple(cache.data.shape) == size


def test_pad_block_is_zero(cache: KVCache):
    assert cache.pad_block == 5
    assert contents(cache) == [1, 2, 3, 4, 5, 0]


def test_copies_happen_in_order(cache: KVCache):
    cache.copy_blocks([[0, 3], [3, 1], [4, 0]])
    assert contents(cache) == [5, 1, 3, 1, 5, 0]


def test_clear_tail(cache: KVCache):
    before = cache.data.float().clone()
    cache.clear_tail(1, 3)
    changed = torch.argwhere(cache.data.float() != before)
    of_block = changed[:, block_dim(cache)]
    of_position = changed[:, 4 if cache.layout is KVLayout.HEADS_FIRST else 3]
    assert set(zip(of_block.tolist(), of_position.tolist(), strict=True)) == {(1, 3)}
    assert len(changed) == 2 * 2 * 3 * 8


def test_clear(cache: KVCache):
    cache.clear_blocks([1, 4])
    assert contents(cache) == [1, 0, 3, 4, 0, 0]
