"""y = x · weightᵀ + bias, by the fastest product there is for the device and dtype.

Three products, chosen when weights are in place (`Linear.prepare`):

- `OneDnnProduct` on CPU: the weight reordered once into the blocks that oneDNN's kernels read. On
  SmolLM2's shapes it reads 20-35 GB/s at one row where `F.linear` reads 12, and does 160-200
  GFLOP/s at 16 rows or more where `F.linear` does 50-130 (float32, two Zen 4 cores;
  docs/performance/cpu.md).
- on a GPU that has been measured, what `worker.tuned_products` chooses by the number of rows.
- `PlainProduct` everywhere else: torch's own.

The oneDNN operators are those that torch's own compiler emits for frozen CPU models.
"""

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import Tensor, nn

ADDS_FROM_ROWS = 512
"""Rows from which on a product adds to the residual itself, and the residual has its dtype."""


class Product(Protocol):
    """Multiplies rows by one weight: [rows, in] -> [rows, out]."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return x · weightᵀ + bias."""
        ...


class ProductChoice(Protocol):
    """Chooses a product for a weight that is in place."""

    def choose(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Product | None:
        """Return a product with the weight, [out, in]; None where there is none better."""
        ...


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Return x · weightᵀ + bias by torch, [rows, out].

    float32 from 16 bits is for GPUs alone, and without a bias: the sums are in float32 there
    anyway, and are not rounded.
    """
    if out_dtype == weight.dtype:
        return F.linear(x, weight, bias)
    assert bias is None, "a product with a bias has its weight's dtype"
    return torch.mm(x, weight.t(), out_dtype)


class PlainProduct:
    """`multiply`: any device, any dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> None:
        self._weight = weight
        self._bias = bias
        self._out_dtype = out_dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Return x · weightᵀ + bias."""
        return multiply(x, self._weight, self._bias, self._out_dtype)


class OneDnnProduct:
    """oneDNN's matrix product over a weight reordered for it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        # The row count is a hint. Without one the layout suits every count from 1 to thousands;
        # hinting 1 gives a layout that is slow from 2 rows on.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = bias
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        """Return x · weightᵀ + bias."""
        y: Tensor = self._product(x, self._weight, self._bias, "none", [], "")
        return y


def runs_on_onednn(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this dtype natively on this device."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def fewest_rows(device: torch.device, dtype: torch.dtype) -> int:
    """Return how many rows a step is best padded to.

    oneDNN's kernels take 4 to 6 rows in the time of 1, or less: SmolLM2's five products take 22 ms
    at one row and 17 ms at four in float32, 13 and 10 ms in bfloat16.
    """
    return 4 if runs_on_onednn(device, dtype) else 1


class Linear(nn.Module):
    """A matrix product with a weight of its own. [rows, in] -> [rows, out]"""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        """`out_dtype` is that of the product where it is not the weight's (`multiply`)."""
        super().__init__()
        self.weight: Tensor = nn.Parameter(
            torch.empty(out_features, in_features, dtype=dtype, device=device),
            requires_grad=False,
        )
        """[out, in]; empty once `prepare` has moved it elsewhere."""
        self.bias: Tensor | None = (
            nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False)
            if bias
            else None
        )
        """[out]"""
        self._out_dtype = out_dtype or dtype
        self._product: Product = PlainProduct(self.weight, self.bias, self._out_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return x · weightᵀ + bias."""
        return self._product(x)

    def add_to(self, residual: Tensor, x: Tensor, scale: float = 1.0) -> bool:
        """Add product · scale to a residual, [rows, out], if that is one operation; say if it is.

        It is on a GPU for many rows: cuBLAS adds while it writes, and the sum is rounded once. Few
        rows have kernels of their own, and leave the addition to the norm that follows.
        """
        if not x.is_cuda or self.bias is not None or len(x) < ADDS_FROM_ROWS:
            return False
        torch.addmm(residual, x, self.weight.t(), alpha=scale, out=residual)
        return True

    def tie(self, weight: Tensor) -> None:
        """Use another module's weight, [out, in], until prepared."""
        assert weight.shape == self.weight.shape, "a tied weight has the shape of its own"
        self.weight = weight
        self._product = PlainProduct(weight, self.bias, self._out_dtype)

    def prepare(self, products: ProductChoice | None = None) -> None:
        """Choose the product, now that the weight has its values. Called once, after loading.

        `products` has the first say.
        """
        chosen = None
        if products is not None:
            chosen = products.choose(self.weight, self.bias, self._out_dtype)
        if chosen is not None:
            self._product = chosen
            return
        # oneDNN refuses a product without outputs, which a rank without tokens has.
        if len(self.weight) and runs_on_onednn(self.weight.device, self.weight.dtype):
            self._product = OneDnnProduct(self.weight, self.bias)
            # The reordered copy is all that is needed; an embedding tied to it has its own.
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)
