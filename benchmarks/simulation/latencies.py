"""Latencies of many tokens in little memory: counts in bins of 1 %, and the exact extremes."""

import numpy as np
from numpy.typing import NDArray

_SMALLEST_S = 1e-6
_GROWTH = 1.01
_NUM_BINS = 2_200
"""Up to 1e-6 s * 1.01**2200, which is 53 minutes."""


class Latencies:
    """A histogram of seconds. Percentiles are right to 1 %, the largest value is exact."""

    def __init__(self) -> None:
        self._counts = np.zeros(_NUM_BINS, np.int64)
        self.count = 0
        self.largest = 0.0

    def add(self, seconds: NDArray[np.float64]) -> None:
        """Count values."""
        if not seconds.size:
            return
        bins = np.log(np.maximum(seconds, _SMALLEST_S) / _SMALLEST_S) / np.log(_GROWTH)
        np.add.at(self._counts, np.minimum(bins.astype(np.int64), _NUM_BINS - 1), 1)
        self.count += seconds.size
        self.largest = max(self.largest, float(seconds.max()))

    def merge(self, other: "Latencies") -> None:
        """Count another's values too."""
        self._counts += other._counts
        self.count += other.count
        self.largest = max(self.largest, other.largest)

    def percentile(self, percent: float) -> float:
        """Return the value that `percent` of all do not exceed; 0 without values."""
        if not self.count:
            return 0.0
        rank = max(1, -(-self.count * percent // 100))
        where = int(np.searchsorted(np.cumsum(self._counts), rank))
        return min(_SMALLEST_S * _GROWTH ** (where + 1), self.largest)
