import itertools

import pytest
import torch

from protocol.errors import ConfigError
from worker.host_blocks import HostBlocks
from worker.kv_cache import KVCache, KVCacheShape, KVLayout

SHAPE = KVCacheShape(num_layers=2, num_kv_heads=3, head_dim=8, block_size=4)


NEEDS_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(params=itertools.product(KVLayout, (torch.float32, torch.float8_e4m3fn)))
def cache(request: pytest.FixtureRequest, device: torch.device) -> KVCache:
    layout, dtype = request.param
    cache = KVCache(SHAPE, 6, dtype=dtype, device=device, layout=layout)
    cache.data.copy_(torch.randn(cache.data.shape))
    return cache


def contents(cache: KVCache) -> torch.Tensor:
    """Return a copy; torch compares no 8-bit floats."""
    return cache.data.float().clone()


def test_a_block_comes_back_as_it_was(cache: KVCache):
    before = contents(cache)
    host_blocks = HostBlocks(cache, 4)
    host_blocks.move_out([(1, 3), (4, 0)])
    cache.clear_blocks([1, 4])
    host_blocks.move_in([(3, 1), (0, 4)])
    assert torch.equal(contents(cache), before)


def test_it_may_come_back_elsewhere(cache: KVCache):
    before = contents(cache)
    host_blocks = HostBlocks(cache, 4)
    host_blocks.move_out([(1, 3), (4, 0)])
    host_blocks.move_in([(3, 4), (0, 1)])
    assert torch.equal(cache.block(4).float(), before.select(cache.data.shape.index(7), 1))
    assert torch.equal(cache.block(1).float(), before.select(cache.data.shape.index(7), 4))
    assert torch.equal(cache.block(0).float(), before.select(cache.data.shape.index(7), 0))


def test_measuring_touches_no_block_of_a_sequence(cache: KVCache):
    before = contents(cache)
    assert HostBlocks(cache, 9).measure() > 0
    assert torch.equal(contents(cache), before)


def test_too_much_is_refused_in_a_sentence(cache: KVCache):
    with pytest.raises(ConfigError, match="--swap-space: the host has no room for"):
        HostBlocks(cache, 2**50)
