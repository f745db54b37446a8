"""Whether stored numbers are all finite: a look at the raw bytes on their way into memory.

The topmost bit of an exponent is set in numbers from 2 on, and in NaN and infinity. Weights hardly
have any, so that one `or` over the bytes as integers, at the speed of a core's own cache, mostly
tells. Else two maxima do: the exponent of NaN and infinity is all ones, and so, read as an integer
without sign, such a number is above every other negative one; with sign, above every other
positive one.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_INTEGERS: dict[torch.dtype, tuple[Any, Any, int]] = {
    torch.bfloat16: (np.int16, np.uint16, 0x7F80),
    torch.float16: (np.int16, np.uint16, 0x7C00),
    torch.float32: (np.int32, np.uint32, 0x7F80_0000),
    torch.float64: (np.int64, np.uint64, 0x7FF0_0000_0000_0000),
}
"""By dtype: the integers of its size, and its bits of positive infinity."""


def all_finite(data: NDArray[np.uint8], dtype: torch.dtype) -> bool:
    """Whether the numbers of `dtype` in `data`, [bytes], are all finite. Integers always are."""
    if dtype == torch.float8_e4m3fn:
        # It has no infinity, and a NaN of either sign has all other bits.
        return bool(((data & 0x7F) != 0x7F).all())
    if dtype not in _INTEGERS or not len(data):
        return True
    with_sign, without_sign, infinity = _INTEGERS[dtype]
    sign = np.iinfo(with_sign).max + 1
    if not int(np.bitwise_or.reduce(data.view(without_sign))) & sign >> 1:
        return True
    signed = data.view(with_sign)
    return bool(signed.max() < infinity and signed.view(without_sign).max() < sign + infinity)
