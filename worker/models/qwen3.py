"""Qwen3 (dense): the shared decoder, whose queries and keys are normalised head by head."""

import torch

from worker.layers.head_norm import HeadNorm
from worker.model_config import ModelConfig
from worker.models.causal_lm import CausalLM
from worker.models.self_attention import SelfAttention
from worker.parallel import TensorParallel
from worker.shard import divide_heads


def build_qwen3(
    config: ModelConfig,
    *,
    group: TensorParallel,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> CausalLM:
    """Return a rank's part of a Qwen3, its weights still empty."""
    heads = divide_heads(config.num_heads, config.num_kv_heads, rank=group.rank, size=group.size)
    attentions = [
        SelfAttention(
            layer,
            config.hidden_size,
            heads,
            config.head_dim,
            bias=config.attention_bias,
            head_norm=HeadNorm(
                heads.query.size,
                heads.key_value.size,
                config.head_dim,
                config.rms_norm_eps,
                dtype=dtype,
                device=device,
            ),
            group=group,
            dtype=dtype,
            device=device,
        )
        for layer in range(config.num_layers)
    ]
    return CausalLM(
        config, attentions, group=group, max_model_len=max_model_len, dtype=dtype, device=device
    )
