import numpy as np
import torch

from worker.decode_inputs import DecodeInputs

NONE = -1


def make() -> DecodeInputs:
    return DecodeInputs(
        max_rows=4,
        max_blocks=3,
        block_size=4,
        pad_slot=9,
        pad_block=20,
        device=torch.device("cpu"),
    )


def fill(inputs: DecodeInputs, num_rows: int, rows: dict[int, int]) -> None:
    """Fill a bucket with rows of slot: position."""
    tables = np.array([[5, 6, 7], [8, NONE, NONE], [1, 2, NONE]], dtype=np.int32)
    slots = np.array(list(rows), dtype=np.int32)
    inputs.fill(num_rows, slots, np.array(list(rows.values()), dtype=np.int32), tables)


def test_rows_and_padding():
    inputs = make()
    fill(inputs, 4, {2: 5, 1: 3})
    columns = inputs.columns(4)
    assert columns.slots.tolist() == [2, 1, 9, 9]
    assert columns.positions.tolist() == [5, 3, 0, 0]
    assert columns.lengths.tolist() == [6, 4, 0, 0]
    assert columns.cache_positions.tolist() == [2 * 4 + 1, 8 * 4 + 3, 80, 80]
    assert columns.block_tables[:2, :2].tolist() == [[1, 2], [8, 0]]
    assert columns.block_tables.shape == (4, 3)


def test_a_bucket_sees_what_was_filled_for_it():
    inputs = make()
    fill(inputs, 4, {0: 11, 1: 0, 2: 1})
    fill(inputs, 2, {0: 8})
    columns = inputs.columns(2)
    assert columns.slots.tolist() == [0, 9]
    assert columns.lengths.tolist() == [9, 0]
    assert columns.block_tables[0].tolist() == [5, 6, 7]
    assert columns.cache_positions.tolist() == [28, 80]


def test_padding_alone():
    inputs = make()
    empty = np.zeros(0, dtype=np.int32)
    inputs.fill(2, empty, empty, empty.reshape(0, 1))
    assert inputs.columns(2).slots.tolist() == [9, 9]
    assert inputs.columns(2).lengths.tolist() == [0, 0]
