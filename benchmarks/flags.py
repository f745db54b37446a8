"""What a command line's numbers may be: functions for the `type` of an argparse argument."""

import argparse
import math
from collections.abc import Callable


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return what reads a whole number of at least `least`, and of at most `most` unless None."""
    limits = f"of at least {least}" if most is None else f"from {least} to {most}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {limits}.")
        return value

    return read


def between(least: float, most: float) -> Callable[[str], float]:
    """Return what reads a number from `least` to `most`."""

    def read(text: str) -> float:
        value = _number(text)
        # Written so that NaN, which compares false with everything, is refused too.
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a number from {least:g} to {most:g}."
            )
        return value

    return read


def positive(text: str) -> float:
    """Read a finite number above 0."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0.")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
