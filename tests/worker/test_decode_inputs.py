import numpy as np
import torch

from worker.decode_inputs import DecodeColumns, DecodeInputs
from worker.slot_tables import SlotTables

PAD_SLOT, PAD_BLOCK, WIDTH = 9, 20, 3


def make() -> DecodeInputs:
    """Inputs of ten slots, whose last tokens are 100 to 109."""
    state = SlotTables(torch.arange(100, 110), max_blocks=WIDTH, block_size=4, pad_block=PAD_BLOCK)
    tables = ((0, [5, 6, 7]), (1, [8]), (2, [1, 2]))
    state.set_blocks([(slot, 0, np.array(blocks, dtype=np.int32)) for slot, blocks in tables])
    return DecodeInputs(state, max_rows=4)


def fill(inputs: DecodeInputs, num_rows: int, rows: dict[int, int], *, ring: int = 0):
    """Fill a bucket with rows of slot: position; return what a graph makes of it."""
    slots = np.array(list(rows), dtype=np.int32)
    inputs.fill(num_rows, ring, slots, np.array(list(rows.values()), dtype=np.int32))
    return inputs.open(num_rows)


def test_rows_and_padding():
    inputs = make()
    rows: DecodeColumns = fill(inputs, 4, {2: 5, 1: 3}, ring=3)
    assert inputs.ring().tolist() == [3]
    assert inputs.slots(4).tolist() == [2, 1, PAD_SLOT, PAD_SLOT]
    assert rows.tokens.tolist() == [102, 101, 109, 109]
    assert rows.positions.tolist() == [5, 3, 0, 0]
    assert rows.lengths.tolist() == [6, 4, 0, 0]
    assert rows.cache_positions.tolist() == [2 * 4 + 1, 8 * 4 + 3, 80, 80]
    assert rows.block_tables[0, :2].tolist() == [1, 2]
    assert rows.block_tables[1, :1].tolist() == [8]
    assert rows.block_tables[2:, 0].tolist() == [PAD_BLOCK, PAD_BLOCK]
    assert rows.block_tables.shape == (4, WIDTH)
    assert rows.lengths.dtype == rows.block_tables.dtype == torch.int32
    assert rows.tokens.dtype == rows.positions.dtype == rows.cache_positions.dtype == torch.int64


def test_a_bucket_sees_what_was_filled_for_it():
    inputs = make()
    fill(inputs, 4, {0: 11, 1: 0, 2: 1})
    rows = fill(inputs, 2, {0: 8})
    assert inputs.slots(2).tolist() == [0, PAD_SLOT]
    assert rows.lengths.tolist() == [9, 0]
    assert rows.block_tables[0].tolist() == [5, 6, 7]
    assert rows.cache_positions.tolist() == [28, 80]
