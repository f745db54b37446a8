"""Attention against float64, and how decode rows are grouped; test_llama has transformers."""

import numpy as np
import pytest
import torch

from benchmarks.attention_cases import (
    Shape,
    largest_errors,
    plain_attention,
    random_case,
    unrotated,
)
from tests.worker.plan_builder import make_join, make_plan
from worker.attention.base import LayerAttention
from worker.attention.torch_attention import TorchAttention, split_by_length
from worker.batch import BatchBuilder
from worker.kv_cache import KVCache, KVCacheShape
from worker.slots import SlotTable

CPU = torch.device("cpu")


def groups(lengths: list[int]) -> list[list[int]]:
    split = split_by_length(np.array(lengths, dtype=np.int32), block_size=16, max_positions=32_768)
    return [rows.tolist() for rows in split]


def test_similar_lengths_stay_together_and_in_order():
    assert groups([100, 130, 90]) == [[0, 1, 2]]
    assert groups([5]) == [[0]]
    assert groups([]) == []


def test_one_long_row_among_short_ones_goes_alone():
    lengths = [40] * 30 + [8000] + [50] * 30
    split = groups(lengths)
    assert split[0] == [30]
    assert sorted(row for rows in split for row in rows) == list(range(61))


def test_groups_stay_below_the_buffers_size():
    assert [len(rows) for rows in groups([8192] * 10)] == [4, 4, 2]


@pytest.mark.parametrize("seed", range(5))
def test_every_row_is_in_one_group_and_waste_is_bounded(seed: int):
    lengths = np.random.default_rng(seed).integers(1, 4000, 64).astype(np.int32)
    split = split_by_length(lengths, block_size=16, max_positions=32_768)
    assert sorted(np.concatenate(split).tolist()) == list(range(64))
    for rows in split:
        longest = -(-int(lengths[rows].max()) // 16) * 16
        assert len(rows) == 1 or longest * len(rows) <= 32_768


def attention_of_one_sequence() -> tuple[TorchAttention, KVCache, SlotTable]:
    shape = KVCacheShape(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4)
    cache = KVCache(shape, 8, dtype=torch.float32, device=CPU)
    cache.data[:, :, :, :8] = float("nan")
    table = SlotTable(slots=2, num_blocks=8, block_size=4, max_model_len=32, vocab_size=10)
    return TorchAttention(cache, 2, [LayerAttention(0.5, None)]), cache, table


def test_leavings_of_other_sequences_are_not_seen():
    attention, _, table = attention_of_one_sequence()
    builder = BatchBuilder(block_size=4, pad_block=8, min_rows=1, device=CPU)
    last_tokens = torch.zeros(2, dtype=torch.int64)
    join = make_join(0, [1] * 6, [3, 5, 6])
    plans = [make_plan(1, joins=[join], chunks=[(0, 0, 6, 1)])]
    plans += [make_plan(step, decode=[0]) for step in range(2, 6)]
    keys, values = torch.randn(10, 4), torch.randn(10, 4)
    query = torch.randn(10, 2, 4)
    for plan in plans:
        batch = builder.build(table.apply(plan), table.block_tables, last_tokens)
        positions = batch.positions
        key_value = torch.stack((keys[positions], values[positions]), dim=1)[:, :, None]
        output = attention.start_step(batch).attend(0, unrotated(query[positions], key_value))
        for row, position in enumerate(positions.tolist()):
            scores = query[position] @ keys[: position + 1].T / 2
            expected = scores.softmax(-1) @ values[: position + 1]
            torch.testing.assert_close(output[row].view(2, 4), expected)


def test_padding_rows_come_out_zero_and_are_not_stored():
    attention, cache, table = attention_of_one_sequence()
    builder = BatchBuilder(block_size=4, pad_block=8, min_rows=4, device=CPU)
    plan = make_plan(1, joins=[make_join(0, [1], [2])], chunks=[(0, 0, 1, 1)])
    batch = builder.build(table.apply(plan), table.block_tables, torch.zeros(2, dtype=torch.int64))
    step = attention.start_step(batch)
    output = step.attend(0, unrotated(torch.randn(4, 2, 4), torch.randn(4, 2, 1, 4)))
    assert output[0].isfinite().all()
    assert torch.equal(output[1:], torch.zeros(3, 8))
    assert cache.data[0, 0, 0].isfinite().all(dim=(1, 2)).tolist() == [
        block in (2, 8) for block in range(9)
    ]


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_decode", "num_chunks"), [(6, 0), (0, 3), (4, 4)])
def test_windows_sinks_and_scale(
    num_decode: int, num_chunks: int, dtype: torch.dtype, has_sinks: bool, monkeypatch
):
    monkeypatch.setattr("worker.attention.torch_tiles._TILE_ROWS", 8)
    monkeypatch.setattr("worker.attention.torch_tiles._MAX_SCORES", 6 * 90 * 3)
    monkeypatch.setattr("worker.attention.torch_attention._WORTH_SPLITTING", 8)
    case = random_case(
        Shape(num_heads=6, num_kv_heads=2, head_dim=8, block_size=16),
        num_decode=num_decode,
        num_chunks=num_chunks,
        max_len=90,
        seed=2,
        windows=(1, None, 3, 16, 40, 1000, 3),
        scale=0.3,
        has_sinks=has_sinks,
    )
    errors = largest_errors(case, "torch", dtype=dtype, device=CPU)
    assert errors.is_within, errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_decode", "num_chunks"), [(6, 0), (0, 3), (4, 4)])
def test_a_cache_in_fp8(num_decode: int, num_chunks: int, dtype: torch.dtype):
    case = random_case(
        Shape(num_heads=6, num_kv_heads=2, head_dim=8, block_size=16),
        num_decode=num_decode,
        num_chunks=num_chunks,
        max_len=90,
        seed=5,
        windows=(None, 16),
    )
    errors = largest_errors(case, "torch", dtype=dtype, device=CPU, is_fp8=True)
    assert errors.is_within, errors


def test_blocks_before_the_window_are_not_read():
    how = LayerAttention(0.5, 5)
    _, cache, table = attention_of_one_sequence()
    attention = TorchAttention(cache, 2, [how])
    builder = BatchBuilder(block_size=4, pad_block=8, min_rows=1, device=CPU)
    contents, query = torch.randn(22, 2, 1, 4), torch.randn(22, 2, 4)
    plans = [
        make_plan(1, joins=[make_join(0, [1] * 21, [3, 5, 6, 0, 1, 2])], chunks=[(0, 0, 17, 0)]),
        make_plan(2, chunks=[(0, 17, 4, 1)]),
        make_plan(3, decode=[0]),
    ]
    for plan in plans:
        batch = builder.build(
            table.apply(plan), table.block_tables, torch.zeros(2, dtype=torch.int64)
        )
        rows = batch.positions
        if plan is plans[1]:
            cache.data[:, :, :, [3, 5, 6]] = float("nan")  # positions 0 to 11; it reads from 13 on
        output = attention.start_step(batch).attend(0, unrotated(query[rows], contents[rows]))
        expected = plain_attention(
            query[rows], contents[: int(rows[-1]) + 1], int(rows[0]), torch.float64, how=how
        )
        torch.testing.assert_close(output, expected.float())
