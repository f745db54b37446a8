"""A Llama or Qwen3 saved as GGUF, with its rows in GGUF's order."""

from pathlib import Path

import gguf
import numpy as np
from transformers import LlamaForCausalLM, Qwen3ForCausalLM

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    name = name.replace("model.layers.", "blk.")
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a query or key projection's rows."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def save_gguf(
    path: Path,
    model: LlamaForCausalLM | Qwen3ForCausalLM,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    config = model.config
    is_llama = isinstance(model, LlamaForCausalLM)
    writer = gguf.GGUFWriter(path, "llama" if is_llama else "qwen3")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if config.head_dim:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list([f"token {i}" for i in range(config.vocab_size)])
    writer.add_eos_token_id(2)
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if is_llama and ".q_proj." in name:
            values = interleaved(values, config.num_attention_heads)
        elif is_llama and ".k_proj." in name:
            values = interleaved(values, config.num_key_value_heads)
        kind = quantization if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
