"""Which block of the KV cache belongs to whom.

A block is *held* by one or more sequences (its reference count), or *free*. A free block may be
*cached*: its content is still in the prefix index and it can be taken back by whoever needs that
content. Blocks are given out from those without content first, then the cached ones, least
recently freed first; both in constant time.

              allocate                     register
    free ───────────────► held ───────────────────────► held, in the index
     ▲                     │                                │
     │      release        │                                │ release by the last holder
     ├─────────────────────┘                                ▼
     └──────────────────────────────────────────── free, cached ───► held again (share)
              evicted by allocate

A block whose content the index has in another block already can be exchanged for that one
(`exchange`), so that no content is held twice for long.

The block manager knows integers and prefix blocks; it does not know sequences.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from scheduler.prefix import PrefixBlock, PrefixHasher


@dataclass(frozen=True, slots=True)
class Holding:
    """What one sequence is believed to hold; for `BlockManager.audit`."""

    name: str
    block_table: list[int]
    content: list[PrefixBlock]
    """The table's first blocks by content, as many as the sequence counts as registered."""


class BlockManager:
    """Owner of the free list, the reference counts and the prefix index.

    Invariants: a block is free or held, never both; only registered blocks are in the index, each
    under its own key; every free block is in exactly one of the two free lists.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        # Popped from the end: low numbers first, which makes plans easy to read.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._index: dict[bytes, int] = {}
        self._content: list[PrefixBlock | None] = [None] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_indexed(self) -> int:
        """Blocks that the prefix index knows, held or free."""
        return len(self._index)

    def num_holders(self, block: int) -> int:
        """Return how many sequences hold a block."""
        return self._references[block]

    def is_registered(self, block: int) -> bool:
        """Return whether the prefix index knows a block."""
        return self._content[block] is not None

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks so many positions take."""
        return -(-num_tokens // self.block_size)

    def match(self, prefix: Iterable[PrefixBlock]) -> list[int]:
        """Return the blocks that hold the longest known part of a prefix, from its start.

        They are not held yet: `share` them before anything else is allocated.
        """
        hits: list[int] = []
        for wanted in prefix:
            block = self._index.get(wanted.key)
            # The exact comparison: an equal key alone proves nothing.
            if block is None or self._content[block] != wanted:
                break
            hits.append(block)
        return hits

    def num_free_among(self, blocks: list[int]) -> int:
        """Return how many of these blocks nobody holds."""
        return sum(not self._references[block] for block in blocks)

    def share(self, blocks: list[int]) -> None:
        """Hold blocks that `match` has found, once more each."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks, now held once. The caller has looked at `num_free`."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        return [self.take() for _ in range(count)]

    def take(self) -> int:
        """Return one block, now held once. The caller has looked at `num_free`."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self._references[block] = 1
        return block

    def release(self, blocks: list[int]) -> int:
        """Give up one hold of each block; return how many of them nobody holds now."""
        freed = 0
        # Last first: a prefix is useful without its tail, a tail without its prefix is not, so
        # tails are to be evicted earlier.
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                freed += 1
                if self._content[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None
        return freed

    def register(self, block: int, content: PrefixBlock) -> bool:
        """Enter a held, fully written block into the prefix index.

        Returns False where the index already has that content in another block; its holder can
        then `exchange` the block for that one.
        """
        assert self._references[block] == 1, f"block {block} is not held by one sequence"
        assert self._content[block] is None, f"block {block} is registered already"
        if content.key in self._index:
            return False
        self._index[content.key] = block
        self._content[block] = content
        return True

    def exchange(self, block: int, content: PrefixBlock) -> int | None:
        """Give up a private copy of a content for the index's own block of it, held once more.

        Returns that block. None where the index does not have exactly that content, or the block
        is no private copy: it then stays with its holder.
        """
        is_private = self._references[block] == 1 and self._content[block] is None
        known = self.match([content]) if is_private else []
        if not known:
            return None
        self.share(known)
        self.release([block])
        return known[0]

    def _forget(self, block: int) -> None:
        content = self._content[block]
        assert content is not None, f"block {block} is cached without content"
        del self._index[content.key]
        self._content[block] = None

    # ------------------------------------------------------------------------------
    # Self-check

    def audit(self, hasher: PrefixHasher, holdings: list[Holding]) -> list[str]:
        """Compare everything known about every block; return one sentence per disagreement.

        Counts alone would miss a block that two owners believe to be theirs, so each block is
        followed: to its holders, to its free list, and to its content, whose key is recomputed.
        """
        return [
            *self._audit_holders(holdings),
            *self._audit_free_lists(),
            *self._audit_index(hasher),
            *self._audit_content(holdings),
            *self._audit_copies(holdings),
        ]

    def _audit_holders(self, holdings: list[Holding]) -> Iterator[str]:
        holders: list[list[str]] = [[] for _ in range(self.num_blocks)]
        believed: list[set[PrefixBlock | None]] = [set() for _ in range(self.num_blocks)]
        for holding in holdings:
            unknown = [None] * (len(holding.block_table) - len(holding.content))
            for block, content in zip(
                holding.block_table, [*holding.content, *unknown], strict=True
            ):
                holders[block].append(holding.name)
                believed[block].add(content)
        for block, names in enumerate(holders):
            if len(names) != self._references[block]:
                yield (
                    f"block {block} has {self._references[block]} references but is in the tables "
                    f"of {names or 'nobody'}"
                )
            if len(names) < 2 or self._content[block] is not None:
                continue
            # Samples of one prompt share without the index too, but they agree on the content.
            if None in believed[block] or len(believed[block]) > 1:
                yield f"block {block} is shared by {names} without being registered"

    def _audit_free_lists(self) -> Iterator[str]:
        listed = [0] * self.num_blocks
        for block in self._free:
            listed[block] += 1
            if self._content[block] is not None:
                yield f"block {block} is registered but listed as free without content"
        for block in self._cached:
            listed[block] += 1
            if self._content[block] is None:
                yield f"block {block} is listed as cached but not registered"
        for block, times in enumerate(listed):
            wanted = 0 if self._references[block] else 1
            if times != wanted:
                yield f"block {block} is in the free lists {times} times instead of {wanted}"

    def _audit_index(self, hasher: PrefixHasher) -> Iterator[str]:
        for key, block in self._index.items():
            content = self._content[block]
            if content is None or content.key != key:
                yield f"block {block} is in the index under a key that is not its own"
        for block, content in enumerate(self._content):
            if content is None:
                continue
            if self._index.get(content.key) != block:
                yield f"block {block} is registered but the index does not lead to it"
            if hasher.key(content.parent, content.tokens) != content.key:
                yield f"block {block} holds other tokens than its key says"

    def _audit_content(self, holdings: list[Holding]) -> Iterator[str]:
        for holding in holdings:
            for index, wanted in enumerate(holding.content):
                block = holding.block_table[index]
                found = self._content[block]
                if found is not None and found != wanted:
                    yield f"block {block} holds other tokens than {holding.name} has there"

    def _audit_copies(self, holdings: list[Holding]) -> Iterator[str]:
        for holding in holdings:
            for block, content in zip(holding.block_table, holding.content, strict=False):
                if self._content[block] is None and (known := self.match([content])):
                    yield f"block {block} of {holding.name} is a copy of block {known[0]}"
