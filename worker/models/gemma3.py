"""Gemma 3, its text model: norms before and behind attention and feed-forward.

Norms scale by 1 + weight, also those of query and key heads. Most layers attend to a window and
rotate by a base of their own; the embedding is scaled by √hidden_size (`worker.families`).
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


def build_gemma3(
    config: ModelConfig,
    *,
    group: TensorParallel,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> CausalLM:
    """Return a rank's part of a Gemma 3, its weights still empty."""
    return CausalLM(
        config,
        _layers(config, group, dtype, device),
        group=group,
        max_model_len=max_model_len,
        dtype=dtype,
        device=device,
    )


def build_gemma3_text_part(
    config: ModelConfig,
    *,
    group: TensorParallel,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> CausalLM:
    """Return the same of a checkpoint that reads images too, of which only the text is computed."""
    return CausalLM(
        config,
        _layers(config, group, dtype, device),
        weight_prefix="language_model.",
        ignored_prefixes=("vision_tower.", "multi_modal_projector."),
        group=group,
        max_model_len=max_model_len,
        dtype=dtype,
        device=device,
    )


def _layers(
    config: ModelConfig, group: TensorParallel, dtype: torch.dtype, device: torch.device
) -> list[nn.Module]:
    return [
        SandwichNormLayer(
            config,
            config_attention(config, layer, group=group, dtype=dtype, device=device),
            config_feed_forward(config, group=group, dtype=dtype, device=device),
            dtype=dtype,
            device=device,
        )
        for layer in range(config.num_layers)
    ]


class SandwichNormLayer(nn.Module):
    """x += norm(attention(norm(x))), then x += norm(feed_forward(norm(x)))."""

    def __init__(
        self,
        config: ModelConfig,
        attention: SelfAttention,
        feed_forward: FeedForward,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.attention_norm = _norm(config, dtype, device)
        self.attention = attention
        self.attended_norm = _norm(config, dtype, device)
        self.feed_forward_norm = _norm(config, dtype, device)
        self.feed_forward = feed_forward
        self.fed_norm = _norm(config, dtype, device)

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
        delta = self.attended_norm(self.attention.output(attended))
        normed, residual = self.feed_forward_norm.add(delta, residual)
        return self.fed_norm(self.feed_forward(normed)), residual

    def weights(self, prefix: str) -> Iterator[Weight]:
        """Yield where each checkpoint tensor goes."""
        yield norm_weight(self.attention_norm, f"{prefix}input_layernorm")
        yield from self.attention.weights(f"{prefix}self_attn.")
        yield norm_weight(self.attended_norm, f"{prefix}post_attention_layernorm")
        yield norm_weight(self.feed_forward_norm, f"{prefix}pre_feedforward_layernorm")
        yield from self.feed_forward.weights(f"{prefix}mlp.")
        yield norm_weight(self.fed_norm, f"{prefix}post_feedforward_layernorm")


def _norm(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> RMSNorm:
    return RMSNorm(
        config.hidden_size,
        config.rms_norm_eps,
        offset=config.norm_offset,
        dtype=dtype,
        device=device,
    )
