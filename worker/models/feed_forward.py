"""The gated feed-forward block, on this rank's part of the intermediate size."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from worker.layers.activation import gated_activation
from worker.layers.linear import Linear
from worker.layers.row_parallel import RowParallelLinear
from worker.parallel import TensorParallel
from worker.weights import Weight, row_parallel_weights, stacked_weights


class FeedForward(nn.Module):
    """down(silu(gate(x)) · up(x)), gate and up from one product."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        group: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.down = RowParallelLinear(
            intermediate_size, hidden_size, bias=bias, group=group, dtype=dtype, device=device
        )
        self.gate_up = Linear(
            hidden_size, 2 * self.down.inputs.size, bias=bias, dtype=dtype, device=device
        )
        self._activate = gated_activation(device)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor | None:
        """Return what the residual is still to get, None if it has it. Both [rows, hidden]."""
        return self.down.add(self._activate(self.gate_up(hidden)), residual)

    def weights(self, prefix: str) -> Iterator[Weight]:
        """Yield where each checkpoint tensor goes."""
        part = self.down.inputs
        yield from stacked_weights(
            self.gate_up, {f"{prefix}gate_proj": part, f"{prefix}up_proj": part}
        )
        yield from row_parallel_weights(self.down, f"{prefix}down_proj")
