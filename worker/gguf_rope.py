"""RoPE's part of a GGUF header, read into a `RopeConfig`.

What the keys mean is llama.cpp's to say, and two things differ from config.json. Scaling is linear
where nothing is said. Tables of factors are tensors: `rope_freqs` is Llama 3.1's scaling worked
out; `rope_factors_long` and `rope_factors_short` are LongRoPE's, whose type is often left out.
"""

import struct

from protocol.errors import ModelFileError
from worker.gguf_file import GgufHeader
from worker.gguf_metadata import GgufMetadata
from worker.rope_config import (
    MAX_POSITIONS,
    FactorScaling,
    LinearScaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
    longrope_attention_factor,
    yarn_attention_factor,
)

_FACTORS = "rope_freqs.weight"
_LONG_FACTORS = "rope_factors_long.weight"
_SHORT_FACTORS = "rope_factors_short.weight"
ROPE_TENSORS = frozenset({_FACTORS, _LONG_FACTORS, _SHORT_FACTORS})
"""Tensors of a file that are read here and are no weights."""

_FLOAT32 = 0


def gguf_rope(
    keys: GgufMetadata, header: GgufHeader, *, head_dim: int, context_length: int
) -> RopeConfig:
    """Return how a model's heads turn, sliding layers apart. Raises ModelFileError."""
    name = keys.text("general.architecture")
    rotary_dim = keys.integer(f"{name}.rope.dimension_count", head_dim)
    if name == "llama" and rotary_dim != head_dim:
        # Its rows are stored interleaved over whole heads.
        raise keys.bad(f"{name}.rope.dimension_count", f"must equal the head size, {head_dim}")
    return RopeConfig(
        theta=keys.number(f"{name}.rope.freq_base", 10_000.0),
        rotary_dim=rotary_dim,
        scaling=_scaling(keys, header, name, context_length),
    )


def _scaling(
    keys: GgufMetadata, header: GgufHeader, name: str, context_length: int
) -> RopeScaling | None:
    if _FACTORS in header.tensors:
        return FactorScaling(factors=_read_factors(header, _FACTORS))
    prefix = f"{name}.rope.scaling"
    original = keys.integer(f"{prefix}.original_context_length", context_length)
    # Lengths are checked by `RopeConfig` and `ModelConfig`; here they only must not overflow.
    growth = min(context_length, MAX_POSITIONS) / max(original, 1)
    if _LONG_FACTORS in header.tensors:
        return LongRopeScaling(
            short_factors=_read_factors(header, _SHORT_FACTORS),
            long_factors=_read_factors(header, _LONG_FACTORS),
            original_max_position_embeddings=original,
            attention_factor=keys.number(
                f"{prefix}.attn_factor", longrope_attention_factor(growth, original)
            ),
        )
    match keys.text(f"{prefix}.type", "linear"):
        case "none":
            scaling = None
        case "linear":
            # The second is the oldest files' name; 0 means that nothing is scaled.
            factor = keys.number(f"{prefix}.factor", keys.number(f"{name}.rope.scale_linear", 0.0))
            scaling = LinearScaling(factor=factor) if factor not in (0.0, 1.0) else None
        case "yarn":
            return _yarn(keys, name, growth, original)
        case "longrope":
            raise ModelFileError(f"{header.path}: the tensor {_LONG_FACTORS} is missing")
        case _:
            raise keys.bad(f"{prefix}.type", "must be none, linear, yarn or longrope")
    if keys.number(f"{prefix}.attn_factor", 1.0) != 1.0:
        raise keys.bad(f"{prefix}.attn_factor", "must be 1 without yarn or longrope")
    return scaling


def _yarn(keys: GgufMetadata, name: str, growth: float, original: int) -> YarnScaling:
    prefix = f"{name}.rope.scaling"
    for key, usual in ((f"{prefix}.yarn_ext_factor", 1.0), (f"{prefix}.yarn_log_multiplier", 0.0)):
        if keys.number(key, usual) != usual:
            raise keys.bad(key, f"must be {usual:g}")
    factor = keys.number(f"{prefix}.factor", growth)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=yarn_attention_factor(factor)
        * keys.number(f"{prefix}.attn_factor", 1.0)
        * keys.number(f"{prefix}.yarn_attn_factor", 1.0),
        beta_fast=keys.number(f"{prefix}.yarn_beta_fast", 32.0),
        beta_slow=keys.number(f"{prefix}.yarn_beta_slow", 1.0),
        # GPT-OSS was trained so, which its config.json says and its GGUF files do not.
        truncate=name != "gpt-oss",
    )


def _read_factors(header: GgufHeader, name: str) -> tuple[float, ...]:
    tensor = header.tensors.get(name)
    if tensor is None:
        raise ModelFileError(f"{header.path}: the tensor {name} is missing")
    if tensor.type_id != _FLOAT32 or len(tensor.shape) != 1 or not 1 <= tensor.shape[0] <= 512:
        raise ModelFileError(f"{header.path}: {name} must be float32, [rotary part of a head / 2]")
    layout = struct.Struct(f"<{tensor.shape[0]}f")
    with open(header.path, "rb") as file:
        file.seek(tensor.offset)
        data = file.read(layout.size)
    if len(data) != layout.size:
        raise ModelFileError(f"{header.path} ends inside {name}; it is truncated")
    return layout.unpack(data)
