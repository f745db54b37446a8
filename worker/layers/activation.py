"""The gated activation of the feed-forward block."""

import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import Tensor


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up. [rows, 2 · size], gate then up -> [rows, size]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
