"""What a plan says about decode rows that begin with the same blocks, and whether that is so.

No attention reads it yet.
"""

from typing import NamedTuple

import numpy as np

from worker.step_rows import Int32Array


class GroupFault(NamedTuple):
    """A member of a group that should not be one."""

    slot: int
    what: str


def find_fault(
    groups: Int32Array,
    decode_slots: Int32Array,
    lengths: Int32Array,
    block_tables: Int32Array,
    block_size: int,
) -> GroupFault | None:
    """Return what is wrong with groups, [members, 3] (slot, group, shared blocks); None: nothing.

    `decode_slots` is the step's, `lengths` [slots] and `block_tables` [slots, most] are the host's
    before its rows.
    """
    slots, numbers, shared = groups.T
    is_row = np.isin(slots, decode_slots)
    if not is_row.all():
        return _fault(slots, ~is_row, "is in a group but has no decode row")
    is_again = np.ones(len(slots), dtype=np.bool_)
    is_again[np.unique(slots, return_index=True)[1]] = False
    if is_again.any():
        return _fault(slots, is_again, "is in two groups")
    is_wrong = (shared < 1) | (shared > lengths[slots] // block_size)
    if is_wrong.any():
        return _fault(slots, is_wrong, "shares blocks that it has not filled, or none")
    _, first, group = np.unique(numbers, return_index=True, return_inverse=True)
    leader = first[group]
    width = int(shared.max(initial=0))
    tables = block_tables[slots, :width]
    differs = (tables != tables[leader]) & (np.arange(width) < shared[:, None])
    is_wrong = differs.any(axis=1) | (shared != shared[leader])
    if is_wrong.any():
        return _fault(slots, is_wrong, "shares other blocks than the first of its group")
    return None


def _fault(slots: Int32Array, is_wrong: np.ndarray, what: str) -> GroupFault:
    return GroupFault(int(slots[is_wrong.argmax()]), what)
