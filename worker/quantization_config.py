"""`quantization_config` of a config.json: how a checkpoint's weights are stored. Imports no torch.

What tools write (llm-compressor, FineGrainedFP8, AutoAWQ, GPTQModel) is read as far as it says the
same as one of the formats below; everything else is refused, as its numbers would be wrong.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from protocol.errors import ModelFileError

SUPPORTED = (
    'supported are quant_method "compressed-tensors" with 8-bit floats, "fp8" by tensor or in '
    'blocks, and "awq" and "gptq" in 4 bits'
)
GROUP_SIZES = (32, 64, 128, -1)
"""Inputs of a group of 4-bit codes; -1: all."""
MAX_PATTERN_LENGTH = 300


@dataclass(frozen=True, slots=True)
class Unquantized:
    """Which modules keep 16 bits."""

    names: tuple[str, ...] = ()
    """Whole names, or what they begin or end with at a dot."""
    patterns: tuple[str, ...] = ()
    """Regular expressions that match from a name's beginning."""

    def covers(self, module: str) -> bool:
        """Whether a module, by its name in the checkpoint, keeps 16 bits."""
        dotted = f".{module}."
        return any(
            dotted.startswith(f".{name}.") or dotted.endswith(f".{name}.") for name in self.names
        ) or any(re.match(pattern, module) for pattern in self.patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Checkpoint:
    """Weights as e4m3, with scales that they are multiplied by."""

    scale_name: str
    """What the scales of X.weight are called: X.scale_name."""
    block: tuple[int, int] | None
    """Outputs and inputs that have a scale in common; None: see `is_by_tensor`."""
    is_by_tensor: bool
    """Without blocks: there is one scale, else one for each output."""
    unquantized: Unquantized


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Checkpoint:
    """Weights as 4-bit codes, whose groups of inputs have a scale and a zero point."""

    is_awq: bool
    """AWQ's order of codes, else GPTQ's."""
    group_size: int
    """Inputs of a group; -1: all of them."""
    has_order: bool
    """The files say which group each input is in."""
    zero_offset: int
    """What is added to stored zero points."""
    unquantized: Unquantized


CheckpointQuantization: TypeAlias = Fp8Checkpoint | Int4Checkpoint


def read_quantization(source: Path, value: object) -> CheckpointQuantization | None:
    """Read the value of `quantization_config`, None where there is none. Raises ModelFileError."""
    if value is None:
        return None
    config = _Fields(source, "quantization_config", value)
    match config.values.get("quant_method"):
        case "compressed-tensors":
            return _compressed_tensors(config)
        case "fp8":
            return _fp8(config)
        case "awq":
            return _awq(config)
        case "gptq":
            return _gptq(config)
        case other:
            raise config.bad(f"quant_method is {other!r}")


class _Fields:
    """An object in a config.json; every complaint says where and what would be supported."""

    def __init__(self, source: Path, name: str, value: object) -> None:
        self._source = source
        self._name = name
        if not isinstance(value, dict):
            raise self.bad("is no object")
        self.values: Mapping[str, object] = value

    def bad(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self._source}: {self._name}: {what[:200]}; {SUPPORTED}")

    def require(self, key: str, *legal: object, default: object = None) -> None:
        """Refuse a value that is none of the legal ones."""
        value = self.values.get(key, default)
        # A flag is no number here: True == 1.
        if not any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in legal
        ):
            raise self.bad(f"{key} is {value!r}")

    def fields(self, key: str) -> "_Fields":
        return _Fields(self._source, f"{self._name}.{key}", self.values.get(key))

    def strings(self, key: str) -> Sequence[str]:
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.bad(f"{key} is no list of strings")
        return value

    def block(self, key: str) -> tuple[int, int] | None:
        match self.values.get(key):
            case None:
                return None
            case [int(rows), int(columns)] if rows > 0 and columns > 0:
                return rows, columns
            case other:
                raise self.bad(f"{key} is {other!r}")


