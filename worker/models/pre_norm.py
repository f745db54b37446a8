"""The layer that most families have: attention and feed-forward, each behind its norm.

The residual is added inside the norm that follows.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from worker.attention.base import StepAttention
from worker.layers.norm import RMSNorm
from worker.layers.rotary import Rotation
from worker.models.self_attention import SelfAttention
from worker.weights import Weight, norm_weight


class AddingBlock(Protocol):
    """What follows attention in a layer: a feed-forward block, or experts."""

    def add(self, hidden: Tensor, residual: Tensor) -> Tensor | None:
        """Return what the residual is still to get, None if it has it. Both [rows, hidden]."""
        ...

    def weights(self, prefix: str) -> Iterator[Weight]:
        """Yield where each checkpoint tensor goes."""
        ...


class PreNormLayer(nn.Module):
    """x += attention(norm(x)), then x += feed_forward(norm(x))."""

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        attention: SelfAttention,
        feed_forward: AddingBlock,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(hidden_size, eps, dtype=dtype, device=device)
        self.attention = attention
        self.feed_forward_norm = RMSNorm(hidden_size, eps, dtype=dtype, device=device)
        self.feed_forward = feed_forward

    def forward(
        self,
        delta: Tensor | None,
        residual: Tensor,
        rotation: Rotation | None,
        attention: StepAttention,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Compute as `worker.models.causal_lm.DecoderLayer` says."""
        normed, residual = self.attention_norm.add(delta, residual)
        attended = self.attention(normed, rotation, attention)
        if wanted is not None:
            attended = attended.index_select(0, wanted)
            residual = residual.index_select(0, wanted)
        delta = self.attention.output.add(attended, residual)
        normed, residual = self.feed_forward_norm.add(delta, residual)
        return self.feed_forward.add(normed, residual), residual

    def weights(self, prefix: str) -> Iterator[Weight]:
        """Yield where each checkpoint tensor goes."""
        yield norm_weight(self.attention_norm, f"{prefix}input_layernorm")
        yield from self.attention.weights(f"{prefix}self_attn.")
        yield norm_weight(self.feed_forward_norm, f"{prefix}post_attention_layernorm")
        yield from self.feed_forward.weights(f"{prefix}mlp.")
