"""Which decode rows begin with the same blocks, so that attention can read those once for all.

Rows meet in *buckets*: one for each block that lies at a certain depth of a table, which is 512
tokens or twice, four times, ... that. A bucket with enough rows is a group. A row belongs to the
deepest group that it is in: at twice the depth, half of the rows save what all of them did.

    depth        512        1,024                2,048
    table   ──────┬───────────┬────────────────────┬──────────
                  bucket      bucket               bucket

All is done when a row comes or goes, and little where none of its buckets is a group. How many
blocks a group shares is exact, but where some of its bucket's rows are in a deeper group: those
that are left may share more than is told.
"""

from array import array

import numpy as np

GROUP_ROWS = 4
GROUP_TOKENS = 512
"""A smaller group does not pay. One of this size saves reading 1,536 positions, a few megabytes a
layer, which a GPU reads in about the time that another kernel takes to start."""


class _Bucket:
    """Rows whose tables agree up to a depth, at least, and how far they do beyond it.

    That is measured by one table, the *pattern*, whose row may have left since. All agree up to the
    least that any has in common with the pattern; up to twice the depth, from where on rows that
    agree are in a deeper bucket as well.
    """

    __slots__ = ("_pattern", "_tables", "buckets", "depth", "head", "in_common")

    def __init__(self, start: int, depth: int, table: list[int]) -> None:
        self.depth = depth
        """Blocks."""
        self.head = table[start:depth]
        """Of all tables; what lies before is the same in all of the bucket above."""
        self.buckets: dict[int, _Bucket] = {}
        """Those of twice the depth, by the last block before it."""
        self.in_common: dict[int, int] = {}
        """Slot to how many blocks after the depth its table has in common with the pattern."""
        self._pattern = table[depth : 2 * depth]
        self._tables: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._tables)

    def add(self, slot: int, table: list[int]) -> None:
        """Take a row in."""
        self._tables[slot] = table
        self.in_common[slot] = self._measure(table)

    def remove(self, slot: int) -> None:
        """Take a row out."""
        del self._tables[slot], self.in_common[slot]

    def settle(self) -> None:
        """Take another pattern if the rows have more in common than with this one.

        They can only where each leaves it at the same place: of two that leave it at different
        places, one still follows it where the other does not.
        """
        different = set(self.in_common.values())
        if len(different) > 1:
            return
        place = self.depth + different.pop()
        tables = self._tables.values()
        first = next(iter(tables))
        if place < min(2 * self.depth, len(first)) and all(
            place < len(table) and table[place] == first[place] for table in tables
        ):
            self._pattern = first[self.depth : 2 * self.depth]
            self.in_common = {slot: self._measure(table) for slot, table in self._tables.items()}

    def _measure(self, table: list[int]) -> int:
        return _common_length(self._pattern, table[self.depth : 2 * self.depth])


class PrefixGroups:
    """The decode rows' groups, as plans tell them to the ranks.

    Invariants: only decode rows are members, each of one group at most; a group has `GROUP_ROWS`
    or more, whose tables begin with the same blocks, `GROUP_TOKENS` or more of them.
    """

    def __init__(self, block_size: int) -> None:
        self._first_depth = -(-GROUP_TOKENS // block_size)
        self._buckets: dict[int, _Bucket] = {}
        # Slot to its buckets, each with those beside it and its key there.
        self._of_row: dict[int, list[tuple[dict[int, _Bucket], int, _Bucket]]] = {}
        # Those with rows enough for a group.
        self._large: dict[_Bucket, None] = {}
        self._is_stale = False
        self._sent = b""

    def enter(self, slot: int, table: list[int]) -> None:
        """Take in a row that decodes from now on. Its table may grow, and change by `update`."""
        start, depth, buckets = 0, self._first_depth, self._buckets
        if depth > len(table):
            return
        above: list[tuple[dict[int, _Bucket], int, _Bucket]] = []
        self._of_row[slot] = above
        while depth <= len(table):
            key = table[depth - 1]
            bucket = buckets.get(key)
            if bucket is None:
                bucket = buckets[key] = _Bucket(start, depth, table)
            # A block stands for all before it, unless the prefix index has forgotten some of those.
            elif bucket.head != table[start:depth]:
                break
            bucket.add(slot, table)
            if len(bucket) >= GROUP_ROWS:
                self._large[bucket] = None
                self._is_stale = True
            above.append((buckets, key, bucket))
            start, depth, buckets = depth, 2 * depth, bucket.buckets

    def leave(self, slot: int) -> None:
        """Take out a row that does not decode any more."""
        for buckets, key, bucket in self._of_row.pop(slot, ()):
            bucket.remove(slot)
            if bucket in self._large:
                self._is_stale = True
                if len(bucket) < GROUP_ROWS:
                    del self._large[bucket]
            if not bucket:
                del buckets[key]

    def update(self, slot: int, table: list[int]) -> None:
        """Take note that entries of a row's table have been replaced."""
        self.leave(slot)
        self.enter(slot, table)

    def take(self) -> bytes | None:
        """Return the plan's column of groups; None if it is the one that was returned last."""
        if not self._is_stale:
            return None
        self._is_stale = False
        column = self._column()
        if column == self._sent:
            return None
        self._sent = column
        return column

    def _column(self) -> bytes:
        groups: list[bytes] = []
        taken: set[int] = set()
        for bucket in sorted(self._large, key=lambda each: -each.depth):
            bucket.settle()
            in_common = bucket.in_common
            if not taken.isdisjoint(in_common):
                in_common = {slot: more for slot, more in in_common.items() if slot not in taken}
            if len(in_common) < GROUP_ROWS:
                continue
            taken.update(in_common)
            members = np.empty((len(in_common), 3), np.int32)
            members[:, 0] = array("i", in_common)
            members[:, 1] = len(groups)
            members[:, 2] = bucket.depth + min(in_common.values())
            groups.append(members.tobytes())
        return b"".join(groups)


def _common_length(first: list[int], second: list[int]) -> int:
    """Return how many entries two lists have in common from their start."""
    if first == second:
        return len(first)
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
