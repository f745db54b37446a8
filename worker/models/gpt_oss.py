"""GPT-OSS: experts in every layer, attention beside sinks, in every other layer within a window.

The router, the experts and all of attention's projections have biases; the experts' activation is
clamped. All of that is in `ModelConfig`; what is GPT-OSS' own is how its experts are stored.
"""

import torch

from worker.model_config import ModelConfig
from worker.models.causal_lm import CausalLM
from worker.models.mixture import joint_weights
from worker.models.parts import config_attention, config_mixture
from worker.models.pre_norm import PreNormLayer
from worker.parallel import TensorParallel


def build_gpt_oss(
    config: ModelConfig,
    *,
    group: TensorParallel,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> CausalLM:
    """Return a rank's part of a GPT-OSS, its weights still empty."""
    layers = [
        PreNormLayer(
            config.hidden_size,
            config.rms_norm_eps,
            config_attention(config, layer, group=group, dtype=dtype, device=device),
            config_mixture(config, joint_weights, group=group, dtype=dtype, device=device),
            dtype=dtype,
            device=device,
        )
        for layer in range(config.num_layers)
    ]
    return CausalLM(
        config, layers, group=group, max_model_len=max_model_len, dtype=dtype, device=device
    )
