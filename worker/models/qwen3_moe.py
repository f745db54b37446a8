"""Qwen3-MoE: Qwen3 with a mixture of experts in most or all layers."""

import torch

from worker.model_config import ModelConfig
from worker.models.causal_lm import CausalLM
from worker.models.mixture import Mixture, separate_weights
from worker.models.parts import config_attention, config_feed_forward, config_mixture
from worker.models.pre_norm import AddingBlock, PreNormLayer
from worker.parallel import TensorParallel


def build_qwen3_moe(
    config: ModelConfig,
    *,
    group: TensorParallel,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> CausalLM:
    """Return a rank's part of a Qwen3-MoE, its weights still empty."""
    assert config.experts is not None, "the model has experts"

    def block(has_experts: bool) -> AddingBlock:
        if has_experts:
            mixture: Mixture = config_mixture(
                config, separate_weights, group=group, dtype=dtype, device=device
            )
            return mixture
        return config_feed_forward(config, group=group, dtype=dtype, device=device)

    layers = [
        PreNormLayer(
            config.hidden_size,
            config.rms_norm_eps,
            config_attention(config, layer, group=group, dtype=dtype, device=device),
            block(has_experts),
            dtype=dtype,
            device=device,
        )
        for layer, has_experts in enumerate(config.experts.layers)
    ]
    return CausalLM(
        config, layers, group=group, max_model_len=max_model_len, dtype=dtype, device=device
    )
