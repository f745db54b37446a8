"""The models there are, by the name their config gives them."""

from collections.abc import Mapping

from worker.models.llama import LlamaForCausalLM

ARCHITECTURES: Mapping[str, type[LlamaForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
}
"""Its keys are `worker.model_config.SUPPORTED_ARCHITECTURES`."""
