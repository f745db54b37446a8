"""y = x · weightᵀ + bias, by the fastest product there is for the device and dtype.

Three products, chosen when weights are in place (`Linear.prepare`):

- `OneDnnProduct` on CPU: the weight reordered once into the blocks that oneDNN's kernels read. On
  SmolLM2's shapes it reads 20-35 GB/s at one row where `F.linear` reads 12, and does 160-200
  GFLOP/s at 16 rows or more where `F.linear` does 50-130 (float32, two Zen 4 cores;
  docs/performance/cpu.md).
- on a GPU that has been measured, what `worker.tuned_products` chooses by the number of rows.
- `PlainProduct` everywhere else: torch's own.

A weight that is quantised (`Linear.quantize`) brings a product of its own.

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


class QuantizedWeight(Protocol):
    """A weight, [out, in], in fewer bits than the model's dtype."""

    def product(self, bias: Tensor | None, out_dtype: torch.dtype) -> Product:
        """Return the product with it. Called once; the product keeps what it needs."""
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
        keeps_dtype: bool = False,
    ) -> None:
        """`out_dtype` is that of the product where it is not the weight's (`multiply`).

        A product that `keeps_dtype` is never quantised.
        """
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.keeps_dtype = keeps_dtype
        self.bias: Tensor | None = (
            nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False)
            if bias
            else None
        )
        """[out]"""
        self.dtype = dtype
        self.device = device
        self._out_dtype = out_dtype or dtype
        self._weight: Tensor | None = None
        self._quantized: QuantizedWeight | None = None
        self._product: Product | None = None

    @property
    def weight(self) -> Tensor:
        """[out, in]; empty once it is quantised, or `prepare` has moved it elsewhere.

        It takes memory when first asked for, which nobody does whose checkpoint is quantised.
        """
        if self._weight is None:
            # Whoever asks first may be in inference mode; the weight is to be an ordinary tensor.
            with torch.inference_mode(False):
                self._weight = torch.empty(
                    self.out_features, self.in_features, dtype=self.dtype, device=self.device
                )
        return self._weight

    @property
    def is_quantized(self) -> bool:
        """Whether it has a quantised weight."""
        return self._quantized is not None

    def forward(self, x: Tensor) -> Tensor:
        """Return x · weightᵀ + bias."""
        if self._product is None:
            return multiply(x, self.weight, self.bias, self._out_dtype)
        return self._product(x)

    def add_to(self, residual: Tensor, x: Tensor, scale: float = 1.0) -> bool:
        """Add product · scale to a residual, [rows, out], if that is one operation; say if it is.

        It is on a GPU for many rows: cuBLAS adds while it writes, and the sum is rounded once. Few
        rows have kernels of their own, and leave the addition to the norm that follows; so do
        quantised weights.
        """
        if not x.is_cuda or self.bias is not None or len(x) < ADDS_FROM_ROWS:
            return False
        if self._quantized is not None:
            return False
        torch.addmm(residual, x, self.weight.t(), alpha=scale, out=residual)
        return True

    def tie(self, weight: Tensor) -> None:
        """Use another module's weight, [out, in], until prepared."""
        assert weight.shape == (self.out_features, self.in_features), "a tied weight's shape"
        # Not as a parameter of this module, which could not be replaced by a plain tensor later.
        self._weight = weight.detach()

    def defer(self) -> None:
        """Have a weight without memory, whose views say where values belong."""
        self._weight = torch.empty(
            self.out_features, self.in_features, dtype=self.dtype, device="meta"
        )

    def allocate(self) -> None:
        """Have a weight with memory again, after `defer`."""
        self._weight = None

    def quantize(self, weight: QuantizedWeight) -> None:
        """Use a quantised weight, [out, in], in place of its own, whose memory is given back."""
        assert not self.keeps_dtype, "this product is not to be quantised"
        self._quantized = weight
        self._empty_weight()

    def prepare(self, products: ProductChoice | None = None) -> None:
        """Choose the product, now that the weight has its values. Called once, after loading.

        `products` has the first say, but for a quantised weight.
        """
        if self._quantized is not None:
            self._product = self._quantized.product(self.bias, self._out_dtype)
            return
        if products is not None:
            self._product = products.choose(self.weight, self.bias, self._out_dtype)
            if self._product is not None:
                return
        # oneDNN refuses a product without outputs, which a rank without tokens has.
        if self.out_features and runs_on_onednn(self.device, self.dtype):
            self._product = OneDnnProduct(self.weight, self.bias)
            # The reordered copy is all that is needed; an embedding tied to it has its own.
            self._empty_weight()
        else:
            self._product = PlainProduct(self.weight, self.bias, self._out_dtype)

    def _empty_weight(self) -> None:
        self._weight = torch.empty(0, dtype=self.dtype, device=self.device)
