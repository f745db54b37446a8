import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from worker.layers.mxfp4 import PackedWeight, packed_part, unpack
from worker.shard import divide

CPU = torch.device("cpu")


def draw(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every byte there is, and scales of usual and unusual size."""
    torch.manual_seed(0)
    blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, shape, dtype=torch.uint8)
    return blocks, scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_as_transformers_unpacks(dtype: torch.dtype):
    blocks, scales = draw(2, 40, 3)
    ours = unpack(blocks, scales, dtype)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    assert ours.shape == (2, 40, 96)
    assert torch.equal(ours, theirs)


def test_every_code():
    blocks = torch.arange(0x10, 0x20, dtype=torch.uint8).view(1, 16)
    numbers = unpack(blocks, torch.tensor([128], dtype=torch.uint8), torch.float32)
    assert numbers[1::2].tolist() == [1.0] * 16
    assert numbers[0::2].tolist() == [
        *(0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0),
        *(-0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0),
    ]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_take_their_inputs_out_of_whole_blocks(size: int):
    # 96 inputs are 3 blocks: of 2 ranks both need the middle one.
    blocks, scales = draw(2, 5, 3)
    parts = []
    for rank in range(size):
        inputs = divide(96, rank=rank, size=size)
        weight = PackedWeight.allocate(2, 5, inputs, CPU)
        part = packed_part(inputs)
        weight.blocks.copy_(blocks.narrow(2, part.start, part.size))
        weight.scales.copy_(scales.narrow(2, part.start, part.size))
        parts.append(weight.unpack(torch.float32))
    assert torch.equal(torch.cat(parts, dim=-1), unpack(blocks, scales, torch.float32))
