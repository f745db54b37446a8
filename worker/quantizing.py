"""Quantises a loaded model's products, where `--quantization` says so."""

import logging
import math
from collections import Counter

from torch import nn

from protocol.errors import ConfigError
from worker.layers.fp8 import Fp8Weight
from worker.layers.int4 import LEAST_GROUP, Int4Weight, SharedScratch
from worker.layers.linear import Linear
from worker.quantization import FP8_MULTIPLE, fits_fp8

log = logging.getLogger(__name__)


def quantize_to_fp8(model: nn.Module) -> None:
    """Put the weights of all products but those that keep their dtype into fp8.

    One at a time, each in its place: no more than one is in memory twice.
    """
    kept: Counter[tuple[int, int]] = Counter()
    for linear in model.modules():
        if not isinstance(linear, Linear) or linear.keeps_dtype:
            continue
        if fits_fp8(linear.out_features, linear.in_features):
            linear.quantize(Fp8Weight.quantize(linear.weight))
        else:
            kept[linear.out_features, linear.in_features] += 1
    log_kept(kept)


def quantize_to_int4(model: nn.Module, group_size: int) -> None:
    """Put dummy weights of all products but those that keep their dtype into 4 bits.

    Raises ConfigError for a product that groups do not divide.
    """
    scratch: SharedScratch | None = None
    for linear in model.modules():
        if not isinstance(linear, Linear) or linear.keeps_dtype:
            continue
        scratch = scratch or SharedScratch(linear.dtype, linear.device)
        size = linear.in_features
        group = size if group_size < 0 else math.gcd(group_size, size)
        if group % LEAST_GROUP:
            raise ConfigError(
                f"{size} inputs of a product cannot be in groups of {group_size}: use another --tp."
            )
        linear.quantize(Int4Weight.quantize(linear.weight, group, scratch))


def log_kept(kept: Counter[tuple[int, int]]) -> None:
    """Say which products stay in the model's dtype, by outputs and inputs."""
    for (outputs, inputs), count in kept.items():
        log.warning(
            "products=%d outputs=%d inputs=%d keep their dtype: fp8 needs multiples of %d",
            *(count, outputs, inputs, FP8_MULTIPLE),
        )
