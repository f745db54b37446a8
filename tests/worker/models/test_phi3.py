"""Which rows of fused tensors a rank takes."""

from pathlib import Path

import torch

from tests.worker.models.families import FAMILIES
from tests.worker.models.harness import save_family
from tests.worker.thread_ranks import thread_ranks
from tests.worker.tiny_models import CPU
from worker.model_files import read_model_config
from worker.models.phi3 import build_phi3

FAMILY = next(family for family in FAMILIES if family.model_type == "phi3")


def test_a_rank_takes_its_rows_of_every_part(tmp_path: Path):
    save_family(FAMILY, tmp_path, num_hidden_layers=1)
    config = read_model_config(tmp_path)
    model = build_phi3(
        config, group=thread_ranks(4)[3], max_model_len=8, dtype=torch.float32, device=CPU
    )
    taken = [
        (weight.name.removeprefix("model.layers.0."), weight.shape[0], weight.start, weight.end)
        for weight in model.weights()
        if "qkv" in weight.name or "gate_up" in weight.name
    ]
    # 8 query heads, 2 each for keys and values, of 8; ranks 2 and 3 share the second of them.
    assert taken == [
        ("self_attn.qkv_proj.weight", 96, 48, 64),
        ("self_attn.qkv_proj.weight", 96, 64 + 8, 64 + 16),
        ("self_attn.qkv_proj.weight", 96, 80 + 8, 80 + 16),
        ("mlp.gate_up_proj.weight", 160, 60, 80),
        ("mlp.gate_up_proj.weight", 160, 80 + 60, 80 + 80),
    ]
