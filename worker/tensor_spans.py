"""This rank's parts of a checkpoint's tensors, by the outputs and inputs that they concern."""

from typing import NamedTuple

import torch
from torch import Tensor

from worker.weights import Weight


class Span(NamedTuple):
    """This rank's part of a dimension."""

    whole: int
    start: int
    end: int

    @property
    def size(self) -> int:
        """How many there are in it."""
        return self.end - self.start

    def coarse(self, size: int) -> "Span":
        """Return the runs of `size` that hold it."""
        return Span(-(-self.whole // size), self.start // size, -(-self.end // size))

    def run_of_each(self, size: int, *, step: int = 1) -> Tensor:
        """Return, for every `step`th number in it, which of those runs holds it, from 0."""
        return torch.arange(self.start, self.end, step) // size - self.start // size


def spans(weight: Weight) -> tuple[Span, Span]:
    """Return this rank's outputs and inputs of a product's weight in the checkpoint."""
    dims = [Span(size, 0, size) for size in weight.shape]
    dims[weight.dim] = Span(weight.shape[weight.dim], weight.start, weight.end)
    outputs, inputs = dims
    return outputs, inputs


def tensor_part(name: str, dtype: torch.dtype, *dims: Span) -> Weight:
    """Return the weight of this rank's part of a tensor, of which it divides one dimension at most.

    Its target is on the host.
    """
    target = torch.empty([dim.size for dim in dims], dtype=dtype)
    divided = [at for at, dim in enumerate(dims) if dim.size != dim.whole]
    if not divided:
        return Weight(name=name, target=target)
    (at,) = divided
    return Weight(name=name, target=target, whole_size=dims[at].whole, dim=at, start=dims[at].start)
