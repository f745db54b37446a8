"""How a model's heads are turned by position (RoPE): base, rotary part and scaling, with no torch.

The scalings are those of transformers' `modeling_rope_utils`, and one that only GGUF files have.
`worker.layers.rotary` computes them, `worker.rope_json` and `worker.gguf_config` read them.
Everything here is frozen and hashable, so that layers with equal values share one table.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from protocol.errors import ModelFileError

MAX_POSITIONS = 1 << 24
"""The longest context that a file may name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling:
    """NTK-aware: the base grows with how much longer than trained a sequence may be."""

    factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's: long wavelengths are stretched by `factor`, short ones kept, with a ramp."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN: as Llama 3.1's with a ramp over the pairs' indices, and cosines and sines scaled."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    """Cosines and sines are multiplied by it, so scores by its square."""
    beta_fast: float = 32.0
    """Pairs that turn more often than this in the original context are kept."""
    beta_slow: float = 1.0
    """Pairs that turn less often than this are stretched whole."""
    truncate: bool = True
    """The ramp begins and ends at whole indices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """Every frequency is divided by its own factor: one set for short contexts, one for long."""

    short_factors: tuple[float, ...]
    """[rotary_dim / 2]"""
    long_factors: tuple[float, ...]
    """[rotary_dim / 2]"""
    original_max_position_embeddings: int
    """Up to this length contexts are short."""
    attention_factor: float
    """Cosines and sines are multiplied by it, whichever the set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorScaling:
    """Every frequency is divided by its own factor, as GGUF files store Llama 3.1's scaling."""

    factors: tuple[float, ...]
    """[rotary_dim / 2]"""


RopeScaling: TypeAlias = (
    LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling | FactorScaling
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The rotation of a layer's queries and keys."""

    theta: float
    """The base of the frequencies: pair i turns by theta^(-2i / rotary_dim) a position."""
    rotary_dim: int
    """The first numbers of a head that are turned; the others stay as they are."""
    scaling: RopeScaling | None = None

    def usual_context(self, max_position_embeddings: int) -> int:
        """Return how many tokens a sequence may have unless another length is asked for.

        YaRN is often added to a file by hand, which leaves the file's length at the original one.
        """
        match self.scaling:
            case YarnScaling() as yarn:
                stretched = yarn.original_max_position_embeddings * yarn.factor
                return max(max_position_embeddings, int(min(stretched, MAX_POSITIONS)))
            case _:
                return max_position_embeddings

    def longest_context(self, max_position_embeddings: int) -> int:
        """Return the most tokens that may be asked for.

        A dynamic base is stretched only then, since that changes short sequences too.
        """
        match self.scaling:
            case DynamicScaling(factor=factor):
                stretched = max_position_embeddings * factor
                return max(max_position_embeddings, int(min(stretched, MAX_POSITIONS)))
            case _:
                return self.usual_context(max_position_embeddings)

    def check(self, source: Path, head_dim: int) -> None:
        """Raise ModelFileError, naming the file and the key, unless heads can be turned so."""
        check = _Check(source)
        if not 1.0 <= self.theta <= 1e12:
            raise check.bad("rope_theta", self.theta, "1 to 1e12")
        if self.rotary_dim % 2 or not 2 <= self.rotary_dim <= head_dim:
            raise check.bad(
                "rotary part of a head", self.rotary_dim, f"an even number, 2 to {head_dim}"
            )
        match self.scaling:
            case None:
                pass
            case LinearScaling(factor=factor):
                check.positive("factor", factor)
            case DynamicScaling() as dynamic:
                check.positive("factor", dynamic.factor)
                check.length(dynamic.original_max_position_embeddings)
                if self.rotary_dim < 4:
                    raise check.bad("rotary part of a head", self.rotary_dim, "at least 4")
            case Llama3Scaling() as llama3:
                _check_llama3(check, llama3)
            case YarnScaling() as yarn:
                _check_yarn(check, yarn)
                if self.theta == 1.0:
                    raise check.bad("rope_theta", self.theta, "above 1")
            case LongRopeScaling() as long:
                check.factors("short_factor", long.short_factors, self.rotary_dim)
                check.factors("long_factor", long.long_factors, self.rotary_dim)
                check.length(long.original_max_position_embeddings)
                check.positive("attention_factor", long.attention_factor)
            case FactorScaling(factors=factors):
                check.factors("factors", factors, self.rotary_dim)


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """Return YaRN's scale of cosines and sines where a file does not give it.

    0.1 · ln(factor) + 1, as the paper has it; with both of DeepSeek's multipliers of the logarithm,
    which are not negative, the quotient of two of these.
    """
    if mscale and mscale_all_dim:
        return _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all_dim)
    return _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, multiplier: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * multiplier * math.log(factor) + 1.0


def longrope_attention_factor(factor: float, original_max_position_embeddings: int) -> float:
    """Return LongRoPE's scale of cosines and sines where a file does not give it.

    √(1 + ln(factor) / ln(original length)), where factor is how much longer contexts may be now.
    """
    if factor <= 1.0 or original_max_position_embeddings <= 1:
        return 1.0
    return math.sqrt(1.0 + math.log(factor) / math.log(original_max_position_embeddings))


class _Check:
    """Checks of numbers; every complaint names file and key."""

    def __init__(self, source: Path) -> None:
        self._source = source

    def bad(self, key: str, value: object, allowed: str) -> ModelFileError:
        return ModelFileError(f"{self._source}: {key} is {value}; it must be {allowed}")

    def positive(self, key: str, value: float) -> None:
        # NaN compares false with everything, so this refuses it too.
        if not 0.0 < value < math.inf:
            raise self.bad(f"rope {key}", value, "a finite number above 0")

    def length(self, value: int) -> None:
        if not 1 <= value <= MAX_POSITIONS:
            raise self.bad("rope original_max_position_embeddings", value, f"1 to {MAX_POSITIONS}")

    def factors(self, key: str, values: tuple[float, ...], rotary_dim: int) -> None:
        if len(values) != rotary_dim // 2:
            raise self.bad(f"number of rope {key}", len(values), f"{rotary_dim // 2}")
        for value in values:
            self.positive(key, value)


def _check_llama3(check: _Check, scaling: Llama3Scaling) -> None:
    check.positive("factor", scaling.factor)
    check.positive("high_freq_factor", scaling.high_freq_factor)
    if not 0.0 < scaling.low_freq_factor < scaling.high_freq_factor:
        raise check.bad(
            "rope low_freq_factor",
            scaling.low_freq_factor,
            f"above 0 and below high_freq_factor ({scaling.high_freq_factor})",
        )
    check.length(scaling.original_max_position_embeddings)


def _check_yarn(check: _Check, scaling: YarnScaling) -> None:
    check.positive("factor", scaling.factor)
    check.positive("attention_factor", scaling.attention_factor)
    check.positive("beta_fast", scaling.beta_fast)
    if not 0.0 < scaling.beta_slow <= scaling.beta_fast:
        raise check.bad(
            "rope beta_slow",
            scaling.beta_slow,
            f"above 0 and at most beta_fast ({scaling.beta_fast})",
        )
    check.length(scaling.original_max_position_embeddings)
