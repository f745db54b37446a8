import pytest
import torch

from tests.worker.kernels.closeness import DTYPES, assert_as_close
from worker.kernels import expert_products
from worker.kernels.expert_products import TileShape, most_tiles, run_experts, tile_shape
from worker.model_config import SwigluClamp

CLAMP = SwigluClamp(alpha=1.702, limit=7.0)
SHORT = TileShape(rows=16, outputs=16, inputs=16, warps=1, stages=2)
TALL = TileShape(rows=32, outputs=32, inputs=32, warps=1, stages=2)


def plain(hidden, experts, weights, gate_up, gate_up_bias, down, down_bias, clamp):
    """Return the sum in torch, every row by itself."""
    result = torch.zeros(hidden.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
    result = result.to(hidden.device)
    for row, (chosen, shares) in enumerate(zip(experts.tolist(), weights, strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            both = gate_up[expert] @ hidden[row]
            if gate_up_bias is not None:
                both = both + gate_up_bias[expert]
            gate, up = both[0::2], both[1::2]
            if clamp is None:
                inner = gate / (1 + (-gate).exp()) * up
            else:
                gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
                inner = gate / (1 + (-gate * clamp.alpha).exp()) * (up + 1)
            part = down[expert] @ inner
            if down_bias is not None:
                part = part + down_bias[expert]
            result[row] += part.to(result.dtype) * share.to(result.dtype)
    return result.to(hidden.dtype)


def draw(rows, num_experts, k, size, inner, dtype, device, *, bias):
    torch.manual_seed(rows)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape) * scale).to(device, dtype)

    experts = torch.rand(rows, num_experts).argsort(dim=-1)[:, :k].to(device, torch.int32)
    weights = torch.randn(rows, k).softmax(dim=-1).to(device)
    return (
        normal(rows, size),
        experts.contiguous(),
        weights,
        normal(num_experts, 2 * inner, size, scale=2 / size**0.5),
        normal(num_experts, 2 * inner) if bias else None,
        normal(num_experts, size, inner, scale=inner**-0.5),
        normal(num_experts, size) if bias else None,
    )


def doubles(tensors):
    return [
        tensor.double() if tensor is not None and tensor.is_floating_point() else tensor
        for tensor in tensors
    ]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "num_experts", "k", "size", "inner", "shape", "clamp"),
    [
        (1, 8, 3, 32, 16, SHORT, None),
        (3, 5, 2, 48, 24, TALL, CLAMP),  # blocks of 32 do not fill 48 and 24
        (24, 3, 2, 40, 20, SHORT, CLAMP),
        (40, 3, 2, 40, 20, TALL, None),
    ],
    ids=str,
)
def test_as_close_as_plain(rows, num_experts, k, size, inner, shape, clamp, dtype, device):
    tensors = draw(rows, num_experts, k, size, inner, dtype, device, bias=clamp is not None)
    y = run_experts(*tensors, clamp, shape)
    assert_as_close(y, plain(*tensors, clamp), plain(*doubles(tensors), clamp))


def test_a_row_depends_on_no_other(device):
    hidden, *others = draw(6, 4, 2, 32, 16, torch.float16, device, bias=False)
    whole = run_experts(hidden, *others, None, SHORT)
    spoiled = hidden.clone()
    spoiled[0] = torch.nan
    spoiled[2:] = 1e4
    assert torch.equal(run_experts(spoiled, *others, None, SHORT)[1], whole[1])


@pytest.mark.slow
def test_many_rows_keep_their_parts_in_their_dtype(device, monkeypatch):
    monkeypatch.setattr(expert_products, "ADDS_FROM_ROWS", 8)
    tensors = draw(8, 2, 1, 32, 16, torch.float16, device, bias=False)
    y = run_experts(*tensors, None)
    assert_as_close(y, plain(*tensors, None), plain(*doubles(tensors), None))


def test_there_are_programs_for_every_tile():
    for counts in ([1], [0, 0, 5], [16, 16], [17, 15, 1, 0], [1] * 8):
        tiles = sum(-(-count // 16) for count in counts)
        assert tiles <= most_tiles(sum(counts), len(counts), 16)


def test_tiles_grow_with_the_rows_of_an_expert():
    rows = [tile_shape(assignments, 128).rows for assignments in (8, 2048, 8192, 32768, 131072)]
    assert rows == [16, 16, 32, 64, 128]
