"""Which part of a divided dimension is whose.

    heads, intermediate size    divided evenly
    KV heads                    divided evenly, or each held by several ranks
    vocabulary                  divided into equal parts, the last ones padded

Knows neither tensors nor how ranks talk.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's part of a dimension: `size` slices from `start` on, out of `whole`."""

    whole: int
    start: int
    size: int

    def scaled(self, factor: int) -> "Shard":
        """Return the same part where every slice stands for `factor` slices, as heads do."""
        return Shard(whole=self.whole * factor, start=self.start * factor, size=self.size * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShards:
    """A rank's query heads and the KV heads that they read."""

    query: Shard
    key_value: Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShard:
    """A rank's part of the vocabulary.

    Every rank's logits are `width` wide; those of its `ids` come first, padding fills the rest.

        ids    0 1 2 │ 3 4 5 │ 6 7 ·       a vocabulary of 8 on 3 ranks: width 3, one of padding
    """

    ids: Shard
    width: int


def divide(whole: int, *, rank: int, size: int) -> Shard:
    """Return a rank's even part."""
    assert whole % size == 0, f"{whole} does not divide among {size} ranks"
    part = whole // size
    return Shard(whole=whole, start=rank * part, size=part)


def divide_heads(num_heads: int, num_kv_heads: int, *, rank: int, size: int) -> HeadShards:
    """Return a rank's heads. Ranks that share a KV head each hold it whole."""
    if num_kv_heads % size == 0:
        key_value = divide(num_kv_heads, rank=rank, size=size)
    else:
        assert size % num_kv_heads == 0, f"{num_kv_heads} KV heads on {size} ranks"
        key_value = Shard(whole=num_kv_heads, start=rank * num_kv_heads // size, size=1)
    return HeadShards(query=divide(num_heads, rank=rank, size=size), key_value=key_value)


def divide_vocabulary(vocab_size: int, *, rank: int, size: int) -> VocabularyShard:
    """Return a rank's part of the vocabulary; the last ranks may have fewer ids, even none."""
    width = -(-vocab_size // size)
    start = min(rank * width, vocab_size)
    ids = Shard(whole=vocab_size, start=start, size=min(width, vocab_size - start))
    return VocabularyShard(ids=ids, width=width)
