"""Rotary position embedding, in the half-split layout of Hugging Face's Llama.

A head is two halves (a, b); pair i, (a_i, b_i), is turned by the angle position · f_i:

    a' = a · cos − b · sin        b' = b · cos + a · sin

With the sines of the first half negated, that is head · cos + swap(head) · sin, where swap
exchanges the halves: three operations for queries and keys together. Cosines and sines come from
one table, made in float32 and stored in the model's dtype, from which a step takes its rows once
for all layers.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from worker.rope_config import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    RopeScaling,
)


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Return the frequencies f_i, radians a position. [head_dim / 2], float32"""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    match scaling:
        case None:
            return frequencies
        case LinearScaling(factor=factor):
            return frequencies / factor
        case FactorScaling(factors=factors):
            return frequencies / torch.tensor(factors)
        case Llama3Scaling():
            return _llama3(frequencies, scaling)
        case _:
            raise NotImplementedError(f"{scaling} is not computed yet")


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Stretch the frequencies that turn too slowly to have been seen whole in training.

    turns in the original context: 0 ──── low ════════ high ──── ∞
                                   divided │ interpolated │ kept
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * (frequencies / scaling.factor)


@dataclass(frozen=True, slots=True)
class Rotation:
    """The angles of a step's rows, shared by all layers."""

    cos: Tensor
    """[rows, 1, head_dim]"""
    sin: Tensor
    """[rows, 1, head_dim], negated in the first half."""

    def turn_(self, heads: Tensor) -> None:
        """Rotate heads in place. [rows, heads, head_dim]"""
        swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
        heads.mul_(self.cos).addcmul_(swapped, self.sin)


class Rotary(nn.Module):
    """The table of angles for every position below `max_positions`."""

    def __init__(
        self,
        head_dim: int,
        rope: RopeConfig,
        *,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(head_dim, rope.theta, rope.scaling))
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), dim=-1).unsqueeze(1).to(device, dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).unsqueeze(1).to(device, dtype)

    def forward(self, positions: Tensor) -> Rotation:
        """Return the angles of these positions. [rows]"""
        return Rotation(self._cos.index_select(0, positions), self._sin.index_select(0, positions))
