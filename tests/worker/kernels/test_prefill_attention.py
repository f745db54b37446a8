import pytest
import torch

from benchmarks.attention_cases import plain_attention
from worker.attention.base import LayerAttention

pytest.importorskip("triton")

from worker.kernels.prefill_attention import (
    PrefillTuning,
    attend_chunks,
    attend_paged_chunks,
    choose_tuning,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TUNING = PrefillTuning(queries=32, keys=16, warps=4, stages=2)
COUNTS = (1, 32, 45)
STARTS = (40, 0, 17)
SINKS = torch.tensor([40.0, 0.0, -40.0], device=DEVICE)
"""Above every score, among them, below all."""


def chunk_starts() -> torch.Tensor:
    return torch.tensor([0, *COUNTS], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(DEVICE)


def random(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(sizes, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize(
    ("heads", "dtype"), [((4, 2, 80), torch.float32), ((2, 2, 16), torch.float16)]
)
def test_fresh_chunks(heads, dtype):
    num_heads, num_kv_heads, head_dim = heads
    query = random(sum(COUNTS), num_heads, head_dim, dtype=dtype)
    key_value = random(sum(COUNTS), 2, num_kv_heads, head_dim, dtype=dtype)
    keys, values = key_value.unbind(1)
    output = attend_chunks(query, keys, values, chunk_starts(), scale=head_dim**-0.5, tuning=TUNING)
    expected = torch.cat(
        [
            plain_attention(q, c, 0, torch.float64)
            for q, c in zip(query.split(COUNTS), key_value.split(COUNTS), strict=True)
        ]
    )
    error = float((output.flatten(1) - expected).abs().max())
    assert error < (2e-3 if dtype == torch.float16 else 2e-6)


@pytest.mark.parametrize("block_size", [8, 16, 24, 64])
def test_chunks_after_a_prefix(block_size):
    check_paged(block_size, LayerAttention(32**-0.5, None), has_sinks=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "has_sinks"), [(1, False), (16, True), (40, False), (1000, True), (None, True)]
)
def test_windows_sinks_and_scale(window, has_sinks):
    how = LayerAttention(0.3, window)
    check_paged(16, how, has_sinks=has_sinks)
    query = random(sum(COUNTS), 3, 16, dtype=torch.float32)
    key_value = random(sum(COUNTS), 2, 1, 16, dtype=torch.float32)
    sinks = SINKS if has_sinks else None
    output = attend_chunks(
        query,
        *key_value.unbind(1),
        chunk_starts(),
        scale=how.scale,
        window=window,
        sinks=sinks,
        tuning=TUNING,
    )
    expected = torch.cat(
        [
            plain_attention(q, c, 0, torch.float64, how=how, sinks=sinks)
            for q, c in zip(query.split(COUNTS), key_value.split(COUNTS), strict=True)
        ]
    )
    assert float((output.flatten(1) - expected).abs().max()) < 2e-6


def check_paged(block_size: int, how: LayerAttention, *, has_sinks: bool) -> None:
    """Hold chunks that follow what is in the cache to float64."""
    num_heads, num_kv_heads, head_dim, dtype = 3, 1, 32, torch.float32
    sinks = SINKS if has_sinks else None
    lengths = [start + count for start, count in zip(STARTS, COUNTS, strict=True)]
    width = -(-max(lengths) // block_size)
    num_blocks = width * len(COUNTS)
    tables = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
    tables = tables.view(-1, width).to(DEVICE, torch.int32)
    cache = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), torch.nan).to(DEVICE)
    contents = []
    for table, length in zip(tables, lengths, strict=True):
        tokens = random(length, 2, num_kv_heads, head_dim, dtype=dtype)
        positions = torch.arange(length, device=DEVICE)
        blocks = table[positions // block_size].long()
        cache[:, blocks, positions % block_size] = tokens.transpose(0, 1)
        contents.append(tokens)
    query = random(sum(COUNTS), num_heads, head_dim, dtype=dtype)
    output = attend_paged_chunks(
        query,
        cache[0],
        cache[1],
        chunk_starts(),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        tables,
        scale=how.scale,
        window=how.window,
        sinks=sinks,
        tuning=TUNING,
    )
    expected = torch.cat(
        [
            plain_attention(q, c, start, torch.float64, how=how, sinks=sinks)
            for q, c, start in zip(query.split(COUNTS), contents, STARTS, strict=True)
        ]
    )
    assert float((output.flatten(1) - expected).abs().max()) < 2e-6


def test_many_chunks():
    """More than are looked through at a time, some of no rows."""
    counts = [index % 3 for index in range(300)]
    starts = torch.tensor([0, *counts]).cumsum(0).to(DEVICE, torch.int32)
    query = random(sum(counts), 1, 16, dtype=torch.float32)
    key_value = random(sum(counts), 2, 1, 16, dtype=torch.float32)
    keys, values = key_value.unbind(1)
    output = attend_chunks(query, keys, values, starts, scale=0.25, tuning=TUNING)
    expected = torch.cat(
        [
            plain_attention(q, c, 0, torch.float64)
            for q, c in zip(query.split(counts), key_value.split(counts), strict=True)
            if len(q)
        ]
    )
    assert float((output.flatten(1) - expected).abs().max()) < 2e-6


def test_default_tuning():
    half = PrefillTuning(queries=128, keys=64, warps=8, stages=3)
    assert choose_tuning(900, 3, 128, torch.bfloat16) == half
    assert choose_tuning(900, 3, 64, torch.float16) == half
    assert choose_tuning(900, 3, 256, torch.bfloat16).queries == 64
    assert choose_tuning(900, 3, 256, torch.float32).keys == 16
    assert choose_tuning(256, 65, 128, torch.bfloat16).queries == 16
