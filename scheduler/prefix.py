"""Names for cached blocks: a chain of keyed hashes over a sequence's full blocks.

    key(0) = H(root, tokens of block 0)      root = R(cache domain)
    key(i) = H(key(i - 1), tokens of block i)

H and R are BLAKE2b with one key and two personalisations.

A key stands for a whole prefix inside one cache domain. It only *finds* a block: whoever reuses it
compares domain, parent and tokens exactly, from the first block on, so that no hash, however it
came to be equal, hands one sequence the keys and values of another.
"""

import hashlib
from array import array
from typing import NamedTuple, TypeAlias

TokenArray: TypeAlias = "array[int]"
"""Token ids as `array("i")`: appended to like a list, copied into columns as bytes."""

DIGEST_BYTES = 16


class PrefixHasher:
    """BLAKE2b under a key that each process draws anew, so that nobody can compute collisions."""

    def __init__(self, key: bytes) -> None:
        self._block = hashlib.blake2b(key=key, digest_size=DIGEST_BYTES, person=b"block")
        self._domain = hashlib.blake2b(key=key, digest_size=DIGEST_BYTES, person=b"domain")

    def root(self, domain: bytes) -> bytes:
        """Return what stands before the first block of every prefix of a cache domain."""
        state = self._domain.copy()
        state.update(domain)
        return state.digest()

    def key(self, parent: bytes, tokens: bytes) -> bytes:
        """Return the key of a block of tokens behind its parent's key, or behind a root."""
        state = self._block.copy()
        state.update(parent)
        state.update(tokens)
        return state.digest()


class PrefixBlock(NamedTuple):
    """A full block by its content. Two are equal only if all of that is: nothing rests on `key`."""

    key: bytes
    parent: bytes
    """Key of the block before it, or the root of its domain."""
    domain: bytes
    tokens: bytes
    """int32 column of block_size token ids."""


class PrefixChain:
    """The full blocks of one sequence by content, computed once each, when first asked for."""

    __slots__ = ("_blocks", "_domain", "_hasher", "_width")

    def __init__(self, hasher: PrefixHasher, domain: bytes, block_size: int) -> None:
        self._hasher = hasher
        self._domain = domain
        self._width = block_size
        self._blocks: list[PrefixBlock] = []

    @property
    def domain(self) -> bytes:
        """The cache domain that its blocks are shared in."""
        return self._domain

    def block(self, index: int, tokens: TokenArray) -> PrefixBlock:
        """Return full block `index` of a sequence whose tokens so far are `tokens`."""
        blocks = self._blocks
        while len(blocks) <= index:
            blocks.append(self._next(tokens))
        return blocks[index]

    def blocks(self, count: int, tokens: TokenArray) -> list[PrefixBlock]:
        """Return the first full blocks."""
        if count:
            self.block(count - 1, tokens)
        return self._blocks[:count]

    def _next(self, tokens: TokenArray) -> PrefixBlock:
        parent = self._blocks[-1].key if self._blocks else self._hasher.root(self._domain)
        start = len(self._blocks) * self._width
        content = tokens[start : start + self._width].tobytes()
        assert len(content) == 4 * self._width, "only full blocks have a key"
        return PrefixBlock(self._hasher.key(parent, content), parent, self._domain, content)
