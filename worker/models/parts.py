"""The blocks of a layer as `ModelConfig` describes them."""

import torch

from worker.layers.experts import Experts, Router
from worker.layers.head_norm import HeadNorm
from worker.layers.projection_norm import ProjectionNorm
from worker.model_config import ModelConfig
from worker.models.feed_forward import FeedForward
from worker.models.mixture import Mixture, WeightNaming
from worker.models.self_attention import SelfAttention
from worker.parallel import TensorParallel
from worker.shard import HeadShards, divide_heads


def config_attention(
    config: ModelConfig,
    layer: int,
    *,
    is_fused: bool = False,
    group: TensorParallel,
    dtype: torch.dtype,
    device: torch.device,
) -> SelfAttention:
    """Return a layer's attention. `is_fused`: q, k and v are one tensor in the checkpoint."""
    heads = divide_heads(config.num_heads, config.num_kv_heads, rank=group.rank, size=group.size)
    return SelfAttention(
        layer,
        config.hidden_size,
        heads,
        config.head_dim,
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
        norm=_query_key_norm(config, heads, group=group, dtype=dtype, device=device),
        scale=config.residual_multiplier,
        has_sinks=config.has_sinks,
        is_fused=is_fused,
        group=group,
        dtype=dtype,
        device=device,
    )


def config_feed_forward(
    config: ModelConfig,
    *,
    is_fused: bool = False,
    group: TensorParallel,
    dtype: torch.dtype,
    device: torch.device,
) -> FeedForward:
    """Return a feed-forward block. `is_fused`: gate and up are one tensor in the checkpoint."""
    return FeedForward(
        config.hidden_size,
        config.intermediate_size,
        bias=config.mlp_bias,
        activation=config.activation,
        scale=config.residual_multiplier,
        is_fused=is_fused,
        group=group,
        dtype=dtype,
        device=device,
    )


def config_mixture(
    config: ModelConfig,
    naming: WeightNaming,
    *,
    group: TensorParallel,
    dtype: torch.dtype,
    device: torch.device,
) -> Mixture:
    """Return a mixture of experts, whose tensors are called as `naming` says."""
    experts = config.experts
    assert experts is not None, "the model has experts"
    router = Router(
        config.hidden_size,
        experts.num_experts,
        experts.experts_per_token,
        bias=experts.has_bias,
        is_renormalised=experts.is_renormalised,
        dtype=dtype,
        device=device,
    )
    blocks = Experts(
        experts.num_experts,
        config.hidden_size,
        experts.intermediate_size,
        bias=experts.has_bias,
        clamp=experts.clamp,
        is_packed=experts.is_packed,
        group=group,
        dtype=dtype,
        device=device,
    )
    return Mixture(router, blocks, naming)


def _query_key_norm(
    config: ModelConfig,
    heads: HeadShards,
    *,
    group: TensorParallel,
    dtype: torch.dtype,
    device: torch.device,
) -> HeadNorm | ProjectionNorm | None:
    match config.query_key_norm:
        case None:
            return None
        case "head":
            return HeadNorm(
                heads.query.size,
                heads.key_value.size,
                config.head_dim,
                config.rms_norm_eps,
                offset=config.norm_offset,
                dtype=dtype,
                device=device,
            )
        case "projection":
            return ProjectionNorm(
                heads,
                config.head_dim,
                config.rms_norm_eps,
                group=group,
                dtype=dtype,
                device=device,
            )
