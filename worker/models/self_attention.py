"""The projections around attention, on this rank's heads."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from worker.attention.base import StepAttention
from worker.layers.head_norm import HeadNorm
from worker.layers.linear import Linear
from worker.layers.rotary import Rotation
from worker.layers.row_parallel import RowParallelLinear
from worker.parallel import TensorParallel
from worker.shard import HeadShards
from worker.weights import Weight, head_norm_weights, row_parallel_weights, stacked_weights


class SelfAttention(nn.Module):
    """Queries, keys and values from one product; attention; the output's product.

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
        self._num_heads = heads.query.size
        self._num_kv_heads = heads.key_value.size
        self._num_rotated = self._num_heads + self._num_kv_heads
        self.qkv = Linear(
            hidden_size,
            (self._num_rotated + self._num_kv_heads) * head_dim,
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

    def forward(self, hidden: Tensor, rotation: Rotation, attention: StepAttention) -> Tensor:
        """[rows, hidden] -> [rows, hidden]"""
        heads = self.qkv(hidden).view(len(hidden), -1, self._head_dim)
        rotated = heads[:, : self._num_rotated]
        if self.head_norm is not None:
            self.head_norm.normalize_(rotated)
        rotation.turn_(rotated)
        query = heads[:, : self._num_heads]
        key_value = heads[:, self._num_heads :].unflatten(1, (2, self._num_kv_heads))
        projected: Tensor = self.output(attention.attend(self._layer, query, key_value))
        return projected

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