def _fp8(config: _Fields) -> Fp8Checkpoint:
    config.require("activation_scheme", "dynamic", "static", default="dynamic")
    config.require("fmt", "e4m3", default="e4m3")
    block = config.block("weight_block_size")
    return Fp8Checkpoint(
        scale_name="weight_scale" if block is None else "weight_scale_inv",
        block=block,
        is_by_tensor=block is None,
        unquantized=Unquantized(
            tuple(config.strings("modules_to_not_convert") or config.strings("ignored_layers"))
        ),
    )


def _awq(config: _Fields) -> Int4Checkpoint:
    config.require("bits", 4)
    config.require("zero_point", True, default=True)
    config.require("version", "gemm", "GEMM", default="gemm")
    return Int4Checkpoint(
        is_awq=True,
        group_size=_group_size(config),
        has_order=False,
        zero_offset=0,
        unquantized=Unquantized(tuple(config.strings("modules_to_not_convert"))),
    )


def _gptq(config: _Fields) -> Int4Checkpoint:
    config.require("bits", 4)
    config.require("sym", True, False, default=True)
    config.require("desc_act", True, False, default=False)
    # Two names of the same, by the version of GPTQModel.
    names = [key for key in ("checkpoint_format", "format") if key in config.values]
    for key in names:
        config.require(key, "gptq", "gptq_v2")
    config.require("pack_dtype", "int32", default="int32")
    config.require("lm_head", False, default=False)
    config.require("is_marlin_format", False, default=False)
    # Some modules otherwise than the rest.
    config.require("dynamic", None, {})
    config.require("modules_in_block_to_quantize", None)
    return Int4Checkpoint(
        is_awq=False,
        group_size=_group_size(config),
        has_order=config.values.get("desc_act") is True,
        zero_offset=0 if any(config.values[key] == "gptq_v2" for key in names) else 1,
        unquantized=Unquantized(tuple(config.strings("modules_to_not_convert"))),
    )


def _group_size(config: _Fields) -> int:
    config.require("group_size", *GROUP_SIZES)
    size = config.values["group_size"]
    assert isinstance(size, int), "it is one of the legal ones"
    return size


def _compressed_tensors(config: _Fields) -> Fp8Checkpoint:
    config.require("format", "float-quantized", "naive-quantized", default="float-quantized")
    config.require("kv_cache_scheme", None)
    config.require("transform_config", None, {})
    if config.values.get("sparsity_config"):
        config.fields("sparsity_config").require("format", "dense", default="dense")
    groups = config.fields("config_groups")
    if len(groups.values) != 1:
        raise groups.bad(f"there are {len(groups.values)} groups")
    group = groups.fields(next(iter(groups.values)))
    group.require("targets", ["Linear"])
    group.require("format", None, "float-quantized", "naive-quantized")
    group.require("output_activations", None)
    weights = group.fields("weights")
    for key, legal in (("num_bits", 8), ("type", "float"), ("symmetric", True), ("dynamic", False)):
        weights.require(key, legal, default=legal)
    weights.require("strategy", "channel", "tensor", "block")
    if group.values.get("input_activations") is not None:
        rows = group.fields("input_activations")
        for key, one in (("num_bits", 8), ("type", "float"), ("symmetric", True)):
            rows.require(key, one, default=one)
        rows.require("dynamic", True, False)
        rows.require("strategy", "token", "tensor", "group", default="token")
    strategy = weights.values["strategy"]
    block = weights.block("block_structure") if strategy == "block" else None
    if strategy == "block" and block is None:
        raise weights.bad("block_structure is missing")
    ignored = config.strings("ignore")
    return Fp8Checkpoint(
        scale_name="weight_scale",
        block=block,
        is_by_tensor=strategy == "tensor",
        unquantized=Unquantized(
            tuple(name for name in ignored if not name.startswith("re:")),
            tuple(_pattern(config, name) for name in ignored if name.startswith("re:")),
        ),
    )


def _pattern(config: _Fields, name: str) -> str:
    pattern = name.removeprefix("re:")
    try:
        re.compile(pattern)
    except re.error as error:
        raise config.bad(f"ignore has {name!r}, which is no regular expression: {error}") from error
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise config.bad(f"ignore has a pattern of over {MAX_PATTERN_LENGTH} characters")
    return pattern
