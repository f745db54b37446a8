"""The fields of config.json that most families share, read as Llama has them.

Those that are set to something no model here computes are refused: a family that computes one
(`worker.families`) says so.
"""

from collections.abc import Collection

from worker.json_object import JsonObject
from worker.model_config import Activation, CheckpointDtype, ModelConfig
from worker.rope_json import DEFAULT_THETA, read_rope

_DEFAULT_MAX_POSITIONS = 2048
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (None, False),
    "use_sliding_window": (None, False),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1),
    "no_rope_layers": (None,),
    "clip_qkv": (None,),
    "qk_layernorm": (None, False),
    "use_qk_norm": (None, False),
    "num_local_experts": (None, 0),
    "num_experts": (None, 0),
}
"""Fields that change what is computed, with the values that do not."""
_WINDOWED = ("sliding_window", "layer_types")


def plain_config(
    config: JsonObject,
    *,
    computes: Collection[str] = (),
    default_theta: float = DEFAULT_THETA,
    activation_key: str = "hidden_act",
) -> ModelConfig:
    """Return the config of a model that is Llama but for what the caller replaces.

    `computes` are fields which Llama does not have and the caller reads. `default_theta` is the
    family's base of RoPE where the file has none. Raises ModelFileError naming file and key.
    """
    for key, neutral in _NEUTRAL.items():
        if key not in computes:
            config.require_one_of(key, neutral)
    num_heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    head_dim = config.optional_integer("head_dim")
    if head_dim is None:
        if num_heads < 1 or hidden_size % num_heads:
            raise config.bad(
                "hidden_size", f"must be a multiple of num_attention_heads ({num_heads})"
            )
        head_dim = hidden_size // num_heads
    if head_dim < 1:
        raise config.bad("head_dim", "must be at least 2")
    num_layers = num_hidden_layers(config)
    max_positions = config.integer("max_position_embeddings", _DEFAULT_MAX_POSITIONS)
    rope = read_rope(
        config,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        default_theta=default_theta,
    )
    has_bias = config.flag("attention_bias")
    return ModelConfig(
        source=config.source,
        architecture=architecture(config),
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        norm_offset=0.0,
        query_key_norm=None,
        num_norms=2,
        ropes=(rope,) * num_layers,
        windows=(None,) * num_layers,
        attention_scale=head_dim**-0.5,
        max_position_embeddings=max_positions,
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=config.flag("mlp_bias"),
        activation=_activation(config, activation_key),
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
        logits_divisor=1.0,
        experts=None,
        bos_token_id=config.optional_integer("bos_token_id"),
        eos_token_ids=config.token_ids("eos_token_id"),
        dtype=_dtype(config),
    )


def architecture(config: JsonObject) -> str:
    """Return the one architecture that the file names. Raises ModelFileError."""
    names = config.strings("architectures")
    if len(names) != 1:
        raise config.bad("architectures", "must name one architecture")
    return names[0]


def num_hidden_layers(config: JsonObject) -> int:
    """Return the number of layers, small enough to make a tuple of. Raises ModelFileError."""
    count = config.integer("num_hidden_layers")
    if not 1 <= count <= 1024:
        raise config.bad("num_hidden_layers", "must be 1 to 1024")
    return count


def layer_types(config: JsonObject, num_layers: int) -> tuple[str, ...] | None:
    """Return whether each layer is "full_attention" or "sliding_attention"; None: not said.

    Raises ModelFileError for another number of layers or another kind of layer.
    """
    if not config.has("layer_types"):
        return None
    types = config.strings("layer_types")
    if len(types) != num_layers:
        raise config.bad("layer_types", f"must have {num_layers} entries, one a layer")
    if set(types) - {"full_attention", "sliding_attention"}:
        raise config.bad("layer_types", "must hold full_attention and sliding_attention only")
    return tuple(types)


def _activation(config: JsonObject, key: str) -> Activation:
    name = config.text(key, "silu")
    if name not in _ACTIVATIONS:
        raise config.bad(key, f"must be {' or '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _dtype(config: JsonObject) -> CheckpointDtype:
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
