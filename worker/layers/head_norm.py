"""Root-mean-square normalisation of every query and key head before rotation."""

import math

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import Tensor, nn


class HeadNorm(nn.Module):
    """Each head x / sqrt(mean(x²) + eps) · (offset + weight), the weights of queries and of keys.

    Queries and keys lie side by side and are done together, in place. On CPU by the head's length,
    for the reason that `worker.layers.norm` gives.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        *,
        offset: float = 0.0,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight: Tensor = nn.Parameter(
            torch.empty(2, head_dim, dtype=dtype, device=device), requires_grad=False
        )
        """[2, head_dim]: of queries, of keys."""
        self.offset = offset
        self.gain: Tensor = self.weight.data
        """[2, head_dim], offset + weight once prepared; float32 where there is an offset."""
        self._counts = (num_heads, num_kv_heads)
        self._shape = (head_dim,)
        self.eps = eps
        self._floor = torch.tensor(math.sqrt(head_dim * eps), device=device)
        self._scales: Tensor | None = None

    def normalize_(self, heads: Tensor) -> None:
        """Normalise in place. [rows, query heads then key heads, head_dim]"""
        assert self._scales is not None, "the weights are in place before the first step"
        if heads.device.type == "cpu":
            length = torch.linalg.vector_norm(heads, dim=-1, keepdim=True, dtype=torch.float32)
            heads.div_(length.hypot_(self._floor)).mul_(self._scales)
        else:
            normed = F.rms_norm(heads, self._shape, None, self.eps)
            if self.offset:
                heads.copy_(normed * self._scales)
            else:
                torch.mul(normed, self._scales, out=heads)

    def prepare(self) -> None:
        """Spread the weights over the heads, now that they have their values. Called once."""
        if self.offset:
            self.gain = self.weight.float() + self.offset
        counts = torch.tensor(self._counts, device=self.weight.device)
        scales = self.gain.repeat_interleave(counts, dim=0)
        if self.weight.device.type == "cpu":
            # |x| = rms(x) · sqrt(head_dim)
            scales = scales.float() * math.sqrt(self._shape[0])
        self._scales = scales
