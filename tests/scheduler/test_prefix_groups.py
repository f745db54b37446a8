import random
from itertools import takewhile

import pytest

from protocol.columns import unpack_rows
from scheduler.prefix_groups import PrefixGroups


def groups_of(column):
    """The groups by number, as (slots, shared blocks)."""
    groups = {}
    for slot, group, shared in unpack_rows(column, 3):
        groups.setdefault(group, ([], shared))[0].append(slot)
    return list(groups.values())


@pytest.fixture
def groups():
    """For blocks of 256 tokens: a group shares two blocks at least."""
    return PrefixGroups(256)


def test_four_rows_with_two_blocks_in_common_are_a_group(groups):
    for slot in range(3):
        groups.enter(slot, [7, 8, 10 + slot])
        assert groups.take() is None
    groups.enter(3, [7, 8, 13, 14])
    assert groups_of(groups.take()) == [([0, 1, 2, 3], 2)]
    assert groups.take() is None, "told already"
    groups.enter(9, [7, 8, 19])
    assert groups_of(groups.take()) == [([0, 1, 2, 3, 9], 2)]


def test_rows_that_share_less_or_nothing_are_none_of_it(groups):
    for slot in range(6):
        groups.enter(slot, [7, 20 + slot, 30 + slot])
    groups.enter(6, [7])
    groups.enter(7, [])
    assert groups.take() is None


def test_a_group_dissolves_below_four(groups):
    for slot in range(5):
        groups.enter(slot, [7, 8])
    assert groups_of(groups.take()) == [([0, 1, 2, 3, 4], 2)]
    groups.leave(2)
    assert groups_of(groups.take()) == [([0, 1, 3, 4], 2)]
    groups.leave(0)
    assert groups.take() == b""
    groups.leave(1)
    assert groups.take() is None


def test_what_comes_and_goes_between_two_plans_is_not_told(groups):
    for slot in range(4):
        groups.enter(slot, [7, 8])
    groups.take()
    groups.leave(3)
    groups.enter(3, [7, 8, 9])
    assert groups.take() is None


def test_they_share_what_all_have_in_common(groups):
    long = [7, 8, 9, 10, 11]
    for slot in range(4):
        groups.enter(slot, [*long[: 3 + slot % 2], 50 + slot])
    groups.enter(4, [*long[:2], 60])
    assert groups_of(groups.take()) == [([0, 1, 2, 3, 4], 2)]
    # Without the one that has least they share more, and so they do without the first.
    groups.leave(4)
    assert groups_of(groups.take()) == [([0, 1, 2, 3], 3)]
    groups.enter(5, [*long, 70])
    groups.leave(0)
    assert groups_of(groups.take()) == [([1, 2, 3, 5], 3)]
    groups.leave(2)
    groups.enter(6, [*long, 71])
    assert groups_of(groups.take()) == [([1, 3, 5, 6], 4)]


def test_a_row_is_in_the_deepest_of_its_groups(groups):
    for slot in range(5):
        groups.enter(slot, [7, 8, 20 + slot])
    for slot in range(5, 9):
        groups.enter(slot, [7, 8, 9, 10, 20 + slot])
    assert groups_of(groups.take()) == [([5, 6, 7, 8], 4), ([0, 1, 2, 3, 4], 2)]
    # Three that are left over are no group; nor are three deep ones, which then join the others.
    groups.leave(0)
    groups.leave(1)
    assert groups_of(groups.take()) == [([5, 6, 7, 8], 4)]
    groups.leave(5)
    assert groups_of(groups.take()) == [([2, 3, 4, 6, 7, 8], 2)]


def test_a_row_whose_table_changes_may_come_into_a_group(groups):
    for slot in range(3):
        groups.enter(slot, [7, 8])
    table = [5, 6]
    groups.enter(3, table)
    table[:] = [7, 8]
    groups.update(3, table)
    assert groups_of(groups.take()) == [([0, 1, 2, 3], 2)]


def test_one_block_in_common_proves_nothing_about_those_before_it(groups):
    for slot in range(3):
        groups.enter(slot, [7, 8])
    groups.enter(3, [6, 8])
    assert groups.take() is None
    for slot in range(4, 8):
        groups.enter(slot, [1, 2, 3 if slot < 7 else 4, 5])
    assert groups_of(groups.take()) == [([4, 5, 6, 7], 2)]
    groups.enter(8, [1, 2, 3, 5])
    assert groups_of(groups.take()) == [([4, 5, 6, 8], 4)]


@pytest.mark.parametrize(
    ("block_size", "least"), [(16, 32), (64, 8), (256, 2), (500, 2), (512, 1), (1024, 1)]
)
def test_512_tokens_are_the_least(block_size, least):
    for blocks, is_group in ((least, True), (least - 1, False)):
        groups = PrefixGroups(block_size)
        for slot in range(4):
            groups.enter(slot, [*range(blocks), 100 + slot])
        assert (groups.take() is not None) is is_group


def test_groups_are_those_that_the_tables_have():
    rng = random.Random(0)
    num_told = 0
    for _ in range(30):
        groups = PrefixGroups(256)
        # Prefixes that are alike up to some block, from there on each block says where it lies.
        texts = [[0] * 9] + [[number] * 9 for number in range(1, 4)]
        tables = {}
        column = b""
        for _ in range(60):
            slot = rng.randrange(16)
            if slot in tables:
                groups.leave(slot)
                del tables[slot]
            else:
                blocks, path = [], 0
                fork = rng.randrange(1, 7)
                text = rng.choice(texts)
                for depth in range(rng.randrange(1, 9)):
                    path = path * 10 + (text[depth] if depth >= fork else 0) + 1
                    blocks.append(path)
                tables[slot] = [*blocks, -1 - slot]
                groups.enter(slot, tables[slot])
            column = told if (told := groups.take()) is not None else column
            num_told += told is not None
            expected = direct_groups(tables)
            found = groups_of(column)
            assert {frozenset(slots) for slots, _ in found} == set(expected)
            for slots, shared in found:
                columns = zip(*(tables[slot] for slot in slots), strict=False)
                common = len(list(takewhile(lambda blocks: len(set(blocks)) == 1, columns)))
                assert expected[frozenset(slots)] <= shared <= common
                # All rows of a bucket: exactly what they have in common.
                assert shared == common or len(found) > 1
    assert num_told > 100


def direct_groups(tables):
    """The groups straight from their definition, with the depth of each."""
    groups, taken = {}, set()
    for depth in (8, 4, 2):
        prefixes = {}
        for slot, table in tables.items():
            if len(table) >= depth:
                prefixes.setdefault(tuple(table[:depth]), set()).add(slot)
        for slots in prefixes.values():
            if len(slots - taken) >= 4:
                groups[frozenset(slots - taken)] = depth
        taken = set().union(*groups) if groups else set()
    return groups
