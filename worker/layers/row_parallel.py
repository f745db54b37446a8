"""A product whose inputs are divided among the ranks, and the sum that completes it."""

import torch
from torch import Tensor, nn

from worker.layers.linear import Linear
from worker.parallel import TensorParallel
from worker.shard import divide


class RowParallelLinear(nn.Module):
    """(x · weightᵀ + bias) · scale, of which each rank has a part of x.

    [rows, in / size] -> [rows, out]. `in_features` counts the inputs of all ranks, whose number
    must divide it. Rank 0 adds the bias.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        scale: float = 1.0,
        group: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._group = group
        self._scale = scale
        self.has_bias = bias
        self.inputs = divide(in_features, rank=group.rank, size=group.size)
        self.product = Linear(
            self.inputs.size,
            out_features,
            bias=bias and group.rank == 0,
            dtype=dtype,
            device=device,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the whole product on every rank."""
        whole = self._group.all_reduce(self.product(x))
        return whole if self._scale == 1.0 else whole.mul_(self._scale)

    def add(self, x: Tensor, residual: Tensor) -> Tensor | None:
        """Return what the residual, [rows, out], still lacks of the product: all, or None if none.

        A rank alone may add it in the product itself (`Linear.add_to`).
        """
        if self._group.size == 1 and self.product.add_to(residual, x, self._scale):
            return None
        return self.forward(x)
