"""The models there are, by the name their config gives them."""

from collections.abc import Mapping
from typing import Protocol

import torch

from worker.model_config import ModelConfig
from worker.models.causal_lm import CausalLM
from worker.models.gemma3 import build_gemma3, build_gemma3_text_part
from worker.models.gpt_oss import build_gpt_oss
from worker.models.llama import build_llama
from worker.models.olmo2 import build_olmo2
from worker.models.phi3 import build_phi3
from worker.models.qwen3_moe import build_qwen3_moe
from worker.parallel import TensorParallel


class ModelBuilder(Protocol):
    """Makes a rank's part of a model, its weights still empty."""

    def __call__(
        self,
        config: ModelConfig,
        *,
        group: TensorParallel,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> CausalLM:
        """Return the model. `group.size` is one of `config.legal_tp_sizes()`."""
        ...


ARCHITECTURES: Mapping[str, ModelBuilder] = {
    "LlamaForCausalLM": build_llama,
    "MistralForCausalLM": build_llama,
    "Qwen2ForCausalLM": build_llama,
    "Qwen3ForCausalLM": build_llama,
    "SmolLM3ForCausalLM": build_llama,
    "GraniteForCausalLM": build_llama,
    "Phi3ForCausalLM": build_phi3,
    "Olmo2ForCausalLM": build_olmo2,
    "Gemma3ForCausalLM": build_gemma3,
    "Gemma3ForConditionalGeneration": build_gemma3_text_part,
    "Qwen3MoeForCausalLM": build_qwen3_moe,
    "GptOssForCausalLM": build_gpt_oss,
}
"""Its keys are `worker.families.SUPPORTED_ARCHITECTURES`."""
