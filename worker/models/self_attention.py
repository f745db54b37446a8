"""The projections around attention, on this rank's heads."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from worker.attention.base import ProjectedHeads, StepAttention
from worker.layers.head_norm import HeadNorm
from worker.layers.linear import Linear
from worker.layers.rotary import Rotation
from worker.layers.row_parallel import RowParallelLinear
from worker.parallel import TensorParallel
from worker.shard import HeadShards
from worker.weights import Weight, head_norm_weights, row_parallel_weights, stacked_weights


class SelfAttention(nn.Module):
    """Queries, keys and values from one product, and attention; `output` is what follows.

    `head_norm`, where a model has one, is applied to queries and keys before they are rotated.
    """

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        heads: HeadShards,
        head_dim: int,
        *,
        bias: bool,
        head_norm: HeadNorm | None,
        group: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._layer = layer
        self._heads = heads
        self._head_dim = head_dim
        self.qkv = Linear(
            hidden_size,
            (heads.query.size + 2 * heads.key_value.size) * head_dim,
            bias=bias,
            dtype=dtype,
            device=device,
        )
        self.head_norm = head_norm
        self.output = RowParallelLinear(
            heads.query.whole * head_dim,
            hidden_size,
            bias=bias,
            group=group,
            dtype=dtype,
            device=device,
        )

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation,
        attention: StepAttention,
    ) -> Tensor:
        """Attend. [rows, hidden] -> [rows, heads · head_dim], the input of `output`"""
        projected = ProjectedHeads(
            heads=self.qkv(hidden).view(len(hidden), -1, self._head_dim),
            num_heads=self._heads.query.size,
            num_kv_heads=self._heads.key_value.size,
            head_norm=self.head_norm,
            rotation=rotation,
        )
        return attention.attend(self._layer, projected)

    def weights(self, prefix: str) -> Iterator[Weight]:
        """Yield where each checkpoint tensor goes."""
        parts = {
            f"{prefix}q_proj": self._heads.query.scaled(self._head_dim),
            f"{prefix}k_proj": self._heads.key_value.scaled(self._head_dim),
            f"{prefix}v_proj": self._heads.key_value.scaled(self._head_dim),
        }
        yield from stacked_weights(self.qkv, parts)
        if self.head_norm is not None:
            yield from head_norm_weights(self.head_norm, f"{prefix}q_norm", f"{prefix}k_norm")
        yield from row_parallel_weights(self.output, f"{prefix}o_proj")
