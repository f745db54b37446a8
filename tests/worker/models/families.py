"""One row for each architecture: a tiny model of it, and what is known to hold.

tests/worker/models/test_families.py holds every row to transformers; `make docs` writes
docs/models.md from them (tests/worker/models/page.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

SIZES: Mapping[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Weights far larger than usual, so that a wrong position or token shows in the logits.
    "initializer_range": 0.3,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An architecture."""

    architecture: str
    """As config.json names it."""
    model_type: str
    """As transformers names its configuration."""
    models: str
    """Some that people run."""
    differs: str
    """What it has that Llama has not."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Of the tiny model, beside `SIZES`; windows are smaller than its texts."""
    example: tuple[str, int, int, int]
    """A model people run: its name, query heads, KV heads, intermediate size."""
    beside: Mapping[str, Any] | None = None
    """If the text model is a part of another: what is beside its config."""
    norm_mean: float = 1.0
    """Around which the tiny model's norm weights are drawn."""
    embedding_scale: float = 1.0
    """What the model multiplies embeddings by; the tiny one's are divided by it: layers count."""
    gguf: str | None = None
    """GGUF's name of the architecture, where such files are read."""
    on_gpu: tuple[int, int]
    """Of 768 greedy tokens in bfloat16 on one H200, how many were not float32's: ours, and
    transformers'. tests/worker/models/test_on_gpu.py prints them."""


FAMILIES = (
    Family(
        architecture="LlamaForCausalLM",
        on_gpu=(31, 30),
        model_type="llama",
        models="Llama 2, 3, 3.1, 3.2, 3.3; SmolLM2; TinyLlama; Yi",
        differs="",
        example=("Llama-3.1-8B", 32, 8, 14_336),
        gguf="llama",
    ),
    Family(
        architecture="MistralForCausalLM",
        on_gpu=(24, 37),
        model_type="mistral",
        models="Mistral 7B, Nemo, Small 24B",
        differs="a window in every layer, or none",
        example=("Mistral-7B", 32, 8, 14_336),
        config={"sliding_window": 9, "head_dim": 8},
    ),
    Family(
        architecture="Qwen2ForCausalLM",
        on_gpu=(18, 23),
        model_type="qwen2",
        models="Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen",
        differs="biases of q, k and v; windows in later layers, or none",
        example=("Qwen2.5-7B", 28, 4, 18_944),
        config={"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
        gguf="qwen2",
    ),
    Family(
        architecture="Qwen3ForCausalLM",
        on_gpu=(21, 24),
        model_type="qwen3",
        models="Qwen3 dense, all sizes",
        differs="queries and keys normalised head by head",
        example=("Qwen3-8B", 32, 8, 12_288),
        config={"head_dim": 12, "tie_word_embeddings": True},
        gguf="qwen3",
    ),
    Family(
        architecture="Phi3ForCausalLM",
        on_gpu=(51, 64),
        model_type="phi3",
        models="Phi-3 mini, medium; Phi-3.5 mini; Phi-4, Phi-4-mini",
        differs="fused tensors in the checkpoint; part of a head rotated; LongRoPE; a window",
        example=("Phi-4", 40, 10, 17_920),
        config={
            "sliding_window": 9,
            "head_dim": 8,
            "hidden_size": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.5, 2.0],
                "long_factor": [1.0, 3.0, 8.0],
            },
            "original_max_position_embeddings": 16,
        },
    ),
    Family(
        architecture="SmolLM3ForCausalLM",
        on_gpu=(28, 51),
        model_type="smollm3",
        models="SmolLM3-3B",
        differs="every fourth layer does not rotate",
        example=("SmolLM3-3B", 16, 4, 11_008),
        config={"no_rope_layer_interval": 2, "tie_word_embeddings": True},
    ),
    Family(
        architecture="Olmo2ForCausalLM",
        on_gpu=(9, 17),
        model_type="olmo2",
        models="OLMo 2 1B, 7B, 13B, 32B",
        differs="norms behind attention and feed-forward; q and k normalised as a whole",
        example=("OLMo-2-7B", 32, 32, 11_008),
    ),
    Family(
        architecture="GraniteForCausalLM",
        on_gpu=(24, 36),
        model_type="granite",
        models="Granite 3.0 to 3.3, dense",
        differs="embedding, residual, scores and logits scaled",
        example=("Granite-3.3-8B", 32, 8, 12_800),
        config={
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 8.0,
            "attention_bias": True,
        },
        embedding_scale=12.0,
    ),
    GEMMA3 := Family(
        architecture="Gemma3ForCausalLM",
        on_gpu=(9, 19),
        model_type="gemma3_text",
        models="Gemma 3 270M, 1B",
        differs="four norms a layer; GELU; windows with a RoPE base of their own; scaled embedding",
        example=("Gemma-3-1B", 4, 1, 6_912),
        config={
            "sliding_window": 9,
            "tie_word_embeddings": False,
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        norm_mean=0.0,
        gguf="gemma3",
        embedding_scale=48**0.5,
    ),
    replace(
        GEMMA3,
        architecture="Gemma3ForConditionalGeneration",
        on_gpu=(12, 13),
        model_type="gemma3",
        gguf=None,
        models="Gemma 3 4B, 12B, 27B",
        differs="as `Gemma3ForCausalLM`; text alone, images are not read",
        example=("Gemma-3-4B", 8, 4, 10_240),
        beside={
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
            "tie_word_embeddings": False,
        },
    ),
    Family(
        architecture="Qwen3MoeForCausalLM",
        on_gpu=(30, 33),
        model_type="qwen3_moe",
        models="Qwen3-30B-A3B, 235B-A22B; Qwen3-Coder-30B-A3B",
        differs="experts in all or some layers; queries and keys normalised head by head",
        example=("Qwen3-30B-A3B", 32, 4, 768),
        config={
            "head_dim": 12,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    Family(
        architecture="GptOssForCausalLM",
        on_gpu=(11, 30),
        model_type="gpt_oss",
        models="gpt-oss-20b, gpt-oss-120b",
        differs="experts, also in MXFP4; attention sinks; windows in every other layer; biases",
        example=("gpt-oss-20b", 64, 8, 2_880),
        config={
            "head_dim": 8,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 9,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
    ),
)

TP_SIZES = (1, 2, 4)
"""What every row is tested with; its two KV heads are each held by two ranks of four."""
NUM_TOKENS = 64
"""How many greedy tokens must be transformers'."""
