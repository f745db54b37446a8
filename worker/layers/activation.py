"""The gated activation of the feed-forward block."""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import Tensor


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up. [rows, 2 · size], gate then up -> [rows, size]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gated_activation(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return `silu_and_multiply`, on a GPU as one kernel."""
    if device.type != "cuda":
        return silu_and_multiply
    # Imported here because Triton is there only where there are GPUs.
    from worker.kernels.activation import silu_multiply  # noqa: PLC0415

    activation: Callable[[Tensor], Tensor] = silu_multiply
    return activation
