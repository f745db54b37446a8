"""GPT-OSS' gated activation."""

import torch
from torch import Tensor

from worker.model_config import SwigluClamp


def clamped_swiglu(gate: Tensor, up: Tensor, clamp: SwigluClamp) -> Tensor:
    """Return gate · sigmoid(alpha · gate) · (up + 1), both clamped before. [rows, size] each"""
    gate = gate.clamp(max=clamp.limit)
    up = up.clamp(-clamp.limit, clamp.limit)
    return (gate * torch.sigmoid(gate * clamp.alpha)).mul_(up.add_(1.0))
