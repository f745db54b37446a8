"""OLMo 2: norms behind attention and feed-forward instead of before them.

Each block reads the residual itself; what it adds is normalised first. Queries and keys are
normalised over their whole projections.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from worker.attention.base import StepAttention
from worker.layers.norm import RMSNorm
from worker.layers.rotary import Rotation
from worker.model_config import ModelConfig
from worker.models.causal_lm import CausalLM
from worker.models.feed_forward import FeedForward
from worker.models.parts import config_attention, config_feed_forward
from worker.models.self_attention import SelfAttention
from worker.parallel import TensorParallel
from worker.weights import Weight, norm_weight


def build_olmo2(
    config: ModelConfig,
    *,
    group: TensorParallel,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> CausalLM:
    """Return a rank's part of an OLMo 2, its weights still empty."""
    layers = [
        PostNormLayer(
            config.hidden_size,
            config.rms_norm_eps,
            config_attention(config, layer, group=group, dtype=dtype, device=device),
            config_feed_forward(config, group=group, dtype=dtype, device=device),
            dtype=dtype,
            device=device,
        )
        for layer in range(config.num_layers)
    ]
    return CausalLM(
        config, layers, group=group, max_model_len=max_model_len, dtype=dtype, device=device
    )


class PostNormLayer(nn.Module):
    """x += norm(attention(x)), then x += norm(feed_forward(x))."""

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        attention: SelfAttention,
        feed_forward: FeedForward,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.attention_norm = RMSNorm(hidden_size, eps, dtype=dtype, device=device)
        self.feed_forward = feed_forward
        self.feed_forward_norm = RMSNorm(hidden_size, eps, dtype=dtype, device=device)
        self._dtype = dtype

    def forward(
        self,
        delta: Tensor | None,
        residual: Tensor,
        rotation: Rotation | None,
        attention: StepAttention,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Compute as `worker.models.causal_lm.DecoderLayer` says."""
        if delta is not None:
            residual = residual.add_(delta)
        attended = self.attention(residual.to(self._dtype), rotation, attention)
        if wanted is not None:
            attended = attended.index_select(0, wanted)
            residual = residual.index_select(0, wanted)
        residual = residual.add_(self.attention_norm(self.attention.output(attended)))
        return self.feed_forward_norm(self.feed_forward(residual.to(self._dtype))), residual

    def weights(self, prefix: str) -> Iterator[Weight]:
        """Yield where each checkpoint tensor goes."""
        yield from self.attention.weights(f"{prefix}self_attn.")
        yield norm_weight(self.attention_norm, f"{prefix}post_attention_layernorm")
        yield from self.feed_forward.weights(f"{prefix}mlp.")
        yield norm_weight(self.feed_forward_norm, f"{prefix}post_feedforward_layernorm")
