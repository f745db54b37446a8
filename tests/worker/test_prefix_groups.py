import numpy as np
import pytest

from worker.prefix_groups import find_fault

TABLES = np.array(
    [[5, 6, 7, -1], [5, 6, 8, -1], [5, 6, 7, 9], [1, 2, -1, -1], [1, 2, 3, -1]], dtype=np.int32
)
LENGTHS = np.array([12, 9, 13, 8, 12], dtype=np.int32)


def fault_of(*groups, decode=(0, 1, 2, 3, 4)):
    members = np.array(groups, dtype=np.int32).reshape(-1, 3)
    return find_fault(members, np.array(decode, dtype=np.int32), LENGTHS, TABLES, 4)


def test_rows_with_the_same_first_blocks_are_groups():
    assert fault_of() is None
    assert fault_of((0, 0, 2), (1, 0, 2), (2, 0, 2), (3, 1, 2), (4, 1, 2)) is None
    assert fault_of((0, 0, 3), (4, 7, 2), (2, 0, 3), (3, 7, 2)) is None


@pytest.mark.parametrize(
    ("groups", "slot", "what"),
    [
        ([(0, 0, 2), (1, 0, 2), (5, 0, 2)], 5, "is in a group but has no decode row"),
        ([(0, 0, 2), (-1, 0, 2)], -1, "is in a group but has no decode row"),
        ([(0, 0, 2), (1, 0, 2), (1, 1, 2)], 1, "is in two groups"),
        ([(0, 0, 2), (1, 0, 0)], 1, "shares blocks that it has not filled, or none"),
        ([(0, 0, 3), (1, 0, 3)], 1, "shares blocks that it has not filled, or none"),
        ([(0, 0, -1), (1, 0, -1)], 0, "shares blocks that it has not filled, or none"),
        ([(0, 0, 2), (1, 0, 1)], 1, "shares other blocks than the first of its group"),
        ([(2, 0, 3), (0, 0, 3), (4, 0, 3)], 4, "shares other blocks than the first of its group"),
        ([(0, 0, 2), (3, 0, 2)], 3, "shares other blocks than the first of its group"),
    ],
)
def test_what_is_no_group_is_named(groups, slot, what):
    assert fault_of(*groups) == (slot, what)


def test_a_member_has_a_decode_row():
    assert fault_of((0, 0, 2), (1, 0, 2), decode=(0, 2)) == (
        1,
        "is in a group but has no decode row",
    )
