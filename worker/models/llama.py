"""Llama: the shared decoder with plain attention over grouped KV heads."""

import torch

from worker.model_config import ModelConfig
from worker.models.causal_lm import CausalLM
from worker.models.self_attention import SelfAttention
from worker.parallel import TensorParallel
from worker.shard import divide_heads


def build_llama(
    config: ModelConfig,
    *,
    group: TensorParallel,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> CausalLM:
    """Return a rank's part of a Llama, its weights still empty."""
    heads = divide_heads(config.num_heads, config.num_kv_heads, rank=group.rank, size=group.size)
    attentions = [
        SelfAttention(
            layer,
            config.hidden_size,
            heads,
            config.head_dim,
            bias=config.attention_bias,
            head_norm=None,
            group=group,
            dtype=dtype,
            device=device,
        )
        for layer in range(config.num_layers)
    ]
    return CausalLM(
        config, attentions, group=group, max_model_len=max_model_len, dtype=dtype, device=device
    )
