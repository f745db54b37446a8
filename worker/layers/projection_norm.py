"""Root-mean-square normalisation of all query heads together, and of all key heads."""

import torch
from torch import Tensor, nn

from worker.parallel import TensorParallel
from worker.shard import HeadShards


class ProjectionNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the whole projection of queries, and that of keys.

    A rank has a part of each, so the ranks add up their squares: two numbers a row. A key head that
    several ranks hold is counted by each of them; all are held equally often.
    """

    def __init__(
        self,
        heads: HeadShards,
        head_dim: int,
        eps: float,
        *,
        group: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._group = group
        self._eps = eps
        self.heads = heads
        self.head_dim = head_dim
        self.query_weight: Tensor = nn.Parameter(
            torch.empty(heads.query.size * head_dim, dtype=dtype, device=device),
            requires_grad=False,
        )
        """[heads · head_dim], this rank's."""
        self.key_weight: Tensor = nn.Parameter(
            torch.empty(heads.key_value.size * head_dim, dtype=dtype, device=device),
            requires_grad=False,
        )
        """[kv_heads · head_dim], this rank's."""
        counted = group.size * heads.key_value.size
        self._counts = torch.tensor(
            [heads.query.whole * head_dim, counted * head_dim], dtype=torch.float32, device=device
        )

    def normalize_(self, heads: Tensor) -> None:
        """Normalise in place. [rows, query heads then key heads then others, head_dim]"""
        num_query, num_kv = self.heads.query.size, self.heads.key_value.size
        query = heads[:, :num_query].flatten(1)
        key = heads[:, num_query : num_query + num_kv].flatten(1)
        squares = torch.stack(
            [part.float().square().sum(dim=-1) for part in (query, key)], dim=-1
        )  # [rows, 2]
        mean = self._group.all_reduce(squares).div_(self._counts)
        inverse = mean.add_(self._eps).rsqrt_()
        for first, count, part, weight, scale in (
            (0, num_query, query, self.query_weight, inverse[:, :1]),
            (num_query, num_kv, key, self.key_weight, inverse[:, 1:]),
        ):
            normed = part * scale * weight
            heads[:, first : first + count] = normed.view(len(heads), count, self.head_dim)
