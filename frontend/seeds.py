"""Seeds: every sequence has one, and so can be sampled again exactly.

The numbers come from SplitMix64 (Steele, Lea, Flood 2014): a counter through a mixing function.
"""

_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15


class SeedSource:
    """Draws the seeds of requests that bring none: the same ones for the same start."""

    def __init__(self, seed: int, stream: int) -> None:
        """`stream` tells frontends of one run apart."""
        self._state = _mix((_mix(seed & _MASK) + (stream + 1) * _STEP) & _MASK)

    def draw(self) -> int:
        """Return the next seed, a 64-bit integer."""
        self._state = (self._state + _STEP) & _MASK
        return _signed(_mix(self._state))


def sample_seed(seed: int, sample: int) -> int:
    """Return the seed of one sample of a request: the request's own for the first."""
    if sample == 0:
        return seed
    return _signed(_mix((_mix(seed & _MASK) + sample * _STEP) & _MASK))


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
