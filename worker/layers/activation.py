"""The gated activation of the feed-forward block."""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import Tensor

from worker.model_config import Activation


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up. [rows, 2 · size], gate then up -> [rows, size]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_multiply(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) · up, gelu by its tanh formula. [rows, 2 · size] -> [rows, size]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def gated_activation(kind: Activation, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return `silu_and_multiply` or `gelu_and_multiply`, on a GPU as one kernel."""
    if device.type != "cuda":
        return silu_and_multiply if kind == "silu" else gelu_and_multiply
    # Imported here because Triton is there only where there are GPUs.
    from worker.kernels.activation import gelu_multiply, silu_multiply  # noqa: PLC0415

    activation: Callable[[Tensor], Tensor] = silu_multiply if kind == "silu" else gelu_multiply
    return activation
