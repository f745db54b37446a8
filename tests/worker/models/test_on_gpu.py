"""Every family on a GPU in bfloat16: the whole runner's greedy tokens against float32's.

A random model's bfloat16 wanders farther from float32 than a trained one's, so what transformers
makes of the same weights in bfloat16 says how far is right.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.teacher_forcing import (
    Comparison,
    compare,
    compare_model,
    make_references,
    random_prompts,
)
from protocol.lifecycle import ProcessConfig
from tests.worker.models.families import FAMILIES, NUM_TOKENS, Family
from tests.worker.models.harness import save_family
from worker.config import WorkerConfig
from worker.model_setup import build_model_runner

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "initializer_range": 0.08,
}
"""Of models large enough for the kernels that a GPU uses."""
HEADS: dict[str, Any] = {
    "head_dim": 64,
    "sliding_window": 40,
    "moe_intermediate_size": 128,
    "query_pre_attn_scalar": 80,
}
"""Where a family has such a field."""
EXPERTS = ("num_experts", "num_local_experts")
LENGTHS = (18, 60, 137)
NUM_EACH = 4


def gpu_sizes(family: Family) -> dict[str, Any]:
    """Return what differs in a family's larger model."""
    changes = {name: value for name, value in HEADS.items() if name in family.config}
    rope = family.config.get("rope_parameters", {})
    if "short_factor" in rope:
        factors = [1.0 + 0.25 * i for i in range(24)]
        changes["rope_parameters"] = {**rope, "short_factor": factors, "long_factor": factors[::-1]}
    return SIZES | changes


def compare_on(
    device: torch.device, family: Family, directory: Path
) -> tuple[Comparison, Comparison, float]:
    """Return how far our runner and transformers are off in bfloat16, and how far logits spread."""
    save_family(family, directory, **gpu_sizes(family)).to(torch.bfloat16).save_pretrained(
        directory
    )
    # Loaded anew: converting a model would round what it computes its angles from.
    wide, narrow = (
        AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    prompts = random_prompts(SIZES["vocab_size"], LENGTHS, num_each=NUM_EACH)
    references = make_references(wide, prompts, num_tokens=NUM_TOKENS)
    plain = compare_model(narrow, references)
    config = WorkerConfig(
        process=ProcessConfig(run_dir="unused"),
        model=str(directory),
        device=device.type,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=len(prompts),
        num_blocks=len(prompts) * 16,
    )
    found = compare(build_model_runner(config), references, max_chunk=50)
    spread = torch.stack([reference.logits for reference in references]).std()
    return found, plain, float(spread)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architecture)
def test_tokens(family: Family, tmp_path: Path):
    """Hardly more than twice as many as in transformers differ, and none is chosen far off."""
    found, plain, spread = compare_on(torch.device("cuda"), family, tmp_path)
    print(f"{family.architecture}: ours {found}, transformers {plain}, logits' spread {spread:.2f}")
    assert found.positions == len(LENGTHS) * NUM_EACH * NUM_TOKENS
    assert found.differing <= 2 * plain.differing + 0.02 * found.positions
    # Another expert than float32's, where two are nearly as likely, changes all logits of a token.
    slack = 0.1 if family.config.keys().isdisjoint(EXPERTS) else 1.0
    assert found.worst_choice <= 3 * plain.worst_choice + slack * spread
