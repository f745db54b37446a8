"""What is known about every block of the KV cache, and the check that it fits together.

`BlockManager` changes it; here it is only looked at.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from operator import eq
from typing import NamedTuple

import numpy as np

from scheduler.prefix import PrefixBlock, PrefixHasher


@dataclass(frozen=True, slots=True)
class Holding:
    """What one sequence is believed to hold; for `BlockBooks.audit`."""

    name: str
    block_table: list[int]
    content: list[PrefixBlock]
    """The table's first blocks by content, as many as the sequence counts as registered."""
    uses: dict[int, int] = field(default_factory=dict)
    """`BlockBooks.uses` of these blocks when it was given them."""
    exchanges: bool = True
    """Whether it exchanges copies: not if it was running at a reset."""


class Finding(NamedTuple):
    """Something about a block that does not fit together."""

    block: int
    sentence: str
    is_foreign: bool = False
    """Whether what its holders read there may be another's."""


class BlockBooks:
    """The free lists, the reference counts, the prefix index and the quarantine, to be compared."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        # Popped from the end: low numbers first, which makes plans easy to read.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._index: dict[bytes, int] = {}
        self._content: list[PrefixBlock | None] = [None] * num_blocks
        self.uses = [0] * num_blocks
        """How often each block has been given out: a holder whose count is older holds it no more.
        """
        # By block, the admissions there had been.
        self._quarantined: dict[int, int] = {}

    def is_untouched(self, blocks: list[int], uses: dict[int, int]) -> bool:
        """Return whether none of these blocks has been given to another since `uses` were noted."""
        if all(map(eq, map(self.uses.__getitem__, blocks), map(uses.get, blocks))):
            return True
        return all(uses.get(block, self.uses[block]) == self.uses[block] for block in blocks)

    def audit(self, hasher: PrefixHasher, holdings: list[Holding]) -> list[str]:
        """Compare everything known about every block; return one sentence per disagreement."""
        findings = [*self.find(holdings), *self.find_keys(hasher, range(self.num_blocks))]
        return [*(finding.sentence for finding in findings), *self._audit_copies(holdings)]

    def find(self, holdings: list[Holding]) -> list[Finding]:
        """Return every disagreement about a block, but for those that `find_keys` sees.

        Counts alone would miss a block that two owners believe to be theirs, so each block is
        followed: to its holders, to its free list, and to its content.
        """
        return [
            *self._audit_holders(holdings),
            *self._audit_free_lists(),
            *self._audit_index(),
            *self._audit_content(holdings),
        ]

    def find_keys(self, hasher: PrefixHasher, blocks: Iterable[int]) -> list[Finding]:
        """Return which of these blocks have content under a key that is not its own.

        That takes longer than all else, and no hit rests on it: content is compared.
        """
        return [
            Finding(block, f"block {block} holds other tokens than its key says")
            for block in blocks
            if (content := self._content[block]) is not None
            and hasher.key(content.parent, content.tokens) != content.key
        ]

    def is_sound(self, holdings: list[Holding]) -> bool:
        """Return whether `find` would find nothing, in a fraction of its time."""
        references = np.array(self._references)
        tables = chain.from_iterable(holding.block_table for holding in holdings)
        counts = np.bincount(np.fromiter(tables, np.intp), minlength=self.num_blocks)
        is_free = references == 0
        is_free[list(self._quarantined)] = False
        free = np.fromiter(chain(self._free, self._cached), np.intp)
        listed = np.bincount(free, minlength=self.num_blocks)
        content_of = self._content.__getitem__
        keys = [content.key for content in map(content_of, self._index.values()) if content]
        # Of keys that differ each leads to a block that has it, so none leads to another's.
        return (
            np.array_equal(counts, references)
            and np.array_equal(listed, is_free)
            and not any(map(content_of, self._free))
            and all(map(content_of, self._cached))
            and keys == list(self._index)
            and len(keys) == self.num_blocks - self._content.count(None)
            and all(map(self._has_its_own, holdings))
            and not self._shared_in_disagreement(np.flatnonzero(counts > 1).tolist(), holdings)
        )

    def _has_its_own(self, holding: Holding) -> bool:
        if not self.is_untouched(holding.block_table, holding.uses):
            return False
        found = [self._content[block] for block in holding.block_table[: len(holding.content)]]
        return found == holding.content or all(
            content in (None, wanted)
            for content, wanted in zip(found, holding.content, strict=True)
        )

    def _shared_in_disagreement(self, shared: Iterable[int], holdings: list[Holding]) -> list[int]:
        """Return which of these blocks are shared by some who do not agree on their content.

        Samples of one prompt share without the index, and all go on after a reset. But nobody may
        share what another still writes.
        """
        unregistered = {block for block in shared if self._content[block] is None}
        believed: dict[int, set[PrefixBlock | None]] = {block: set() for block in unregistered}
        for holding in holdings if unregistered else []:
            if unregistered.isdisjoint(holding.block_table):
                continue
            for block, content in zip_longest(holding.block_table, holding.content):
                if block in unregistered:
                    believed[block].add(content)
        return [block for block, each in believed.items() if None in each or len(each) > 1]

    def _audit_holders(self, holdings: list[Holding]) -> Iterator[Finding]:
        holders: list[list[str]] = [[] for _ in range(self.num_blocks)]
        for holding in holdings:
            for block in holding.block_table:
                holders[block].append(holding.name)
                if holding.uses.get(block, self.uses[block]) != self.uses[block]:
                    sentence = f"block {block} was given to another while {holding.name} held it"
                    yield Finding(block, sentence, is_foreign=True)
        for block, names in enumerate(holders):
            if len(names) != self._references[block]:
                yield Finding(
                    block,
                    f"block {block} has {self._references[block]} references but is in the tables "
                    f"of {names or 'nobody'}",
                )
        shared = [block for block, names in enumerate(holders) if len(names) > 1]
        for block in self._shared_in_disagreement(shared, holdings):
            sentence = f"block {block} is shared by {holders[block]} without being registered"
            yield Finding(block, sentence, is_foreign=True)

    def _audit_free_lists(self) -> Iterator[Finding]:
        listed = [0] * self.num_blocks
        for block in self._free:
            listed[block] += 1
            if self._content[block] is not None:
                yield Finding(
                    block, f"block {block} is registered but listed as free without content"
                )
        for block in self._cached:
            listed[block] += 1
            if self._content[block] is None:
                yield Finding(block, f"block {block} is listed as cached but not registered")
        for block, times in enumerate(listed):
            wanted = 0 if self._references[block] or block in self._quarantined else 1
            if times != wanted:
                yield Finding(
                    block, f"block {block} is in the free lists {times} times instead of {wanted}"
                )

    def _audit_index(self) -> Iterator[Finding]:
        for key, block in self._index.items():
            content = self._content[block]
            if content is None or content.key != key:
                yield Finding(
                    block, f"block {block} is in the index under a key that is not its own"
                )
        for block, content in enumerate(self._content):
            if content is not None and self._index.get(content.key) != block:
                yield Finding(
                    block, f"block {block} is registered but the index does not lead to it"
                )

    def _audit_content(self, holdings: list[Holding]) -> Iterator[Finding]:
        for holding in holdings:
            for index, wanted in enumerate(holding.content):
                block = holding.block_table[index]
                # A private copy of content that another block is registered for has none itself.
                found = self._content[block]
                if found is not None and found != wanted:
                    sentence = f"block {block} holds other tokens than {holding.name} has there"
                    yield Finding(block, sentence, is_foreign=True)

    def _audit_copies(self, holdings: list[Holding]) -> Iterator[str]:
        """Yield what should have been exchanged: room wasted, and nothing in doubt."""
        for holding in holdings:
            if not holding.exchanges:
                continue
            for block, content in zip(holding.block_table, holding.content, strict=False):
                known = self._index.get(content.key)
                is_private = self._content[block] is None and block not in self._quarantined
                if is_private and known is not None:
                    yield f"block {block} of {holding.name} is a copy of block {known}"
