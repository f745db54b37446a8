"""Products of weights in 4 bits, each group of a channel's inputs with a scale and a zero point.

    weight[n, k] = (code of n, k - zero of n and k's group) · scale of n and k's group

One layout, whatever the checkpoint's: `Int4Weight`. What is multiplied is that value rounded to the
model's dtype, here and on a GPU. There few rows read the codes themselves, and many rows a weight
that is multiplied out first, into scratch that all products share (`worker.kernels.int4`).

Elsewhere the weight is multiplied out once: that says what a GPU computes, and saves no memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from worker.layers.linear import OneDnnProduct, PlainProduct, Product, multiply, runs_on_onednn

if TYPE_CHECKING:
    from worker.kernels.products import Scratch

CODES_A_WORD = 8
LEAST_GROUP = 16
"""Inputs that tensor cores take at once, at least: groups are multiples of it."""
FEW_ROWS = 64
"""Up to so many rows are multiplied by the codes."""


def pack(codes: Tensor) -> Tensor:
    """Put codes of 0 to 15, [rows, size], into words, [rows, size / 8] int32, lowest bits first."""
    words = codes.view(len(codes), -1, CODES_A_WORD).int()
    packed = words[:, :, 0].clone()
    for place in range(1, CODES_A_WORD):
        packed |= words[:, :, place] << (4 * place)
    return packed


def unpack(words: Tensor) -> Tensor:
    """Return the codes of words in one more dimension, [..., 8] uint8, lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts & 15).to(torch.uint8)


class SharedScratch:
    """Memory that products use one after the other. All reserve before the first takes any."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._size = 0
        self._numbers: Tensor | None = None
        self._partial: Scratch | None = None

    def reserve(self, size: int) -> None:
        """Ask for so many numbers."""
        assert self._numbers is None, "all reserve before the first takes"
        self._size = max(self._size, size)

    def take(self, rows: int, columns: int) -> Tensor:
        """Return [rows, columns] of it, in no state."""
        if self._numbers is None:
            self._numbers = torch.empty(self._size, dtype=self._dtype, device=self._device)
        return self._numbers[: rows * columns].view(rows, columns)

    def partial(self, allocate: Callable[[torch.device], "Scratch"]) -> "Scratch":
        """Return where programs that share a tile meet, allocated the first time."""
        if self._partial is None:
            self._partial = allocate(self._device)
        return self._partial


@dataclass(slots=True)
class Int4Weight:
    """A weight in 4 bits: `QuantizedWeight`."""

    codes: Tensor
    """[out, in / 8] int32, each of 8 codes in the order of inputs, lowest bits first"""
    scales: Tensor
    """[out, groups] float16"""
    zeros: Tensor
    """[out, groups] uint8: 0 to 16"""
    dtype: torch.dtype
    """Of the values, and of x."""
    scratch: SharedScratch
    """Of all the weights of a rank."""
    order: Tensor | None = None
    """[in] int64: the input of x that each input here is; None: the same."""

    @staticmethod
    def empty(
        out_features: int,
        in_features: int,
        group: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        scratch: SharedScratch,
    ) -> "Int4Weight":
        """Return one without values, of groups of so many inputs."""
        assert in_features % group == 0, "groups are whole"
        assert group % LEAST_GROUP == 0, f"groups of {group} are no multiple of {LEAST_GROUP}"
        if device.type == "cuda":
            scratch.reserve(out_features * in_features)
        groups = in_features // group
        return Int4Weight(
            torch.empty(out_features, in_features // 8, dtype=torch.int32, device=device),
            torch.empty(out_features, groups, dtype=torch.float16, device=device),
            torch.empty(out_features, groups, dtype=torch.uint8, device=device),
            dtype,
            scratch,
        )

    @staticmethod
    def quantize(weight: Tensor, group: int, scratch: SharedScratch) -> "Int4Weight":
        """Round a weight, [out, in], between each group's least and largest value.

        For weights that have no meaning; checkpoints are quantised with more care.
        """
        result = Int4Weight.empty(
            *(len(weight), weight.shape[1], group),
            dtype=weight.dtype,
            device=weight.device,
            scratch=scratch,
        )
        values = weight.float().view(len(weight), -1, group)
        low, high = values.amin(2).clamp_(max=0), values.amax(2).clamp_(min=0)
        result.scales.copy_(((high - low) / 15).clamp_(min=1e-7))
        scales = result.scales.float()
        result.zeros.copy_((-low / scales).round_().clamp_(0, 15))
        codes = (values / scales[:, :, None] + result.zeros[:, :, None]).round_().clamp_(0, 15)
        result.codes.copy_(pack(codes.view(weight.shape).to(torch.uint8)))
        return result

    @property
    def in_features(self) -> int:
        """Inputs."""
        return self.codes.shape[1] * CODES_A_WORD

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return self.in_features // self.scales.shape[1]

    def values(self) -> Tensor:
        """Return what is multiplied, [out, in], inputs in the order of the codes."""
        codes = unpack(self.codes).view(*self.scales.shape, self.group)
        wide = (codes.float() - self.zeros[:, :, None]) * self.scales[:, :, None].float()
        return wide.view(len(codes), -1).to(self.dtype)

    def product(self, bias: Tensor | None, out_dtype: torch.dtype) -> Product:
        """Return the product with this weight."""
        product: Product
        if self.codes.is_cuda:
            product = Int4Product(self, bias, out_dtype)
        else:
            values = self.values()
            if runs_on_onednn(values.device, values.dtype):
                product = OneDnnProduct(values, bias)
            else:
                product = PlainProduct(values, bias, out_dtype)
        return product if self.order is None else OrderedProduct(product, self.order)


class OrderedProduct:
    """A product whose weight has its inputs in an order of its own."""

    def __init__(self, product: Product, order: Tensor) -> None:
        """`order`, [in] int64: which of x's numbers each of the weight's inputs meets."""
        self._product = product
        self._order = order

    def __call__(self, x: Tensor) -> Tensor:
        """Return x · weightᵀ + bias."""
        return self._product(x.index_select(1, self._order))


class Int4Product:
    """The product on a GPU: by the codes for few rows, else by what they stand for."""

    def __init__(self, weight: Int4Weight, bias: Tensor | None, out_dtype: torch.dtype) -> None:
        # Imported here because Triton is there only where there are GPUs.
        from worker.kernels import int4  # noqa: PLC0415

        self._kernels = int4
        self._weight = weight
        self._bias = bias
        self._out_dtype = out_dtype
        # Both now, as a step may run in a graph, whose memory is its own.
        self._values = weight.scratch.take(len(weight.codes), weight.in_features)
        self._partial = weight.scratch.partial(int4.allocate_scratch)

    def __call__(self, x: Tensor) -> Tensor:
        """Return x · weightᵀ + bias."""
        weight = self._weight
        if len(x) <= FEW_ROWS:
            return self._kernels.product(x, weight, self._bias, self._partial, self._out_dtype)
        self._kernels.multiply_out(weight, self._values)
        return multiply(x, self._values, self._bias, self._out_dtype)
