"""Root-mean-square normalisation, alone and after adding to the residual."""

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, computed in float32 at least."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight: Tensor = nn.Parameter(
            torch.empty(size, dtype=dtype, device=device), requires_grad=False
        )
        """[size]"""
        self._shape = (size,)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalised."""
        return F.rms_norm(x, self._shape, self.weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add x to the residual; return the sum normalised, and the sum. May reuse `residual`."""
        residual = residual.add_(x)
        return self.forward(residual), residual
