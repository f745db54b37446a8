"""Root-mean-square normalisation, alone and after adding to the residual."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import Tensor, nn


class NormKernels(NamedTuple):
    """The norm in one launch, as a GPU has it."""

    norm: Callable[[Tensor, Tensor, float, torch.dtype], Tensor]
    """(x, weight, eps, dtype) -> x normalised, in the dtype"""
    add_norm: Callable[[Tensor, Tensor, Tensor, float, torch.dtype], Tensor]
    """(x, residual, weight, eps, dtype) -> the sum normalised; the sum is then in `residual`."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · (offset + weight) over the last dimension, computed in float32.

    The result has the weight's dtype; x may be float32 where that is not. The offset is 0 or, in
    models whose weights are small numbers around 0, 1; their sum is kept in float32.

    On CPU `F.rms_norm` is nine small operators. There the norm is computed from the length of x,
    since sqrt(mean(x²) + eps) = hypot(|x|, sqrt(size · eps)) / sqrt(size): four operators. On a GPU
    it is one kernel, together with the addition before it.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        offset: float = 0.0,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.offset = offset
        self.weight: Tensor = nn.Parameter(
            torch.empty(size, dtype=dtype, device=device), requires_grad=False
        )
        """[size]"""
        self._shape = (size,)
        self._eps = eps
        self._gain: Tensor = self.weight.data
        """[size], offset + weight once prepared; float32 where there is an offset."""
        self._scaled: Tensor | None = None
        self._kernels: NormKernels | None = None
        self._floor = torch.tensor(math.sqrt(size * eps), device=device)

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalised. [rows, size] -> [rows, size]"""
        if self._kernels is not None:
            return self._kernels.norm(x, self._gain, self._eps, self.weight.dtype)
        if self._scaled is None:
            weight = self._gain.to(x.dtype)
            return F.rms_norm(x, self._shape, weight, self._eps).to(self.weight.dtype)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return x.div(length.hypot_(self._floor)).mul_(self._scaled).to(self.weight.dtype)

    def add(self, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add x to the residual; return the sum normalised, and the sum. May reuse `residual`.

        None: there is nothing to add.
        """
        if x is None:
            return self.forward(residual), residual
        if self._kernels is not None:
            normed = self._kernels.add_norm(x, residual, self._gain, self._eps, self.weight.dtype)
            return normed, residual
        residual = residual.add_(x)
        return self.forward(residual), residual

    def prepare(self) -> None:
        """Choose the way to compute, now that the weight has its values. Called once."""
        if self.offset:
            self._gain = self.weight.float() + self.offset
        if self.weight.device.type == "cpu":
            self._scaled = self._gain.float() * math.sqrt(self._shape[0])
        elif self.weight.device.type == "cuda":
            # Imported here because Triton is there only where there are GPUs.
            from worker.kernels.norm import add_rms_norm, rms_norm  # noqa: PLC0415

            self._kernels = NormKernels(norm=rms_norm, add_norm=add_rms_norm)
