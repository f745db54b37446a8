"""Products in 8-bit floats: weights and rows as e4m3, each channel and each row with a scale.

    y[r, n] = (codes of row r · codes of channel n) · scale of r · scale of n + bias[n]

A channel's or row's scale is its largest absolute value / 448, the largest e4m3 number. Weights are
quantised once, rows in every product. Sums are float32.

On a GPU the product is `torch._scaled_mm` with scales by row, behind one kernel that quantises the
rows. It accumulates accurately (`use_fast_accum=False`): Hopper's tensor cores keep about 14 bits
of a sum, and fast accumulation never moves sums out of them. Few rows wait for the weight anyway;
what it costs many rows is for `benchmarks.quantized_products` to say.

Elsewhere `ReferenceProduct` multiplies the same codes as floats, so that only the order of the sums
differs. It takes 4 bytes a weight: it says what a GPU computes, and saves no memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.layers.linear import OneDnnProduct, PlainProduct, Product, runs_on_onednn

E4M3_MAX = 448.0
LEAST_ABSMAX = 1e-12
"""A row of zeros is scaled as if this were its largest value."""
_NUMBERS_AT_ONCE = 1 << 24


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes and the scales that give back what they stand for.

    [rows, size] of any float type -> [rows, size] float8_e4m3fn, [rows, 1] float32. A row with a
    number that is not finite becomes NaN there.
    """
    wide = x.float()
    absmax = wide.abs().amax(dim=1, keepdim=True).clamp_(min=LEAST_ABSMAX)
    # Dividing by or into a plain number, torch multiplies by a reciprocal, which rounds twice.
    largest = torch.full_like(absmax, E4M3_MAX)
    codes = (wide * (largest / absmax)).clamp_(-E4M3_MAX, E4M3_MAX)
    return codes.to(torch.float8_e4m3fn), absmax / largest


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight of one scale a channel: `QuantizedWeight`."""

    codes: Tensor
    """[out, in] float8_e4m3fn; both multiples of 16"""
    scales: Tensor
    """[out] float32"""

    @staticmethod
    def empty(out_features: int, in_features: int, device: torch.device) -> "Fp8Weight":
        """Return one without values."""
        return Fp8Weight(
            torch.empty(out_features, in_features, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(out_features, dtype=torch.float32, device=device),
        )

    @staticmethod
    def quantize(weight: Tensor) -> "Fp8Weight":
        """Quantise a weight, [out, in]."""
        result = Fp8Weight.empty(len(weight), weight.shape[1], weight.device)
        # Some channels at a time: they take 12 bytes a number meanwhile.
        step = max(1, _NUMBERS_AT_ONCE // weight.shape[1])
        for first in range(0, len(weight), step):
            rows = slice(first, first + step)
            result.codes[rows], scales = quantize_rows(weight[rows])
            result.scales[rows] = scales.view(-1)
        return result

    def product(self, bias: Tensor | None, out_dtype: torch.dtype) -> Product:
        """Return the product with this weight."""
        if self.codes.is_cuda:
            return ScaledProduct(self, bias, out_dtype)
        return ReferenceProduct(self, bias, out_dtype)


class ReferenceProduct:
    """The product of the codes as float32, scaled."""

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, out_dtype: torch.dtype) -> None:
        wide = weight.codes.float()
        self._product: Product = (
            OneDnnProduct(wide, None)
            if runs_on_onednn(wide.device, wide.dtype)
            else PlainProduct(wide, None, wide.dtype)
        )
        self._scales = weight.scales
        self._bias = bias
        self._out_dtype = out_dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Return x · weightᵀ + bias."""
        codes, scales = quantize_rows(x)
        y = self._product(codes.float()) * (scales * self._scales)
        if self._bias is not None:
            y += self._bias
        return y.to(self._out_dtype)


class ScaledProduct:
    """The product on a GPU's 8-bit tensor cores. Its results are bfloat16."""

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, out_dtype: torch.dtype) -> None:
        # Imported here because Triton is there only where there are GPUs.
        from worker.kernels.fp8 import quantize_rows  # noqa: PLC0415

        self._quantize_rows = quantize_rows
        self._weight = weight.codes.t()
        self._scales = weight.scales.view(1, -1)
        self._bias = bias
        self._out_dtype = out_dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Return x · weightᵀ + bias."""
        codes, scales = self._quantize_rows(x)
        return torch._scaled_mm(
            codes,
            self._weight,
            scales,
            self._scales,
            bias=self._bias,
            out_dtype=self._out_dtype,
            use_fast_accum=False,
        )
