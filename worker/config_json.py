"""config.json and generation_config.json of a model directory, read into a `ModelConfig`.

Written by many versions of transformers: version 5 says `rope_parameters` and `dtype`, older ones
`rope_theta` with `rope_scaling` and `torch_dtype`. Both are read (`worker.rope_json`). Nothing in
these files is run: `auto_map` is ignored.
"""

from pathlib import Path

from worker.json_object import JsonObject, read_json
from worker.model_config import CheckpointDtype, ModelConfig, merge_token_ids
from worker.rope_json import read_rope

_DEFAULT_MAX_POSITIONS = 2048


def read_config_json(directory: Path) -> ModelConfig:
    """Read a model directory's config. Raises ModelFileError naming the file and the key."""
    source = directory / "config.json"
    config = JsonObject(source, read_json(source))
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
    max_positions = config.integer("max_position_embeddings", _DEFAULT_MAX_POSITIONS)
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
        rope=read_rope(config, head_dim=head_dim, max_position_embeddings=max_positions),
        max_position_embeddings=max_positions,
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        attention_bias=config.flag("attention_bias"),
        mlp_bias=config.flag("mlp_bias"),
        bos_token_id=config.optional_integer("bos_token_id"),
        eos_token_ids=merge_token_ids(
            config.token_ids("eos_token_id"), _generation_eos(directory, vocab_size)
        ),
        dtype=_dtype(config),
    )


def _architecture(config: JsonObject) -> str:
    names = config.strings("architectures")
    if len(names) != 1:
        raise config.bad("architectures", "must name one architecture")
    return names[0]


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


def _generation_eos(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the EOS ids of generation_config.json, which chat models extend there."""
    source = directory / "generation_config.json"
    if not source.exists():
        return ()
    config = JsonObject(source, read_json(source))
    ids = config.token_ids("eos_token_id")
    if not all(0 <= token_id < vocab_size for token_id in ids):
        raise config.bad("eos_token_id", f"must be 0 to {vocab_size - 1}")
    return ids
