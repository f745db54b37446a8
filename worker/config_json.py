"""config.json and generation_config.json of a model directory, read into a `ModelConfig`.

Written by many versions of transformers: version 5 says `rope_parameters` and `dtype`, older ones
`rope_theta` with `rope_scaling` and `torch_dtype`. Both are read. Nothing in these files is run:
`auto_map` is ignored.
"""

import json
import math
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from protocol.errors import ModelFileError
from worker.model_config import (
    CheckpointDtype,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeScaling,
    merge_token_ids,
)
from worker.quantization_config import read_quantization

MAX_CONFIG_BYTES = 4 << 20
_DEFAULT_ROPE_THETA = 10_000.0
_DEFAULT_MAX_POSITIONS = 2048

Json: TypeAlias = dict[str, Any]


def read_config_json(directory: Path) -> ModelConfig:
    """Read a model directory's config. Raises ModelFileError naming the file and the key."""
    source = directory / "config.json"
    values = read_json(source)
    config = _Object(source, values)
    num_heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    head_dim = config.optional_integer("head_dim")
    if head_dim is None:
        if num_heads < 1 or hidden_size % num_heads:
            raise config.bad(
                "hidden_size", f"must be a multiple of num_attention_heads ({num_heads})"
            )
        head_dim = hidden_size // num_heads
    if config.text("hidden_act", "silu") != "silu":
        raise config.bad("hidden_act", 'must be "silu"')
    if config.flag("use_sliding_window"):
        raise config.bad("use_sliding_window", "must be false: attention reads the whole context")
    theta, scaling = _rope(config)
    vocab_size = config.integer("vocab_size")
    return ModelConfig(
        source=source,
        architecture=_architecture(config),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=config.integer("max_position_embeddings", _DEFAULT_MAX_POSITIONS),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        attention_bias=config.flag("attention_bias"),
        mlp_bias=config.flag("mlp_bias"),
        bos_token_id=config.optional_integer("bos_token_id"),
        eos_token_ids=merge_token_ids(
            config.token_ids("eos_token_id"), _generation_eos(directory, vocab_size)
        ),
        dtype=_dtype(config),
        quantization=read_quantization(source, values.get("quantization_config")),
    )


def read_json(path: Path) -> Json:
    """Read a JSON file that must hold one object. Raises ModelFileError."""
    try:
        if not path.is_file():
            raise ModelFileError(f"{path} is missing or is not a regular file")
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelFileError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes")
        value = json.loads(
            path.read_bytes(), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant
        )
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} must hold a JSON object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> Json:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {max(names, key=names.count)!r} appears twice")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


class _Object:
    """Typed access to one JSON object of a file; every complaint names file and key."""

    def __init__(self, source: Path, values: Json) -> None:
        self._source = source
        self._values = values

    def bad(self, key: str, what: str) -> ModelFileError:
        value = repr(self._values.get(key))
        return ModelFileError(f"{self._source}: {key} is {value[:80]}; it {what}")

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.bad(key, "must be an integer")
        return value

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key) if self.has(key) else None

    def number(self, key: str, default: float | None = None) -> float:
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.bad(key, "must be a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.bad(key, "must be a finite number")
        return number

    def flag(self, key: str) -> bool:
        value = self._values.get(key, False)
        if value is not None and not isinstance(value, bool):
            raise self.bad(key, "must be true or false")
        return bool(value)

    def text(self, key: str, default: str) -> str:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.bad(key, "must be a string")
        return value

    def object(self, key: str) -> "_Object | None":
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.bad(key, "must be an object")
        return _Object(self._source, value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return an id, a list of ids or null as a tuple."""
        value = self._values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in ids):
            raise self.bad(key, "must be a token id or a list of token ids")
        return tuple(ids)

    def strings(self, key: str) -> list[str]:
        value = self._values.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.bad(key, "must be a list of strings")
        return value


def _architecture(config: _Object) -> str:
    names = config.strings("architectures")
    if len(names) != 1:
        raise config.bad("architectures", "must name one architecture")
    return names[0]


def _dtype(config: _Object) -> CheckpointDtype:
    key = "dtype" if config.has("dtype") else "torch_dtype"
    match config.text(key, "float32"):
        case "float32":
            return "float32"
        case "float16":
            return "float16"
        case "bfloat16":
            return "bfloat16"
        case _:
            raise config.bad(key, "must be float32, float16 or bfloat16")


def _rope(config: _Object) -> tuple[float, RopeScaling | None]:
    """Return the base of the rotary frequencies and their scaling."""
    if config.has("rope_parameters"):
        rope = config.object("rope_parameters")
        assert rope is not None
        return rope.number("rope_theta", _DEFAULT_ROPE_THETA), _rope_scaling(rope)
    theta = config.number("rope_theta", _DEFAULT_ROPE_THETA)
    legacy = config.object("rope_scaling")
    return theta, None if legacy is None else _rope_scaling(legacy)


def _rope_scaling(rope: _Object) -> RopeScaling | None:
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.bad("partial_rotary_factor", "must be 1")
    key = "rope_type" if rope.has("rope_type") else "type"
    match rope.text(key, "default"):
        case "default":
            return None
        case "linear":
            return LinearScaling(factor=rope.number("factor"))
        case "llama3":
            return Llama3Scaling(
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
            )
        case _:
            raise rope.bad(key, "must be default, linear or llama3")


def _generation_eos(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the EOS ids of generation_config.json, which chat models extend there."""
    source = directory / "generation_config.json"
    if not source.exists():
        return ()
    config = _Object(source, read_json(source))
    ids = config.token_ids("eos_token_id")
    if not all(0 <= token_id < vocab_size for token_id in ids):
        raise config.bad("eos_token_id", f"must be 0 to {vocab_size - 1}")
    return ids
