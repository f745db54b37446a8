from worker.gguf_names import gguf_name


def test_names():
    assert gguf_name("lm_head.weight", "llama") == "output.weight"
    assert gguf_name("model.layers.12.mlp.up_proj.weight", "qwen3") == "blk.12.ffn_up.weight"
    assert gguf_name("model.layers.0.self_attn.k_proj.bias", "qwen2") == "blk.0.attn_k.bias"


def test_what_one_name_is_in_two_families():
    name = "model.layers.3.post_attention_layernorm.weight"
    assert gguf_name(name, "llama") == "blk.3.ffn_norm.weight"
    assert gguf_name(name, "gemma3") == "blk.3.post_attention_norm.weight"
