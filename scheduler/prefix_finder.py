"""What an admitted sequence need not compute: what is cached, or what a sibling has.

It also knows who is computing what, so that a sequence can wait for another's blocks.
"""

from typing import NamedTuple

from scheduler.block_manager import BlockManager
from scheduler.policy import WORTH_WAITING_TOKENS
from scheduler.samples import Samples, length_in_common
from scheduler.sequence import Sequence


class Prefix(NamedTuple):
    """What a sequence need not compute, because others have."""

    blocks: list[int]
    """To be shared."""
    num_tokens: int
    """With those that a copy of `tail` brings."""
    tail: int | None = None
    """The block whose first tokens a sibling has in common with it."""


class PrefixFinder:
    """Looks at the prefix index and at the sequences that run. It holds no block."""

    def __init__(self, blocks: BlockManager, *, prefix_cache: bool) -> None:
        self._blocks = blocks
        self._is_cached = prefix_cache
        self._samples = Samples()
        # Sequences with full blocks of known tokens that the prefix index does not know yet.
        self._unregistered: dict[Sequence, None] = {}
        # Admissions there had been when the prefix cache was reset.
        self._reset_at = -1

    def reset(self, num_admissions: int) -> None:
        """Give nobody anything any more that rests on one of so many admissions."""
        self._reset_at = num_admissions
        self._samples = Samples()
        self._unregistered.clear()  # nobody is to wait for what will not be registered

    def is_old(self, sequence: Sequence) -> bool:
        """Return whether what a sequence computes rests on what was written before a reset."""
        return sequence.rests_on <= self._reset_at

    def enter(self, sequence: Sequence) -> None:
        """Note that a sequence runs now. One that is old has nothing for others."""
        if self.is_old(sequence):
            return
        self._samples.enter(sequence)
        if self._is_cached:
            self._unregistered[sequence] = None

    def registered(self, sequence: Sequence) -> None:
        """Note that the index knows all that a running sequence has for others."""
        self._unregistered.pop(sequence, None)

    def leave(self, sequence: Sequence) -> None:
        """Note that a sequence does not run any more."""
        self._samples.leave(sequence)
        self._unregistered.pop(sequence, None)

    def find(self, sequence: Sequence) -> Prefix | None:
        """Return what a sequence can start from; None if it does better to wait.

        A sibling has all of the prompt, also where there is no prefix cache; of its last, partly
        filled block a copy is made, since both are going to write there.
        """
        if sequence.wants_scores:
            # What scores a token is the hidden state before it, which nobody keeps. What it had
            # computed itself when it was moved to the host, it has scored.
            return Prefix([], sequence.num_swapped)
        block_size = self._blocks.block_size
        hits = self._find_hits(sequence)
        if sequence.host_blocks:
            return Prefix(hits, max(len(hits) * block_size, sequence.num_swapped))
        prefix = Prefix(hits, len(hits) * block_size)
        sibling, length = self._find_sibling(sequence), length_in_common(sequence)
        if sibling is not None and sibling.num_computed >= length > prefix.num_tokens:
            full = length // block_size
            # Neither of the two will write into these.
            sibling.num_registered = max(sibling.num_registered, full)
            tail = sibling.block_table[full] if length % block_size else None
            return Prefix(sibling.block_table[:full], length, tail)
        if sibling is not None and length - prefix.num_tokens >= _worth_waiting(sequence, prefix):
            return None
        return None if self._is_being_computed(sequence, prefix) else prefix

    def _find_sibling(self, sequence: Sequence) -> Sequence | None:
        """Return a sibling that has, or will have, what can be shared with a sequence."""
        sibling = self._samples.find(sequence)
        if sibling is None or sibling.is_damaged:
            return None
        is_own = self._blocks.is_untouched(sibling.block_table, sibling.block_uses)
        return sibling if is_own and self._blocks.may_share(sibling.block_table) else None

    def _find_hits(self, sequence: Sequence) -> list[int]:
        """Return the cached blocks a sequence can start from.

        At least one token is always left to compute: its logits are what the sequence needs.
        """
        if not self._is_cached:
            return []
        longest = (len(sequence.tokens) - 1) // self._blocks.block_size
        return self._blocks.match(
            sequence.chain.block(index, sequence.tokens) for index in range(longest)
        )

    def _is_being_computed(self, sequence: Sequence, prefix: Prefix) -> bool:
        """Return whether another sequence is about to compute most of what this one would.

        Then it waits for the other's blocks: the samples of one prompt, or a burst of prompts
        behind one long system prompt, are not all to compute the same tokens side by side.
        """
        block_size = self._blocks.block_size
        worth_waiting = _worth_waiting(sequence, prefix)
        # Equal keys of a block stand for equal prefixes up to it, so one comparison is enough.
        number = len(prefix.blocks) + self._blocks.blocks_for(worth_waiting) - 1
        if number >= (len(sequence.tokens) - 1) // block_size:
            return False
        return any(
            other.num_registered <= number < len(other.tokens) // block_size
            and other.chain.block(number, other.tokens).key
            == sequence.chain.block(number, sequence.tokens).key
            for other in self._unregistered
        )


def _worth_waiting(sequence: Sequence, prefix: Prefix) -> int:
    """Return how many tokens a sequence must save by waiting, at least, to wait."""
    return max((len(sequence.tokens) - prefix.num_tokens) // 2, WORTH_WAITING_TOKENS)
