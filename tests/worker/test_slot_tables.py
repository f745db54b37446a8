import numpy as np
import torch

from worker.slot_tables import SlotTables, changed_blocks

WIDTH = 3


def test_tables_follow_the_plans():
    state = SlotTables(torch.zeros(4, dtype=torch.int64), max_blocks=3, block_size=4, pad_block=20)
    assert (state.pad_slot, state.pad_cache_position) == (3, 80)
    state.set_blocks([])
    state.set_blocks([(1, 0, np.array([8, 9], dtype=np.int32))])
    state.set_blocks(
        [(1, 2, np.array([13], dtype=np.int32)), (2, 0, np.array([3, 4], dtype=np.int32))]
    )
    assert state.tables.tolist() == [[0, 0, 0], [8, 9, 13], [3, 4, 0], [20, 20, 20]]


def test_what_a_plan_changes():
    tables = np.array([[5, 6, -1], [8, 9, 4], [1, -1, -1]], dtype=np.int32)
    held = np.array([2, 3, 1], dtype=np.int32)
    new_blocks = np.array([[1, 2, 4], [0, 1, 6], [2, 0, 1]], dtype=np.int32)
    changed = changed_blocks([0], new_blocks, tables, held)
    assert [(slot, first, blocks.tolist()) for slot, first, blocks in changed] == [
        (0, 0, [5, 6]),  # joined with one block and got another: all of them
        (1, 2, [4]),
        (2, 0, [1]),  # in the place of another
    ]
    assert changed_blocks([], np.zeros((0, 3), dtype=np.int32), tables, held) == []
