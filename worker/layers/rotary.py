"""Rotary position embedding (RoPE), in the half-split layout of Hugging Face's Llama.

The part of a head that turns is its first `rotary_dim` numbers, in most models all. It is two
halves (a, b); pair i, (a_i, b_i), is turned by the angle position · f_i:

    a' = a · cos − b · sin        b' = b · cos + a · sin

With the sines of the first half negated, that is part · cos + swap(part) · sin, where swap
exchanges the halves: three operations for queries and keys together. Cosines and sines come from
one table, made in float32, multiplied by the scaling's attention factor if it has one, and stored
in the model's dtype. A step takes its rows from there once for all layers.

Two scalings depend on how long a sequence is. transformers recomputes their frequencies when a
sequence outgrows what they were for. Our keys lie rotated in the cache and are shared by sequences
of all lengths, so frequencies may never change; they are chosen once, by the longest sequence that
the engine takes (`--max-model-len`; docs/adr/0010):

    dynamic     the base that a sequence of just that length would have
    longrope    the long factors if that length exceeds the original context, else the short ones

So a LongRoPE model that is only to serve short contexts is the more exact for being told so.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from worker.rope_config import (
    DynamicScaling,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
)


def inverse_frequencies(rope: RopeConfig, max_positions: int) -> Tensor:
    """Return the frequencies f_i for sequences of up to `max_positions` tokens.

    In radians a position. [rotary_dim / 2], float32. Scalings as in transformers'
    `modeling_rope_utils`.
    """
    match rope.scaling:
        case None:
            return _plain(rope.rotary_dim, rope.theta)
        case LinearScaling(factor=factor):
            return _plain(rope.rotary_dim, rope.theta) / factor
        case FactorScaling(factors=factors):
            return _plain(rope.rotary_dim, rope.theta) / torch.tensor(factors)
        case DynamicScaling() as scaling:
            base = _dynamic_base(rope.theta, rope.rotary_dim, scaling, max_positions)
            return _plain(rope.rotary_dim, base)
        case Llama3Scaling() as scaling:
            return _llama3(_plain(rope.rotary_dim, rope.theta), scaling)
        case YarnScaling() as scaling:
            return _yarn(_plain(rope.rotary_dim, rope.theta), rope, scaling)
        case LongRopeScaling() as scaling:
            is_long = max_positions > scaling.original_max_position_embeddings
            factors = scaling.long_factors if is_long else scaling.short_factors
            return _plain(rope.rotary_dim, rope.theta) / torch.tensor(factors)


def _plain(rotary_dim: int, base: float) -> Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    return 1.0 / (base**exponents)


def _dynamic_base(
    theta: float, rotary_dim: int, scaling: DynamicScaling, max_positions: int
) -> float:
    """Raise the base so that the slowest pair turns no further than it did in training.

    The quickest pair keeps its frequency, and those between are stretched the more the slower.
    """
    growth = max(max_positions / scaling.original_max_position_embeddings, 1.0)
    stretch = scaling.factor * growth - (scaling.factor - 1.0)
    return theta * math.pow(stretch, rotary_dim / (rotary_dim - 2))


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Stretch the frequencies that turn too slowly to have been seen whole in training.

    turns in the original context: 0 ──── low ════════ high ──── ∞
                                   divided │ interpolated │ kept
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * (frequencies / scaling.factor)


def _yarn(frequencies: Tensor, rope: RopeConfig, scaling: YarnScaling) -> Tensor:
    """Stretch the pairs that turn slowly, as `_llama3` does, with a ramp linear in their index.

    turns in the original context: ∞ ──── beta_fast ════════ beta_slow ──── 0
                             index: 0 kept │ low  interpolated  high │ divided
    """
    low = _index_of_turns(scaling.beta_fast, rope, scaling)
    high = _index_of_turns(scaling.beta_slow, rope, scaling)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low if high != low else 0.001
    divided = ((torch.arange(len(frequencies)).float() - low) / width).clamp(0.0, 1.0)
    return (1.0 - divided) * frequencies + divided * (frequencies / scaling.factor)


def _index_of_turns(turns: float, rope: RopeConfig, scaling: YarnScaling) -> float:
    """Return the index, not whole, of the pair that turns this often in the original context."""
    wavelength = scaling.original_max_position_embeddings / turns
    return rope.rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))


@dataclass(frozen=True, slots=True)
class Rotation:
    """The angles of a step's rows, shared by all layers."""

    cos: Tensor
    """[rows, 1, rotary_dim]"""
    sin: Tensor
    """[rows, 1, rotary_dim], negated in the first half."""

    def turn_(self, heads: Tensor) -> None:
        """Rotate the first `rotary_dim` numbers of heads in place. [rows, heads, head_dim]"""
        rotary_dim = self.cos.shape[-1]
        part = heads if rotary_dim == heads.shape[-1] else heads[..., :rotary_dim]
        swapped = part.roll(rotary_dim // 2, dims=-1)
        part.mul_(self.cos).addcmul_(swapped, self.sin)


class Rotary(nn.Module):
    """The table of angles for every position below `max_positions`."""

    def __init__(
        self,
        rope: RopeConfig,
        *,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(rope, max_positions))
        cos, sin = angles.cos(), angles.sin()
        if isinstance(rope.scaling, YarnScaling | LongRopeScaling):
            cos.mul_(rope.scaling.attention_factor)
            sin.mul_(rope.scaling.attention_factor)
        self._cos = torch.cat((cos, cos), dim=-1).unsqueeze(1).to(device, dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).unsqueeze(1).to(device, dtype)

    def forward(self, positions: Tensor) -> Rotation:
        """Return the angles of these positions. [rows]"""
        return Rotation(self._cos.index_select(0, positions), self._sin.index_select(0, positions))
