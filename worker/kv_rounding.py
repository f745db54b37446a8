"""Keys and values as 8-bit floats, for a KV cache in fp8, by torch's operators.

They are e4m3 numbers of scale 1: what is larger than 448 becomes 448, and the only number that is
not finite is NaN. `worker.kernels.fp8.round_to_e4m3` is the same on a GPU.
"""

import torch
from torch import Tensor

from worker.layers.fp8 import E4M3_MAX

E4M3 = torch.float8_e4m3fn


def round_to_e4m3(x: Tensor) -> Tensor:
    """Return the nearest e4m3 numbers, ties to even, of x's shape.

    What is not finite becomes NaN, so that what is computed with it shows: saturated, infinity
    would look like any large number.
    """
    codes = x.clamp(-E4M3_MAX, E4M3_MAX)
    codes.masked_fill_(~x.isfinite(), float("nan"))
    return codes.to(E4M3)


def kv_cache_dtype(flag: str, dtype: torch.dtype) -> torch.dtype:
    """Return what the KV cache holds, by `--kv-cache-dtype` and the model's dtype."""
    return E4M3 if flag == "fp8" else dtype
