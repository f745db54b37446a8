"""The projections around attention, on this rank's heads."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from worker.attention.base import ProjectedHeads, StepAttention
from worker.layers.head_norm import HeadNorm
from worker.layers.linear import Linear
from worker.layers.projection_norm import ProjectionNorm
from worker.layers.rotary import Rotation
from worker.layers.row_parallel import RowParallelLinear
from worker.parallel import TensorParallel
from worker.shard import HeadShards
from worker.weights import (
    Weight,
    fused_weights,
    head_norm_weights,
    projection_norm_weights,
    row_parallel_weights,
    stacked_weights,
)


class SelfAttention(nn.Module):
    """Queries, keys and values from one product, and attention; `output` is what follows.

    A norm, where a model has one, is applied to queries and keys before they are rotated: to each
    head, or to all heads together.
    """

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        heads: HeadShards,
        head_dim: int,
        *,
        qkv_bias: bool,
        output_bias: bool,
        norm: HeadNorm | ProjectionNorm | None = None,
        scale: float = 1.0,
        has_sinks: bool = False,
        is_fused: bool = False,
        group: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`scale` is the output's; `is_fused`: q, k and v are one tensor in the checkpoint."""
        super().__init__()
        self._layer = layer
        self._heads = heads
        self._head_dim = head_dim
        self._is_fused = is_fused
        self.qkv = Linear(
            hidden_size,
            (heads.query.size + 2 * heads.key_value.size) * head_dim,
            bias=qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.head_norm = norm if isinstance(norm, HeadNorm) else None
        self.projection_norm = norm if isinstance(norm, ProjectionNorm) else None
        self.sinks: Tensor | None = (
            nn.Parameter(
                torch.empty(heads.query.size, dtype=torch.float32, device=device),
                requires_grad=False,
            )
            if has_sinks
            else None
        )
        """[heads]"""
        self.output = RowParallelLinear(
            heads.query.whole * head_dim,
            hidden_size,
            bias=output_bias,
            scale=scale,
            group=group,
            dtype=dtype,
            device=device,
        )

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation | None,
        attention: StepAttention,
    ) -> Tensor:
        """Attend. [rows, hidden] -> [rows, heads · head_dim], the input of `output`"""
        heads = self.qkv(hidden).view(len(hidden), -1, self._head_dim)
        if self.projection_norm is not None:
            self.projection_norm.normalize_(heads)
        projected = ProjectedHeads(
            heads=heads,
            num_heads=self._heads.query.size,
            num_kv_heads=self._heads.key_value.size,
            head_norm=self.head_norm,
            rotation=rotation,
            sinks=self.sinks,
        )
        return attention.attend(self._layer, projected)

    def weights(self, prefix: str) -> Iterator[Weight]:
        """Yield where each checkpoint tensor goes."""
        query = self._heads.query.scaled(self._head_dim)
        key_value = self._heads.key_value.scaled(self._head_dim)
        if self._is_fused:
            yield from fused_weights(self.qkv, f"{prefix}qkv_proj", (query, key_value, key_value))
        else:
            yield from stacked_weights(
                self.qkv,
                {
                    f"{prefix}q_proj": query,
                    f"{prefix}k_proj": key_value,
                    f"{prefix}v_proj": key_value,
                },
            )
        names = (f"{prefix}q_norm", f"{prefix}k_norm")
        if self.head_norm is not None:
            yield from head_norm_weights(self.head_norm, *names)
        if self.projection_norm is not None:
            yield from projection_norm_weights(self.projection_norm, *names)
        if self.sinks is not None:
            heads = self._heads.query
            yield Weight(
                name=f"{prefix}sinks",
                target=self.sinks,
                whole_size=heads.whole,
                start=heads.start,
            )
        yield from row_parallel_weights(self.output, f"{prefix}o_proj")
