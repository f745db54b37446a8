"""The fused write against torch's, with and without norms of heads."""

import pytest
import torch

from worker.attention.base import ProjectedHeads
from worker.attention.paged import LayerCache, write_by_torch
from worker.layers.head_norm import HeadNorm
from worker.layers.rotary import Rotary
from worker.rope_config import RopeConfig

write_fused = pytest.importorskip("worker.attention.fused_write").write_fused
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 64
ROPE = RopeConfig(theta=1e4, rotary_dim=HEAD_DIM)


@pytest.mark.parametrize(("has_norm", "rotates"), [(False, True), (True, True), (True, False)])
def test_same_as_by_torch(device: torch.device, has_norm: bool, rotates: bool):
    torch.manual_seed(0)
    norm = None
    if has_norm:
        norm = HeadNorm(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, 1e-6, dtype=torch.float32, device=device)
        norm.weight.copy_(torch.randn(2, HEAD_DIM))
        norm.prepare()
    rotary = Rotary(ROPE, max_positions=50, dtype=torch.float32, device=device)
    rotation = rotary(torch.tensor([3, 7, 9, 11, 20], device=device))
    heads = torch.randn(5, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, device=device)
    written = []
    for write in (write_by_torch, write_fused):
        pools = torch.zeros(2, 4, 16, NUM_KV_HEADS, HEAD_DIM, device=device)
        projected = ProjectedHeads(
            heads=heads.clone(),
            num_heads=NUM_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            head_norm=norm,
            rotation=rotation if rotates else None,
        )
        # The last row is padding: it is finished, but goes nowhere.
        write(projected, LayerCache(*pools), torch.tensor([5, 40, 63, 17], device=device))
        written.append((projected.heads, pools))
    for found, expected in zip(*written, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert int((written[1][1] != 0).any(-1).any(-1).sum()) == 8


@pytest.mark.parametrize("write", ["torch", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_not_finite_is_cached_as_the_largest_number(device, write: str, dtype: torch.dtype):
    rotary = Rotary(ROPE, max_positions=9, dtype=dtype, device=device)
    heads = torch.ones(2, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, dtype=dtype, device=device)
    heads[0, NUM_HEADS, 0] = float("nan")
    heads[0, -1, 1:4] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    projected = ProjectedHeads(
        heads=heads,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_norm=None,
        rotation=rotary(torch.zeros(2, dtype=torch.int64, device=device)),
    )
    pools = torch.zeros(2, 1, 16, NUM_KV_HEADS, HEAD_DIM, dtype=dtype, device=device)
    function = write_by_torch if write == "torch" else write_fused
    function(projected, LayerCache(*pools), torch.tensor([0, 1], device=device))
    assert pools.isfinite().all()
    assert pools[0, 0, 0, 0, 0].abs() >= 65504
    assert pools[1, 0, 0, 1, 2:4].sign().tolist() == [1, -1]
    assert (pools[1, 0, 0, 1, 1:4].abs() >= 65504).all()
    assert projected.key_value[:, 1].isfinite().all()
    assert (pools[:, 0, 1] == 1).all()


@pytest.mark.parametrize("write", ["torch", "fused"])
@pytest.mark.parametrize("rotary_dim", [HEAD_DIM, 32])
def test_a_cache_in_fp8_saturates(device, write: str, rotary_dim: int):
    rope = RopeConfig(theta=1e4, rotary_dim=rotary_dim)
    rotary = Rotary(rope, max_positions=9, dtype=torch.float32, device=device)
    heads = torch.ones(2, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, device=device)
    # The first part turns, by nothing, the last does not.
    for column in (0, HEAD_DIM - 4):
        special = torch.tensor([600.0, -1e30, float("nan"), float("inf")], device=device)
        heads[0, NUM_HEADS, column : column + 4] = special
        heads[0, -1, column : column + 4] = special
    projected = ProjectedHeads(
        heads=heads,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_norm=None,
        rotation=rotary(torch.zeros(2, dtype=torch.int64, device=device)),
    )
    pools = torch.zeros(2, 1, 16, NUM_KV_HEADS, HEAD_DIM, device=device).to(torch.float8_e4m3fn)
    function = write_by_torch if write == "torch" else write_fused
    function(projected, LayerCache(*pools), torch.tensor([0, 1], device=device))
    keys, values = pools.float()
    for column in (0, HEAD_DIM - 4):
        key, value = keys[0, 0, 0, column:][:4], values[0, 0, 1, column:][:4]
        if rotary_dim < HEAD_DIM and column:
            assert key[:2].tolist() == [448.0, -448.0]
        if write == "torch" or device.type == "cuda":  # the interpreter has no NaN of this type
            assert key[2:].isnan().all()
        assert value.tolist() == [448.0, -448.0, 448.0, 448.0]
    assert (pools.float()[:, 0, 1] == 1).all()
    assert projected.key_value[:, 1].isfinite().all()
