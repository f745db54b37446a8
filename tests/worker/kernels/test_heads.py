import pytest
import torch

from tests.worker.kernels.closeness import DTYPES, assert_as_close
from worker.kernels.heads import prepare_heads
from worker.layers.rotary import Rotary, Rotation
from worker.rope_config import RopeConfig

EPS = 1e-6
BLOCK_SIZE, NUM_BLOCKS = 16, 20
MODELS = {
    "Qwen3": (16, 8, 128),
    "SmolLM2": (9, 3, 64),
    "80 wide": (2, 1, 80),
    "96 wide": (3, 3, 96),
}


def normalized(x, weight, wide):
    """The roundings of Hugging Face's norm, or none in float64."""
    x_wide = x.to(wide)
    normed = x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + EPS)
    return normed.to(x.dtype) * weight


def prepared(heads, rotation, num_heads, num_rotated, weights):
    """What the layers do, in plain torch."""
    heads = heads.clone()
    wide = torch.float64 if heads.dtype == torch.float64 else torch.float32
    if weights is not None:
        query, key = weights.to(heads.dtype)
        heads[:, :num_heads] = normalized(heads[:, :num_heads], query, wide)
        heads[:, num_heads:num_rotated] = normalized(heads[:, num_heads:num_rotated], key, wide)
    if rotation is not None:
        rotation.turn_(heads[:, :num_rotated])
    return heads


def check(
    model, rows, num_cached, dtype, device, *, normalizes, rotary_dim=None, index_dtype=torch.int64
):
    """Compare a launch; of a head `rotary_dim` numbers turn, all if it is None, and 0 is none."""
    num_heads, num_kv_heads, head_dim = MODELS[model]
    num_rotated = num_heads + num_kv_heads
    generator = torch.Generator().manual_seed(rows)
    heads = torch.randn(rows, num_rotated + num_kv_heads, head_dim, generator=generator)
    heads = heads.mul(2).to(device, dtype)
    weights = torch.randn(2, head_dim, generator=generator).to(device, dtype)
    rotation = exact_rotation = None
    if rotary_dim != 0:
        rope = RopeConfig(theta=10_000.0, rotary_dim=rotary_dim or head_dim)
        rotary = Rotary(rope, max_positions=500, dtype=dtype, device=device)
        rotation = rotary(torch.randint(500, (rows,), generator=generator).to(device))
        exact_rotation = Rotation(rotation.cos.double(), rotation.sin.double())
    cache = torch.full(
        (2, NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim), 7.0, dtype=dtype, device=device
    )
    positions = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=generator)[:num_cached]
    used = weights if normalizes else None
    plain = prepared(heads, rotation, num_heads, num_rotated, used)
    exact = prepared(
        heads.double(),
        exact_rotation,
        num_heads,
        num_rotated,
        None if used is None else used.double(),
    )
    expected_cache = cache.clone()

    result = heads
    prepare_heads(
        result,
        None if rotation is None else rotation.cos,
        None if rotation is None else rotation.sin,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        query_weight=weights[0] if normalizes else None,
        key_weight=weights[1] if normalizes else None,
        eps=EPS,
        keys=cache[0],
        values=cache[1],
        cache_positions=positions.to(device, index_dtype),
    )

    assert_as_close(result, plain, exact)
    assert torch.equal(result[:, num_rotated:], plain[:, num_rotated:])
    flat = expected_cache.flatten(1, 2)
    flat[0, positions.to(device)] = result[:num_cached, num_heads:num_rotated]
    flat[1, positions.to(device)] = result[:num_cached, num_rotated:]
    assert torch.equal(cache, expected_cache)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rows", [1, 7])
def test_close_and_cached(model, rows, normalizes, dtype, device):
    check(model, rows, rows, dtype, device, normalizes=normalizes)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 8, 9, 31, 33, 255, 256])
def test_row_counts(rows, device):
    check("80 wide", rows, rows, torch.float16, device, normalizes=True)


@pytest.mark.parametrize(
    ("model", "rotary_dim", "normalizes"),
    [
        ("80 wide", 20, True),
        ("96 wide", 64, False),
        ("SmolLM2", 48, True),
        ("SmolLM2", 0, False),
        ("80 wide", 0, True),
    ],
)
def test_parts_of_heads(model, rotary_dim, normalizes, device):
    check(model, 3, 2, torch.float16, device, normalizes=normalizes, rotary_dim=rotary_dim)


def test_the_part_that_does_not_turn_is_cached_finite(device):
    heads = torch.ones(1, 3, 64, device=device)
    heads[0, 1:, 40] = torch.tensor([float("inf"), float("nan")], device=device)
    angles = torch.ones(1, 1, 32, device=device)
    cache = torch.zeros(2, 1, 16, 1, 64, device=device)
    prepare_heads(
        heads,
        angles,
        torch.zeros_like(angles),
        num_heads=1,
        num_kv_heads=1,
        query_weight=None,
        key_weight=None,
        eps=EPS,
        keys=cache[0],
        values=cache[1],
        cache_positions=torch.tensor([5], device=device),
    )
    largest = 3.3895313892515355e38
    for pool in cache:
        assert pool[0, 5, 0, 40] == torch.tensor(largest)
        assert pool.isfinite().all()
        assert int((pool == 1).sum()) == 63
    assert heads[0, 2].isfinite().all()


@pytest.mark.parametrize("num_cached", [0, 1, 6])
def test_rows_that_only_fill_up_are_not_cached(num_cached, device):
    check("SmolLM2", 7, num_cached, torch.float16, device, normalizes=True)


def test_cache_positions_of_32_bits(device):
    check("SmolLM2", 7, 7, torch.float16, device, normalizes=False, index_dtype=torch.int32)


def test_rows_of_zeros_stay_finite(device):
    heads = torch.zeros(2, 3, 64, dtype=torch.float16, device=device)
    angles = torch.ones(2, 1, 64, dtype=torch.float16, device=device)
    cache = torch.zeros(2, 1, 16, 1, 64, dtype=torch.float16, device=device)
    prepare_heads(
        heads,
        angles,
        angles,
        num_heads=1,
        num_kv_heads=1,
        query_weight=angles[0, 0],
        key_weight=angles[0, 0],
        eps=EPS,
        keys=cache[0],
        values=cache[1],
        cache_positions=torch.tensor([3, 4], device=device),
    )
    assert not heads.any()
    assert not cache.any()
