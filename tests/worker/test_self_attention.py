"""Which rows of which tensors a rank takes. What it computes with them is test_causal_lm's."""

import torch

from tests.worker.thread_ranks import thread_ranks
from worker.layers.head_norm import HeadNorm
from worker.models.self_attention import SelfAttention
from worker.shard import divide_heads

CPU = torch.device("cpu")
HEAD_DIM = 4


def slices(rank_index: int, *, size: int, has_norm: bool = False) -> dict[str, tuple[int, ...]]:
    """Each weight's name, shape in the checkpoint, dimension, start and end on a rank."""
    rank = thread_ranks(size)[rank_index]
    heads = divide_heads(8, 2, rank=rank.rank, size=rank.size)
    norm = HeadNorm(8 // size, 1, HEAD_DIM, 1e-6, dtype=torch.float32, device=CPU)
    attention = SelfAttention(
        0,
        16,
        heads,
        HEAD_DIM,
        qkv_bias=True,
        output_bias=True,
        norm=norm if has_norm else None,
        group=rank,
        dtype=torch.float32,
        device=CPU,
    )
    return {
        weight.name: (*weight.shape, weight.dim, weight.start, weight.end)
        for weight in attention.weights("a.")
    }


def test_ranks_that_share_a_kv_head_take_the_same_rows():
    assert slices(3, size=4) == {
        "a.q_proj.weight": (32, 16, 0, 24, 32),
        "a.q_proj.bias": (32, 0, 24, 32),
        "a.k_proj.weight": (8, 16, 0, 4, 8),
        "a.k_proj.bias": (8, 0, 4, 8),
        "a.v_proj.weight": (8, 16, 0, 4, 8),
        "a.v_proj.bias": (8, 0, 4, 8),
        "a.o_proj.weight": (16, 32, 1, 24, 32),
        "a.o_proj.bias": (16, 0, 0, 0),
    }
    second, third = slices(2, size=4), slices(3, size=4)
    assert second["a.k_proj.weight"] == third["a.k_proj.weight"]
    assert second["a.q_proj.weight"] == (32, 16, 0, 16, 24)


def test_head_norms_are_whole_on_every_rank():
    weights = slices(1, size=2, has_norm=True)
    assert weights["a.q_norm.weight"] == weights["a.k_norm.weight"] == (4, 0, 0, 4)
