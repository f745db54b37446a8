import numpy as np
import pytest
import torch

from tests.worker.plan_builder import make_join, make_plan
from worker.batch import BatchBuilder, ForwardBatch
from worker.slots import SlotTable

CPU = torch.device("cpu")
PAD_BLOCK = 50
BLOCK_SIZE = 4


class Builder:
    """Plans in, batches out."""

    def __init__(self, min_rows: int = 1) -> None:
        self.table = SlotTable(
            slots=6, num_blocks=PAD_BLOCK, block_size=BLOCK_SIZE, max_model_len=32, vocab_size=1000
        )
        self.builder = BatchBuilder(
            block_size=BLOCK_SIZE, pad_block=PAD_BLOCK, min_rows=min_rows, device=CPU
        )
        self.last_tokens = torch.arange(900, 906)
        self.step_id = 0

    def build(self, **plan) -> ForwardBatch:
        self.step_id += 1
        rows = self.table.apply(make_plan(self.step_id, **plan))
        return self.builder.build(rows, self.table.block_tables, self.last_tokens)


def test_chunks():
    batch = Builder().build(
        joins=[make_join(2, range(100, 106), [7, 3]), make_join(0, range(10, 15), [9, 20])],
        chunks=[(2, 0, 6, 1), (0, 0, 4, 0)],
    )
    assert batch.tokens.tolist() == [100, 101, 102, 103, 104, 105, 10, 11, 12, 13]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert batch.cache_positions.tolist() == [28, 29, 30, 31, 12, 13, 36, 37, 38, 39]
    assert (batch.num_rows, batch.num_tokens, batch.num_decode) == (10, 10, 0)
    assert len(batch.sampled) == 1
    assert batch.wanted_rows.tolist() == [5]
    first, second = batch.chunks
    assert (first.first_row, first.start, first.count, first.end) == (0, 0, 6, 6)
    assert first.block_table.tolist() == [7, 3]
    assert (second.first_row, second.count) == (6, 4)
    assert second.block_table.tolist() == [9]
    # Block 3 is filled to half, block 9 wholly.
    assert batch.opened_blocks == (3,)
    assert batch.sampled.slots.tolist() == batch.sampled.host_slots.tolist() == [2]
    assert batch.sampled.indices.tolist() == [6]


def mixed(min_rows: int = 1) -> ForwardBatch:
    builder = Builder(min_rows)
    builder.build(
        joins=[make_join(1, range(7), [4, 5, 6]), make_join(3, range(4), [8, 10])],
        chunks=[(1, 0, 7, 1), (3, 0, 4, 1)],
    )
    return builder.build(
        joins=[make_join(5, range(40, 49), [30, 31, 32])],
        decode=[3, 1],
        chunks=[(5, 0, 9, 1)],
    )


def test_decode_rows_come_first():
    batch = mixed()
    assert batch.tokens.tolist() == [903, 901, *range(40, 49)]
    assert batch.positions.tolist() == [4, 7, *range(9)]
    assert batch.cache_positions.tolist()[:3] == [40, 23, 120]
    assert batch.decode_lengths.tolist() == [5, 8]
    # Slot 1 holds a third block that it has not reached; its row must not read it.
    assert batch.decode_blocks.tolist() == [[8, 10], [4, 5]]
    assert batch.wanted_rows.tolist() == [0, 1, 10]
    assert batch.chunks[0].first_row == 2
    # Slot 3 enters block 10, slot 1 ends block 5, the chunk begins block 32.
    assert batch.opened_blocks == (10, 32)


def test_shorter_rows_are_padded_with_the_pad_block():
    builder = Builder()
    builder.build(
        joins=[make_join(0, range(10), [1, 2, 3]), make_join(1, range(2), [4])],
        chunks=[(0, 0, 10, 1), (1, 0, 2, 1)],
    )
    batch = builder.build(decode=[0, 1])
    assert batch.decode_blocks.tolist() == [[1, 2, 3], [4, PAD_BLOCK, PAD_BLOCK]]
    assert batch.opened_blocks == ()


def test_padding_rows():
    builder = Builder(min_rows=4)
    join = make_join(2, [5, 6], [7])
    builder.build(joins=[join], chunks=[(2, 0, 2, 1)])
    batch = builder.build(decode=[2])
    assert batch.tokens.tolist() == [902, 0, 0, 0]
    assert batch.positions.tolist() == [2, 0, 0, 0]
    assert batch.cache_positions.tolist() == [30]
    assert (batch.num_rows, batch.num_tokens, len(batch.sampled)) == (4, 1, 1)
    assert batch.wanted_rows.tolist() == [0, 0, 0, 0]
    assert mixed(min_rows=4).num_rows == 11


def test_nothing_sampled():
    join = make_join(2, range(9), [7, 8, 9])
    batch = Builder(min_rows=4).build(joins=[join], chunks=[(2, 0, 8, 0)])
    assert len(batch.sampled) == 0
    assert batch.wanted_rows.tolist() == [0] * 4


def test_a_chunk_that_goes_on_in_a_block_does_not_open_it():
    builder = Builder()
    builder.build(joins=[make_join(0, range(12), [1, 2, 3])], chunks=[(0, 0, 5, 0)])
    assert builder.build(chunks=[(0, 5, 2, 0)]).opened_blocks == ()
    assert builder.build(chunks=[(0, 7, 2, 0)]).opened_blocks == (3,)


def test_chunks_side_by_side():
    builder = Builder()
    builder.build(
        joins=[make_join(1, range(11), [1, 2, 3]), make_join(4, range(3), [9])],
        chunks=[(1, 0, 8, 0), (4, 0, 3, 1)],
    )
    batch = builder.build(
        decode=[4],
        joins=[make_join(0, range(5), [4, 7])],
        chunks=[(0, 0, 5, 1), (1, 8, 3, 1)],
    )
    chunks = batch.chunk_batch
    assert chunks is not None
    assert chunks.query_starts.tolist() == [0, 5, 8]
    assert chunks.lengths.tolist() == [5, 11]
    assert chunks.length_starts.tolist() == [0, 5, 16]
    assert chunks.block_tables.tolist() == [[4, 7, PAD_BLOCK], [1, 2, 3]]
    assert (chunks.max_count, chunks.max_length, chunks.is_fresh) == (5, 11, False)
    assert chunks.query_starts.dtype == chunks.block_tables.dtype == torch.int32
    assert batch.sampled.slots.tolist() == [4, 0, 1]
    assert batch.sampled.indices.tolist() == [4, 5, 11]
    assert builder.build(decode=[1, 0]).chunk_batch is None
    fresh = Builder().build(joins=[make_join(0, [5], [4])], chunks=[(0, 0, 1, 1)]).chunk_batch
    assert fresh is not None
    assert fresh.is_fresh


@pytest.mark.parametrize("count", [1, 4, 5])
def test_types(count: int):
    batch = Builder().build(
        joins=[make_join(0, range(5), [1, 2])], chunks=[(0, 0, count, count == 5)]
    )
    for tensor in (batch.tokens, batch.positions, batch.cache_positions, batch.wanted_rows):
        assert tensor.dtype == torch.int64
    assert batch.decode_lengths.dtype == np.int32
    assert batch.device_lengths.dtype == batch.decode_blocks.dtype == torch.int32
    assert batch.decode_blocks.shape == (0, 0)
