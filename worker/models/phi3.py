"""Phi-3 and Phi-4: Llama's layers, with fused tensors in the checkpoint.

q, k and v are one there, and gate and up. A rank takes its rows of each part of such a tensor.
"""

import torch

from worker.model_config import ModelConfig
from worker.models.causal_lm import CausalLM
from worker.models.parts import config_attention, config_feed_forward
from worker.models.pre_norm import PreNormLayer
from worker.parallel import TensorParallel


def build_phi3(
    config: ModelConfig,
    *,
    group: TensorParallel,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> CausalLM:
    """Return a rank's part of a Phi-3, its weights still empty."""
    layers = [
        PreNormLayer(
            config.hidden_size,
            config.rms_norm_eps,
            config_attention(config, layer, is_fused=True, group=group, dtype=dtype, device=device),
            config_feed_forward(config, is_fused=True, group=group, dtype=dtype, device=device),
            dtype=dtype,
            device=device,
        )
        for layer in range(config.num_layers)
    ]
    return CausalLM(
        config, layers, group=group, max_model_len=max_model_len, dtype=dtype, device=device
    )
