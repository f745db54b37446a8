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

A block whose count, list, index entry or content disagree is in *quarantine*: in neither free list
nor the index, and given to nobody, until nobody can hold it who has ever been given it. The
operations look where looking is cheap. What they stumble over they leave alone and note; they
never fail of it.

The block manager knows integers and prefix blocks; it does not know sequences.
"""

from collections.abc import Iterable

from scheduler.block_books import BlockBooks, Finding
from scheduler.prefix import PrefixBlock
from scheduler.stats import Counters


class BlocksLostError(Exception):
    """What was counted as free turned out not to be. Our bug; whoever asked tries again later."""


class BlockManager(BlockBooks):
    """Owner of the free list, the reference counts and the prefix index.

    Invariants: a block is free or held, never both; only registered blocks are in the index, each
    under its own key; every free block is in exactly one of the two free lists; a block in
    quarantine is in neither, nor in the index. Free, held and quarantined blocks are all there are.
    """

    def __init__(self, num_blocks: int, block_size: int, counters: Counters | None = None) -> None:
        super().__init__(num_blocks, block_size)
        self._stumbles: dict[int, Finding] = {}
        self._counters = counters or Counters()

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks that the prefix index knows."""
        return len(self._cached)

    @property
    def num_indexed(self) -> int:
        """Blocks that the prefix index knows, held or free."""
        return len(self._index)

    @property
    def num_quarantined(self) -> int:
        """Blocks that are out of use."""
        return len(self._quarantined)

    @property
    def has_stumbled(self) -> bool:
        """Whether an operation has found something that does not fit together."""
        return bool(self._stumbles)

    def num_holders(self, block: int) -> int:
        """Return how many sequences hold a block."""
        return self._references[block]

    def is_registered(self, block: int) -> bool:
        """Return whether the prefix index knows a block."""
        return self._content[block] is not None

    def may_share(self, blocks: list[int]) -> bool:
        """Return whether none of these blocks is in quarantine, and so given to nobody else."""
        return not any(map(self._quarantined.__contains__, blocks))

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
            if block is None:
                break
            # The exact comparison: an equal key alone proves nothing.
            if self._content[block] != wanted:
                self._stumble(block, "is in the index under a key of other content")
                break
            references = self._references[block]
            if references < 0 or (references == 0) is not (block in self._cached):
                self._stumble(block, f"has {references} references, which its list contradicts")
                break
            hits.append(block)
        return hits

    def num_free_among(self, blocks: list[int]) -> int:
        """Return how many of these blocks nobody holds."""
        return sum(not self._references[block] for block in blocks)

    def share(self, blocks: list[int]) -> None:
        """Hold blocks that `match` has found, once more each."""
        revived = 0
        for block in blocks:
            if self._references[block] == 0:
                if block in self._cached:
                    del self._cached[block]
                else:
                    self._stumble(block, "is shared, but neither held nor listed as cached")
                revived += 1
            self._references[block] += 1
        self._counters.revived_blocks += revived
        self._counters.shared_blocks += len(blocks) - revived

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks, now held once. The caller has looked at `num_free`.

        Raises BlocksLostError, and takes none, if some of those were not free.
        """
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        taken = self._free[: -count - 1 : -1]
        if len(set(taken)) == count and self._are_blank(taken):
            del self._free[len(self._free) - count :]
            references, uses = self._references, self.uses
            for block in taken:
                references[block] = 1
                uses[block] += 1
            return taken
        taken = []
        try:
            for _ in range(count):
                taken.append(self.take())
        except BlocksLostError:
            self.release(taken)
            raise
        return taken

    def take(self) -> int:
        """Return one block, now held once. The caller has looked at `num_free`.

        Raises BlocksLostError if nothing that was counted there is free.
        """
        while True:
            if self._free:
                block = self._free.pop()
            elif self._cached:
                block, _ = self._cached.popitem(last=False)
                if self._references[block] == 0:
                    self._evict(block)  # where it cannot, there is content still
            else:
                raise BlocksLostError
            if self._are_blank([block]):
                self._references[block] = 1
                self.uses[block] += 1
                return block
            self._stumble(block, "is listed as free, but its references or content say otherwise")

    def _are_blank(self, blocks: list[int]) -> bool:
        """Return whether blocks that are taken from a free list may be given to anybody."""
        return (
            not any(map(self._references.__getitem__, blocks))
            and not any(map(self._content.__getitem__, blocks))
            and self._quarantined.keys().isdisjoint(blocks)
        )

    def release(self, blocks: list[int], uses: dict[int, int] | None = None) -> int:
        """Give up one hold of each block; return how many of them nobody holds now.

        A block that has been given to another since `uses` were noted stays with that other.
        """
        freed = 0
        noted = uses or {}
        # Last first: a prefix is useful without its tail, a tail without its prefix is not, so
        # tails are to be evicted earlier.
        for block in reversed(blocks):
            if block in self._quarantined:
                self._references[block] -= self._references[block] > 0
                continue
            if noted.get(block, self.uses[block]) != self.uses[block]:
                self._stumble(block, "was given to another while it was held", is_foreign=True)
                continue
            if self._references[block] <= 0:
                self._stumble(block, "is released, but has no references")
                continue
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
        then `exchange` the block for that one. So it does where the block is in quarantine, or has
        to get there.
        """
        if block in self._quarantined or content.key in self._index:
            return False
        if self._references[block] != 1 or self._content[block] is not None:
            self._stumble(block, "is to be registered, but is not held by one or is registered")
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

    def forget_all(self) -> int:
        """Empty the prefix index; return how many blocks it knew. What is held stays held."""
        num_forgotten = len(self._index)
        self._index.clear()
        self._content = [None] * self.num_blocks
        # The least recently freed one is given out first, as before.
        self._free.extend(reversed(self._cached))
        self._cached.clear()
        return num_forgotten

    def _evict(self, block: int) -> None:
        """Forget the content of a free block, unless the index does not lead to it."""
        content = self._content[block]
        if content is not None and self._index.get(content.key) == block:
            del self._index[content.key]
            self._content[block] = None
            self._counters.evicted_blocks += 1

    # ------------------------------------------------------------------------------
    # Quarantine

    def _stumble(self, block: int, what: str, *, is_foreign: bool = False) -> None:
        self._stumbles[block] = Finding(block, f"block {block} {what}", is_foreign)

    def take_stumbles(self) -> list[Finding]:
        """Return what operations have found since the last call."""
        stumbles, self._stumbles = list(self._stumbles.values()), {}
        return stumbles

    def quarantine(self, holders: dict[int, int], num_admissions: int) -> None:
        """Take blocks out of use; `holders` says how many tables name each.

        Whoever holds one may go on with it. `num_admissions`: how many there have been.
        """
        self._free = [block for block in self._free if block not in holders]
        self._index = {key: block for key, block in self._index.items() if block not in holders}
        for block, count in holders.items():
            self._cached.pop(block, None)
            self._content[block] = None
            self._references[block] = count
            self._counters.quarantines += block not in self._quarantined
            self._quarantined[block] = num_admissions

    def end_quarantine(self, first_admission: int | None) -> int:
        """Give back what nobody can hold, and return how many blocks.

        `first_admission` is the number of the earliest one that still runs, None: nobody does. A
        block that was in quarantine before it has never been given to anybody who runs.
        """
        over = [
            block
            for block, num_admissions in self._quarantined.items()
            if first_admission is None or num_admissions < first_admission
        ]
        for block in over:
            del self._quarantined[block]
            self._references[block] = 0
        self._free.extend(over)
        return len(over)
