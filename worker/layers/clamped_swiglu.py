"""GPT-OSS' gated activation."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedSwiglu:
    """gate · sigmoid(alpha · gate) · (up + 1), the gate at most `limit` and up within ± `limit`."""

    alpha: float
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the activation. [rows, size] each"""
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        return (gate * torch.sigmoid(gate * self.alpha)).mul_(up.add_(1.0))
