"""Weights in MXFP4: 32 numbers of 4 bits share a power of two.

    value = e2m1(code) · 2^(scale − 127)

The codes of a block lie in 16 bytes, the first of two in the low half. The format is the Open
Compute Project's "Microscaling Formats (MX) Specification" 1.0, where e2m1 is a sign, two bits of
exponent and one of mantissa: 0, ½, 1, 1½, 2, 3, 4, 6 and their negatives.

GPT-OSS' checkpoints have their experts so. They are unpacked after loading; a table of both values
of a byte makes that one look-up and one multiplication.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.shard import Shard

BLOCK = 32
"""Numbers that share a scale."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS = 127


def unpack(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of blocks.

    [..., blocks, 16] uint8 and [..., blocks] uint8 -> [..., blocks · 32] of `dtype`. What `dtype`
    cannot hold becomes infinite or 0, as in any conversion.
    """
    codes = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
    pairs = torch.tensor(
        [(codes[byte & 15], codes[byte >> 4]) for byte in range(256)], device=blocks.device
    )
    numbers = pairs[blocks.int()].flatten(-2)
    # Numbers of one bit of mantissa times powers of two: exact, whatever the order.
    exponents = scales.int().unsqueeze(-1).sub_(_SCALE_BIAS)
    return torch.ldexp(numbers, exponents).flatten(-2).to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A rank's part of one weight of all experts, in whole blocks of inputs."""

    blocks: Tensor
    """[experts, outputs, blocks, 16] uint8"""
    scales: Tensor
    """[experts, outputs, blocks] uint8"""
    skip: int
    """Inputs before the rank's own, in its first block"""
    inputs: int
    """The rank's own"""

    @staticmethod
    def allocate(
        num_experts: int, outputs: int, inputs: Shard, device: torch.device
    ) -> "PackedWeight":
        """Return memory for the blocks that hold a rank's inputs, which `packed_part` names."""
        part = packed_part(inputs)
        shape = (num_experts, outputs, part.size)
        return PackedWeight(
            torch.empty(*shape, BLOCK // 2, dtype=torch.uint8, device=device),
            torch.empty(shape, dtype=torch.uint8, device=device),
            skip=inputs.start - part.start * BLOCK,
            inputs=inputs.size,
        )

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Return the weight. [experts, outputs, inputs]"""
        num_experts, outputs, _ = self.scales.shape
        weight = torch.empty(
            num_experts, outputs, self.inputs, dtype=dtype, device=self.blocks.device
        )
        # One expert at a time: on the way numbers are float32.
        for target, blocks, scales in zip(weight, self.blocks, self.scales, strict=True):
            target.copy_(unpack(blocks, scales, dtype).narrow(-1, self.skip, self.inputs))
        return weight


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """A rank's part of all experts' weights (`worker.layers.experts.Experts`)."""

    gate_up: PackedWeight
    down: PackedWeight

    @staticmethod
    def allocate(
        num_experts: int, hidden_size: int, inner: Shard, device: torch.device
    ) -> "PackedExperts":
        """Return memory for experts whose intermediate size is divided as `inner` says."""
        hidden = Shard(whole=hidden_size, start=0, size=hidden_size)
        return PackedExperts(
            PackedWeight.allocate(num_experts, 2 * inner.size, hidden, device),
            PackedWeight.allocate(num_experts, hidden_size, inner, device),
        )


def packed_part(inputs: Shard) -> Shard:
    """Return the blocks that hold a rank's inputs; ranks may share one at an end."""
    assert inputs.whole % BLOCK == 0, f"{inputs.whole} inputs are not whole blocks"
    first = inputs.start // BLOCK
    last = -(-(inputs.start + inputs.size) // BLOCK)
    return Shard(whole=inputs.whole // BLOCK, start=first, size=last - first)
