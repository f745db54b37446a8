"""The gated feed-forward block, on this rank's part of the intermediate size."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from worker.layers.activation import gated_activation
from worker.layers.linear import Linear
from worker.layers.row_parallel import RowParallelLinear
from worker.model_config import Activation
from worker.parallel import TensorParallel
from worker.weights import Weight, fused_weights, row_parallel_weights, stacked_weights


class FeedForward(nn.Module):
    """down(activation(gate(x)) · up(x)) · scale, gate and up from one product."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        activation: Activation = "silu",
        scale: float = 1.0,
        is_fused: bool = False,
        group: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`is_fused`: gate and up are one tensor in the checkpoint."""
        super().__init__()
        self._is_fused = is_fused
        self.down = RowParallelLinear(
            intermediate_size,
            hidden_size,
            bias=bias,
            scale=scale,
            group=group,
            dtype=dtype,
            device=device,
        )
        self.gate_up = Linear(
            hidden_size, 2 * self.down.inputs.size, bias=bias, dtype=dtype, device=device
        )
        self._activate = gated_activation(activation, device)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the block's result whole. [rows, hidden] -> [rows, hidden]"""
        result: Tensor = self.down(self._activate(self.gate_up(hidden)))
        return result

    def add(self, hidden: Tensor, residual: Tensor) -> Tensor | None:
        """Return what the residual is still to get, None if it has it. Both [rows, hidden]."""
        return self.down.add(self._activate(self.gate_up(hidden)), residual)

    def weights(self, prefix: str) -> Iterator[Weight]:
        """Yield where each checkpoint tensor goes."""
        part = self.down.inputs
        if self._is_fused:
            yield from fused_weights(self.gate_up, f"{prefix}gate_up_proj", (part, part))
        else:
            yield from stacked_weights(
                self.gate_up, {f"{prefix}gate_proj": part, f"{prefix}up_proj": part}
            )
        yield from row_parallel_weights(self.down, f"{prefix}down_proj")
