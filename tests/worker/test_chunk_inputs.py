import numpy as np
import pytest
import torch

from tests.worker.plan_builder import make_join, make_plan
from worker.chunk_inputs import ChunkColumns, ChunkInputs, no_rows
from worker.slot_tables import SlotTables
from worker.slots import SlotTable

PAD_SLOT, PAD_BLOCK, BLOCK_SIZE, WIDTH = 6, 20, 4, 3


def make() -> ChunkInputs:
    """Inputs of six slots, whose last tokens are 100 to 105."""
    state = SlotTables(
        torch.arange(100, 107), max_blocks=WIDTH, block_size=BLOCK_SIZE, pad_block=PAD_BLOCK
    )
    tables = ((0, [5, 6]), (1, [8, 9]), (4, [1, 2, 3]))
    state.set_blocks([(slot, 0, np.array(blocks, dtype=np.int32)) for slot, blocks in tables])
    return ChunkInputs(state, max_tokens=16, max_sequences=6)


@pytest.fixture
def mixed() -> ChunkColumns:
    """A decode row of slot 1 at 5, an unfinished chunk of slot 0, the last one of slot 4."""
    table = SlotTable(slots=6, num_blocks=20, block_size=4, max_model_len=12, vocab_size=1000)
    table.apply(
        make_plan(
            1,
            joins=[
                make_join(1, range(5), [8, 9]),
                make_join(0, range(20, 28), [5, 6]),
                make_join(4, range(40, 49), [1, 2, 3], generation=3),
            ],
            chunks=[(1, 0, 5, 1), (0, 0, 2, 0), (4, 0, 6, 0)],
        )
    )
    rows = table.apply(make_plan(2, decode=[1], chunks=[(0, 2, 4, 0), (4, 6, 3, 1)]))
    inputs = make()
    inputs.fill(12, 5, 2, rows, np.array([37, 22, 23, 24, 25, 10, 11, 12], dtype=np.int64))
    assert inputs.ring().tolist() == [2]
    return inputs.open(12, 5)


def test_tokens(mixed: ChunkColumns):
    assert mixed.tokens.tolist() == [101, 22, 23, 24, 25, 46, 47, 48, 0, 0, 0, 0]
    assert mixed.positions.tolist() == [5, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0]
    assert mixed.cache_positions.tolist() == [37, 22, 23, 24, 25, 10, 11, 12, 80, 80, 80, 80]


def test_sequences(mixed: ChunkColumns):
    chunks = mixed.chunks
    assert chunks.query_starts.tolist() == [0, 1, 5, 8, 8, 8, 12]
    assert chunks.lengths.tolist() == [6, 6, 9, 0, 0, 4]
    assert chunks.length_starts.tolist() == [0, 6, 12, 21, 21, 21, 25]
    assert chunks.block_tables[:3].tolist() == [[8, 9, 0], [5, 6, 0], [1, 2, 3]]
    assert chunks.block_tables[3:].tolist() == [[PAD_BLOCK] * 3] * 3
    assert (chunks.max_count, chunks.max_length, chunks.is_fresh) == (12, 12, False)


def test_what_is_sampled(mixed: ChunkColumns):
    assert mixed.logit_rows.tolist() == [0, 0, 7, 0, 0]
    assert mixed.sampled_slots.tolist() == [1, PAD_SLOT, 4, PAD_SLOT, PAD_SLOT]
    assert mixed.sampled_indices.tolist() == [6, 6, 9, 0, 0]


def test_types(mixed: ChunkColumns):
    wide = (mixed.tokens, mixed.positions, mixed.cache_positions)
    wide += (mixed.logit_rows, mixed.sampled_slots, mixed.sampled_indices)
    assert {tensor.dtype for tensor in wide} == {torch.int64}
    chunks = mixed.chunks
    narrow = (chunks.query_starts, chunks.lengths, chunks.length_starts, chunks.block_tables)
    assert {tensor.dtype for tensor in narrow} == {torch.int32}


def test_padding_alone():
    inputs = make()
    inputs.fill(4, 2, 0, no_rows(), np.zeros(0, dtype=np.int64))
    columns = inputs.open(4, 2)
    assert columns.tokens.tolist() == [0] * 4
    assert columns.cache_positions.tolist() == [80] * 4
    assert columns.chunks.query_starts.tolist() == [0, 0, 0, 4]
    assert columns.chunks.lengths.tolist() == [0, 0, 4]
    assert columns.sampled_slots.tolist() == [PAD_SLOT] * 2
