"""Tiny random models made with transformers, and our model run step by step beside them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from protocol.messages import StepPlan
from tests.worker.plan_builder import make_join, make_plan
from worker.attention.torch_attention import TorchAttention
from worker.batch import BatchBuilder
from worker.kv_cache import KVCache, KVCacheShape
from worker.model_files import read_model_config
from worker.model_loading import load_model
from worker.model_setup import layer_attentions
from worker.parallel import OneRank, TensorParallel
from worker.quantization import Storage
from worker.shard import divide_heads
from worker.slots import SlotTable

CPU = torch.device("cpu")
# Tiny products gain nothing from a second thread and lose much when the machine is busy.
torch.set_num_threads(1)
SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_llama(directory: Path, *, shard_size: str = "5GB", **changes: Any) -> LlamaForCausalLM:
    """Save a random float32 Llama and return it."""
    torch.manual_seed(0)
    # Weights far larger than usual, so that a wrong position or token shows in the logits.
    config = LlamaConfig(**SIZES | {"initializer_range": 0.3} | changes)
    model = LlamaForCausalLM(config).float().eval()
    if config.attention_bias or config.mlp_bias:
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
    model.save_pretrained(directory, max_shard_size=shard_size)
    return model


def save_qwen3(directory: Path, **changes: Any) -> Qwen3ForCausalLM:
    """Save a random float32 Qwen3, heads larger than hidden size over heads, and return it."""
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES | {"initializer_range": 0.3, "head_dim": 12} | changes)
    model = Qwen3ForCausalLM(config).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "q_norm.weight", "k_norm.weight")):
            torch.nn.init.normal_(parameter, mean=1.0)
    model.save_pretrained(directory)
    return model


def reference_logits(
    model: LlamaForCausalLM | Qwen3ForCausalLM, token_ids: Sequence[int]
) -> Tensor:
    """Return transformers' logits of every position. [tokens, vocab]"""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


class Stepper:
    """Our model in `path`, run by plans; every step returns its logits."""

    def __init__(
        self,
        path: Path,
        *,
        group: TensorParallel | None = None,
        block_size: int = 4,
        num_blocks: int = 64,
        dtype=torch.float32,
        storage: Storage = "none",
    ) -> None:
        config = read_model_config(path)
        group = group or OneRank()
        self.model, self.report = load_model(
            path,
            config,
            group=group,
            max_model_len=96,
            dtype=dtype,
            device=CPU,
            storage=storage,
        )
        heads = divide_heads(
            config.num_heads, config.num_kv_heads, rank=group.rank, size=group.size
        )
        shape = KVCacheShape(
            num_layers=config.num_layers,
            num_kv_heads=heads.key_value.size,
            head_dim=config.head_dim,
            block_size=block_size,
        )
        self.cache = KVCache(shape, num_blocks, dtype=dtype, device=CPU)
        # What a cache that has been in use may hold where nobody has written yet.
        self.cache.data[:, :, :, :num_blocks] = float("nan")
        self.attention = TorchAttention(self.cache, heads.query.size, layer_attentions(config))
        self.table = SlotTable(
            slots=8,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=96,
            vocab_size=config.vocab_size,
        )
        self.builder = BatchBuilder(
            block_size=block_size, pad_block=self.cache.pad_block, min_rows=4, device=CPU
        )
        self.last_tokens = torch.zeros(8, dtype=torch.int64)
        self._step_id = 0

    def step(self, **plan: Any) -> Tensor:
        """Run `make_plan`'s plan; return the logits of rows that sample. [sampled, vocab]"""
        self._step_id += 1
        return self.run(make_plan(self._step_id, **plan))

    def run(self, plan: StepPlan) -> Tensor:
        """Run a plan; return the logits of rows that sample. [sampled, vocab]"""
        rows = self.table.apply(plan)
        with torch.inference_mode():
            self.cache.copy_blocks(rows.copies.tolist())
            batch = self.builder.build(rows, self.table.block_tables, self.last_tokens)
            attention = self.attention.start_step(batch)
            hidden = self.model(batch.tokens, batch.positions, attention, batch.wanted_rows)
            if not len(batch.sampled):
                return torch.empty(0, 0)
            logits = self.model.logits(hidden)
        return logits[: len(batch.sampled)]

    def prefill(self, slot: int, token_ids: Sequence[int], blocks: Sequence[int]) -> Tensor:
        """Join a sequence and compute it whole; return the logits of its last token."""
        join = make_join(slot, token_ids, blocks, generation=self._step_id)
        return self.step(joins=[join], chunks=[(slot, 0, len(token_ids), 1)])[0]

    def decode(self, tokens: dict[int, int]) -> Tensor:
        """Feed each slot a token; return the logits, [slots, vocab]."""
        for slot, token in tokens.items():
            self.last_tokens[slot] = token
        return self.step(decode=list(tokens))
