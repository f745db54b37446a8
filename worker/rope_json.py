"""RoPE's part of config.json, read into a `RopeConfig`.

Three generations of transformers write it in their own ways, and all are read:

    rope_theta, rope_scaling {"type" or "rope_type", …}, rope_local_base_freq
    rope_parameters {"rope_theta", "rope_type", …}
    rope_parameters {"full_attention": {…}, "sliding_attention": {…}}

`partial_rotary_factor` and `original_max_position_embeddings` stand inside or beside them. Defaults
are those of transformers' `modeling_rope_utils`. The values themselves are checked by `RopeConfig`.
"""

from typing import Literal, TypeAlias

from worker.json_object import JsonObject
from worker.rope_config import (
    MAX_POSITIONS,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
    longrope_attention_factor,
    yarn_attention_factor,
)

DEFAULT_THETA = 10_000.0

LayerType: TypeAlias = Literal["full_attention", "sliding_attention"]
"""A layer's kind as `layer_types` of config.json names it."""


def read_rope(
    config: JsonObject,
    *,
    head_dim: int,
    max_position_embeddings: int,
    layer_type: LayerType = "full_attention",
    default_theta: float = DEFAULT_THETA,
    default_local_theta: float | None = None,
) -> RopeConfig:
    """Return how layers of this type turn their heads. Raises ModelFileError.

    `default_theta` is the family's base where the file has none. A family whose sliding layers have
    a base of their own and no scaling (Gemma 3) gives `default_local_theta`; other families' layers
    are all alike, unless the file says `rope_local_base_freq` or has parameters by type.
    """
    parameters = config.object_or_empty("rope_parameters")
    if _is_nested(parameters):
        rope = parameters.object_or_empty(layer_type)
        is_local = layer_type == "sliding_attention" and default_local_theta is not None
        theta = rope.number("rope_theta", default_local_theta if is_local else default_theta)
        return _rope(config, rope, theta, head_dim, max_position_embeddings)
    if layer_type == "sliding_attention" and (
        default_local_theta is not None or config.has("rope_local_base_freq")
    ):
        theta = config.number("rope_local_base_freq", default_local_theta)
        return RopeConfig(theta=theta, rotary_dim=_rotary_dim(config, config, head_dim))
    # A scaling added by hand beside `rope_parameters` is the one that is meant.
    rope = config.object_or_empty("rope_scaling")
    if rope.is_empty():
        rope = parameters
    theta = default_theta
    for place in (parameters, config, rope):
        theta = place.number("rope_theta", theta)
    return _rope(config, rope, theta, head_dim, max_position_embeddings)


def _is_nested(parameters: JsonObject) -> bool:
    return parameters.has("full_attention") or parameters.has("sliding_attention")


def _rope(
    config: JsonObject, rope: JsonObject, theta: float, head_dim: int, max_position_embeddings: int
) -> RopeConfig:
    return RopeConfig(
        theta=theta,
        rotary_dim=_rotary_dim(config, rope, head_dim),
        scaling=_scaling(config, rope, max_position_embeddings),
    )


def _rotary_dim(config: JsonObject, rope: JsonObject, head_dim: int) -> int:
    place = rope if rope.has("partial_rotary_factor") else config
    part = place.number("partial_rotary_factor", 1.0)
    if not 0.0 < part <= 1.0:
        raise place.bad("partial_rotary_factor", "must be above 0 and at most 1")
    # A size out of range is refused by `ModelConfig`; here it only must not overflow.
    return head_dim if part == 1.0 else int(min(head_dim, 1 << 16) * part)


def _scaling(
    config: JsonObject, rope: JsonObject, max_position_embeddings: int
) -> RopeScaling | None:
    # Where it stands beside them it wins, as in transformers: Phi-3's files have it there.
    place = config if config.has("original_max_position_embeddings") else rope
    original = place.integer("original_max_position_embeddings", max_position_embeddings)
    # The lengths are checked by `RopeConfig` and `ModelConfig`; here they only must not overflow.
    growth = min(max_position_embeddings, MAX_POSITIONS) / max(original, 1)
    key = "rope_type" if rope.has("rope_type") else "type"
    match rope.text(key, "default"):
        case "default":
            return None
        case "linear":
            return LinearScaling(factor=rope.number("factor"))
        case "dynamic":
            return DynamicScaling(
                factor=rope.number("factor"),
                original_max_position_embeddings=max_position_embeddings,
            )
        case "llama3":
            return Llama3Scaling(
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_max_position_embeddings=original,
            )
        case "yarn" if not rope.has("long_factor"):
            return _yarn(rope, growth, original)
        # The first Phi-3 files called it su, or yarn.
        case "longrope" | "su" | "yarn":
            factor = rope.number("factor", growth)
            return LongRopeScaling(
                short_factors=rope.numbers("short_factor"),
                long_factors=rope.numbers("long_factor"),
                original_max_position_embeddings=original,
                attention_factor=rope.number(
                    "attention_factor", longrope_attention_factor(factor, original)
                ),
            )
        case _:
            raise rope.bad(key, "must be default, linear, dynamic, llama3, yarn or longrope")


def _yarn(rope: JsonObject, growth: float, original: int) -> YarnScaling:
    factor = rope.number("factor", growth)
    multipliers = [rope.number(key, 0.0) for key in ("mscale", "mscale_all_dim")]
    for key, multiplier in zip(("mscale", "mscale_all_dim"), multipliers, strict=True):
        if multiplier < 0.0:
            raise rope.bad(key, "must not be negative")
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=rope.number(
            "attention_factor", yarn_attention_factor(factor, *multipliers)
        ),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", default=True),
    )
