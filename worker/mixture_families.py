"""What config.json says in families with a mixture of experts. Imports no torch.

Defaults are those of transformers' configuration of the family, as in `worker.families`.
"""

from dataclasses import replace

from worker.config_fields import layer_types, plain_config
from worker.json_object import JsonObject
from worker.model_config import ExpertsConfig, ModelConfig, SwigluClamp

_EXPERT_COUNTS = ("num_experts", "num_local_experts")
"""What versions of transformers call the number of experts."""


def read_qwen3_moe(config: JsonObject) -> ModelConfig:
    """Qwen3 with experts in every `decoder_sparse_step`th layer but those of `mlp_only_layers`.

    Windows, where they are used, are every layer's. Raises ModelFileError naming file and key.
    """
    config = config.with_defaults(
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "mlp_only_layers": [],
            "sliding_window": 4096,
        }
    )
    plain = plain_config(config, computes=(*_EXPERT_COUNTS, "use_sliding_window"))
    step = config.integer("decoder_sparse_step", 1)
    if step < 1:
        raise config.bad("decoder_sparse_step", "must be at least 1")
    dense = config.integers("mlp_only_layers") if config.has("mlp_only_layers") else ()
    layers = tuple(
        layer not in dense and (layer + 1) % step == 0 for layer in range(plain.num_layers)
    )
    window = (
        config.optional_integer("sliding_window") if config.flag("use_sliding_window") else None
    )
    return replace(
        plain,
        query_key_norm="head",
        mlp_bias=False,
        windows=(window,) * plain.num_layers,
        experts=ExpertsConfig(
            layers=layers,
            num_experts=_num_experts(config),
            experts_per_token=config.integer("num_experts_per_tok", 8),
            intermediate_size=config.integer("moe_intermediate_size"),
            is_renormalised=config.flag("norm_topk_prob"),
        ),
    )


def read_gpt_oss(config: JsonObject) -> ModelConfig:
    """Experts in every layer, windows in every second one, a sink for every head.

    Experts may be stored in MXFP4. Raises ModelFileError naming file and key.
    """
    config = config.with_defaults(
        {
            "head_dim": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "attention_bias": True,
        }
    )
    if not (config.has("rope_parameters") or config.has("rope_scaling")):
        config = config.with_defaults({"rope_scaling": _GPT_OSS_YARN})
    plain = plain_config(config, computes=_EXPERT_COUNTS, default_theta=150_000.0)
    types = layer_types(config, plain.num_layers) or tuple(
        "full_attention" if layer % 2 else "sliding_attention" for layer in range(plain.num_layers)
    )
    window = config.optional_integer("sliding_window")
    return replace(
        plain,
        mlp_bias=False,
        has_sinks=True,
        windows=tuple(window if kind == "sliding_attention" else None for kind in types),
        experts=ExpertsConfig(
            layers=(True,) * plain.num_layers,
            num_experts=_num_experts(config),
            experts_per_token=config.integer("num_experts_per_tok", 4),
            intermediate_size=plain.intermediate_size,
            is_renormalised=True,
            has_bias=True,
            clamp=SwigluClamp(
                alpha=config.number("swiglu_alpha", 1.702),
                limit=config.number("swiglu_limit", 7.0),
            ),
            is_packed=_is_mxfp4(config),
        ),
    )


_GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _num_experts(config: JsonObject) -> int:
    return config.integer(next((key for key in _EXPERT_COUNTS if config.has(key)), "num_experts"))


def _is_mxfp4(config: JsonObject) -> bool:
    """Return whether the experts are in MXFP4; any other quantisation is refused."""
    quantization = config.object("quantization_config")
    if quantization is None:
        return False
    if quantization.text("quant_method", "") != "mxfp4":
        raise quantization.bad("quant_method", 'must be "mxfp4"')
    return True
