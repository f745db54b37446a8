"""A GGUF file's header as a `ModelConfig`, and the names its tensors have in GGUF."""

from pathlib import Path

from protocol.errors import ModelFileError
from worker.gguf_file import GgufHeader, read_gguf_header
from worker.gguf_metadata import GgufMetadata
from worker.gguf_rope import gguf_rope
from worker.model_config import CheckpointDtype, ModelConfig, merge_token_ids

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_CHECKPOINT_DTYPES: dict[int, CheckpointDtype] = {0: "float32", 1: "float16", 32: "bfloat16"}
"""By `general.file_type`; quantised files are computed in bfloat16, whose range always suffices."""


def read_gguf_config(path: Path) -> ModelConfig:
    """Read the config of a GGUF file. Raises ModelFileError naming the file and the key."""
    return gguf_config(read_gguf_header(path))


def gguf_config(header: GgufHeader) -> ModelConfig:
    """Return the config that a GGUF header describes. Raises ModelFileError."""
    keys = GgufMetadata(header)
    name = keys.text("general.architecture")
    if name not in _ARCHITECTURES:
        raise ModelFileError(
            f"{header.path}: GGUF architecture {name} is not supported; supported: "
            f"{', '.join(_ARCHITECTURES)}"
        )
    hidden_size = keys.integer(f"{name}.embedding_length")
    num_heads = keys.integer(f"{name}.attention.head_count")
    if num_heads < 1:
        raise keys.bad(f"{name}.attention.head_count", "must be at least 1")
    head_dim = keys.integer(f"{name}.attention.key_length", hidden_size // num_heads)
    key = f"{name}.attention.value_length"
    if keys.integer(key, head_dim) != head_dim:
        raise keys.bad(key, f"must equal the head size, {head_dim}")
    if keys.integer(f"{name}.expert_count", 0):
        raise keys.bad(f"{name}.expert_count", "must be 0: mixtures of experts are not supported")
    num_layers = keys.integer(f"{name}.block_count")
    if not 1 <= num_layers <= 1024:
        raise keys.bad(f"{name}.block_count", "must be 1 to 1024")
    if head_dim < 1:
        raise keys.bad(f"{name}.attention.key_length", "must be at least 2")
    context_length = keys.integer(f"{name}.context_length")
    rope = gguf_rope(keys, header, head_dim=head_dim, context_length=context_length)
    return ModelConfig(
        source=header.path,
        architecture=_ARCHITECTURES[name],
        vocab_size=_vocab_size(keys, header, f"{name}.vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.integer(f"{name}.feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=keys.integer(f"{name}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=keys.number(f"{name}.attention.layer_norm_rms_epsilon"),
        norm_offset=0.0,
        query_key_norm="head" if name == "qwen3" else None,
        num_norms=2,
        ropes=(rope,) * num_layers,
        windows=(None,) * num_layers,
        attention_scale=head_dim**-0.5,
        max_position_embeddings=context_length,
        tie_word_embeddings="output.weight" not in header.tensors,
        qkv_bias="blk.0.attn_q.bias" in header.tensors,
        output_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in header.tensors,
        activation="silu",
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
        logits_divisor=1.0,
        experts=None,
        bos_token_id=keys.optional_integer("tokenizer.ggml.bos_token_id"),
        eos_token_ids=merge_token_ids(
            keys.token_id("tokenizer.ggml.eos_token_id"),
            keys.token_id("tokenizer.ggml.eot_token_id"),
            keys.token_id("tokenizer.ggml.eom_token_id"),
        ),
        dtype=_CHECKPOINT_DTYPES.get(keys.integer("general.file_type", -1), "bfloat16"),
    )


def _vocab_size(keys: GgufMetadata, header: GgufHeader, key: str) -> int:
    tokens = header.array_lengths.get("tokenizer.ggml.tokens")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape:
        return embedding.shape[0]
    return keys.integer(key, tokens)
