"""Llama, and every family that differs from it only in what `ModelConfig` says.

Mistral    layers may attend to a window
Qwen2      q, k and v have biases; later layers may attend to a window
Qwen3      queries and keys are normalised head by head
SmolLM3    some layers do not rotate
Granite    embedding, residual, scores and logits are scaled
"""

import torch

from worker.model_config import ModelConfig
from worker.models.causal_lm import CausalLM
from worker.models.parts import config_attention, config_feed_forward
from worker.models.pre_norm import PreNormLayer
from worker.parallel import TensorParallel


def build_llama(
    config: ModelConfig,
    *,
    group: TensorParallel,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> CausalLM:
    """Return a rank's part of such a model, its weights still empty."""
    layers = [
        PreNormLayer(
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
