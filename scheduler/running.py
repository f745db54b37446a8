"""The sequences that run: who holds which slot and which blocks, and who has to give them up.

`Running` carries out what a plan needs of slots and blocks: it admits, grows, preempts and
releases. It decides nothing about who comes next (`policy`, `waiting_queue`), and it does not
know results (`scheduler`).
"""

import numpy as np

from protocol.columns import pack_int32
from protocol.messages import Join
from scheduler.block_manager import BlockManager
from scheduler.planned_step import Draft
from scheduler.policy import PROGRESS_TOKENS, WORTH_WAITING_TOKENS, choose_victim, headroom
from scheduler.sequence import Sequence, SequenceStatus
from scheduler.slot_table import Rows, SlotTable

JOIN_BYTES = 512
"""What a join takes in a frame beside its tokens and blocks: its parameters, mostly."""


class Running:
    """Owner of the running sequences' slots and blocks.

    Invariants: a slot that is given up appears in the leaves of the next plan; a decoding row is
    planned only with the block for its position in its table; blocks found in the prefix index
    are never written, because a hit ends before the last known token's block.
    """

    def __init__(
        self, table: SlotTable, blocks: BlockManager, stop_watch_size: int, *, prefix_cache: bool
    ) -> None:
        self.table = table
        self.blocks = blocks
        self.prefix_cache = prefix_cache
        self.stop_watch = np.zeros(stop_watch_size, np.int32)
        """[vocab_size] how many running sequences end at a token."""
        self.prefilling: dict[Sequence, None] = {}
        """In order of admission."""
        self._decoding: dict[int, Sequence] = {}
        # Sequences with full blocks of known tokens that the prefix index does not know yet.
        self._unregistered: dict[Sequence, None] = {}
        self._draining: dict[Sequence, None] = {}
        self._leaves: list[int] = []
        self._rows: Rows | None = None
        self._under_pressure = False
        # What `admit` last failed for, as (sequence, free blocks, running): until one of them
        # gets better there is no point in walking the prefix index again.
        self._too_big: tuple[Sequence, int, int] | None = None

    @property
    def num_decoding(self) -> int:
        """Sequences that get a decode row in the next plan."""
        return len(self._decoding)

    @property
    def has_rows(self) -> bool:
        """Whether any sequence has a position to plan."""
        return self.num_decoding > 0 or any(each.num_pending for each in self.prefilling)

    @property
    def waits_for_blocks(self) -> Sequence | None:
        """Who was the last to be denied admission for want of blocks, if nobody was admitted since.

        It may have ended meanwhile.
        """
        return None if self._too_big is None else self._too_big[0]

    def decode_rows(self) -> Rows:
        """Return the decode rows; the same object as long as the list is the same."""
        if self._rows is None:
            self._rows = self.table.rows(self._decoding)
        return self._rows

    def take_leaves(self) -> list[int]:
        """Return the slots given up since the last plan."""
        leaves, self._leaves = self._leaves, []
        return leaves

    # ------------------------------------------------------------------------------
    # In

    def admit(self, sequence: Sequence, draft: Draft, step_id: int) -> bool:
        """Give a waiting sequence a slot and the blocks of all its tokens; False: not now."""
        free, running = self.blocks.num_free, self.table.num_running
        if self.table.num_free == 0 or self._is_known_too_big(sequence, free, running):
            return False
        hits = self._find_prefix(sequence)
        if self._is_being_computed(sequence, len(hits)):
            return False
        total = self.blocks.blocks_for(len(sequence.tokens))
        wanted = total - len(hits) + self.blocks.num_free_among(hits)
        kept_free = headroom(running, self.blocks.block_size, under_pressure=self._under_pressure)
        if wanted + kept_free > free:
            self._too_big = (sequence, free, running)
            return False
        self._too_big = None
        self.blocks.share(hits)
        sequence.block_table = hits + self.blocks.allocate(total - len(hits))
        sequence.num_registered = len(hits)
        sequence.num_planned = sequence.num_computed = len(hits) * self.blocks.block_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.num_planned, sequence.num_prompt_tokens)
        self._enter(sequence, draft, step_id)
        return True

    def _enter(self, sequence: Sequence, draft: Draft, step_id: int) -> None:
        slot = self.table.take(sequence)
        self.table.length[slot] = sequence.num_planned
        for token_id in sequence.stop_token_ids:
            self.stop_watch[token_id] += 1
        sequence.become(SequenceStatus.PREFILLING, step_id)
        self.prefilling[sequence] = None
        if self.prefix_cache:
            self._unregistered[sequence] = None
        draft.joins.append(
            Join(
                slot=slot,
                generation=int(self.table.generation[slot]),
                token_ids=sequence.tokens.tobytes(),
                prompt_len=sequence.num_prompt_tokens,
                params=sequence.params,
                block_table=pack_int32(sequence.block_table),
            )
        )
        draft.join_bytes += JOIN_BYTES + 4 * (len(sequence.tokens) + len(sequence.block_table))

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Return the cached blocks a sequence can start from.

        At least one token is always left to compute: its logits are what the sequence needs.
        """
        if not self.prefix_cache:
            return []
        longest = (len(sequence.tokens) - 1) // self.blocks.block_size
        return self.blocks.match(
            sequence.chain.block(index, sequence.tokens) for index in range(longest)
        )

    def _is_being_computed(self, sequence: Sequence, num_hits: int) -> bool:
        """Return whether another sequence is about to compute most of what this one would.

        Then it waits for the other's blocks: the samples of one prompt, or a burst of prompts
        behind one long system prompt, are not all to compute the same tokens side by side.
        """
        block_size = self.blocks.block_size
        pending = len(sequence.tokens) - num_hits * block_size
        worth_waiting = max(pending // 2, WORTH_WAITING_TOKENS)
        # Equal keys of a block stand for equal prefixes up to it, so one comparison is enough.
        number = num_hits + self.blocks.blocks_for(worth_waiting) - 1
        if number >= (len(sequence.tokens) - 1) // block_size:
            return False
        return any(
            other.num_registered <= number < len(other.tokens) // block_size
            and other.chain.block(number, other.tokens).key
            == sequence.chain.block(number, sequence.tokens).key
            for other in self._unregistered
        )

    def _is_known_too_big(self, sequence: Sequence, free: int, running: int) -> bool:
        if self._too_big is None:
            return False
        other, free_then, running_then = self._too_big
        return sequence is other and free <= free_then and running >= running_then

    # ------------------------------------------------------------------------------
    # On

    def prefilled(self, sequence: Sequence, step_id: int) -> None:
        """Note that the last known token is planned: from now on it decodes, if it may."""
        slot = sequence.slot
        assert slot is not None, f"prefilled without a slot: {sequence.tell()}"
        del self.prefilling[sequence]
        sequence.become(SequenceStatus.DECODING, step_id)
        self._set_plan_event(sequence, slot)
        self._decoding[slot] = sequence
        self._rows = None

    def extend_tables(self, draft: Draft, step_id: int) -> None:
        """Make every decode row of the next plan possible: blocks for the positions it writes.

        Rows whose last permitted token is planned already leave the list; where blocks run out,
        others do.
        """
        if not self._decoding:
            return
        rows = self.decode_rows()
        due = np.flatnonzero(self.table.length[rows.slots] == self.table.plan_event[rows.slots])
        if not due.size:
            return
        growing: list[Sequence] = []
        for slot in rows.slots[due].tolist():
            sequence = self._decoding[slot]
            if self.table.length[slot] + 1 >= sequence.max_tokens:
                self._stop_decoding(sequence)
                sequence.become(SequenceStatus.DRAINING, step_id)
                self._draining[sequence] = None
            else:
                growing.append(sequence)
        # First in rank first: whoever is preempted below has then had nothing in vain.
        if len(growing) > self.blocks.num_free:
            growing.sort(key=lambda each: each.rank)
        for sequence in growing:
            # Still decoding, unless it gave way to one of those before it.
            if sequence.status is SequenceStatus.DECODING and self._reclaim(
                sequence, draft, step_id
            ):
                self._grow(sequence, draft)

    def _grow(self, sequence: Sequence, draft: Draft) -> None:
        assert sequence.slot is not None, f"grows without a slot: {sequence.tell()}"
        block = self.blocks.take()
        draft.new_blocks[sequence.slot] = (len(sequence.block_table), block)
        sequence.block_table.append(block)
        self._set_plan_event(sequence, sequence.slot)

    def _set_plan_event(self, sequence: Sequence, slot: int) -> None:
        capacity = len(sequence.block_table) * self.blocks.block_size
        self.table.plan_event[slot] = min(capacity, sequence.max_tokens - 1)

    def register(self, sequence: Sequence) -> None:
        """Enter a sequence's full, computed blocks into the prefix index.

        Called when a chunk of a prompt is committed, and once more when the sequence leaves: what
        it writes in between is of use to those who continue its text, not before it ends.
        """
        if not self.prefix_cache:
            return
        # A draining sequence may have given up its blocks.
        full = min(sequence.num_computed // self.blocks.block_size, len(sequence.block_table))
        for number in range(sequence.num_registered, full):
            content = sequence.chain.block(number, sequence.tokens)
            self.blocks.register(sequence.block_table[number], content)
            sequence.num_registered = number + 1
        if sequence.num_computed >= len(sequence.tokens) - 1:
            self._unregistered.pop(sequence, None)

    # ------------------------------------------------------------------------------
    # Out

    def leave(self, sequence: Sequence) -> int:
        """Take slot and blocks from a sequence; return how many blocks nobody holds now."""
        self.prefilling.pop(sequence, None)
        self._unregistered.pop(sequence, None)
        self._draining.pop(sequence, None)
        self._stop_decoding(sequence)
        self._leaves.append(self.table.give_back(sequence))
        self.register(sequence)
        for token_id in sequence.stop_token_ids:
            self.stop_watch[token_id] -= 1
        return self._release_blocks(sequence)

    def relieve(self) -> None:
        """Note that a running sequence has ended, which ends the caution after a preemption."""
        self._under_pressure = False

    def preempt(self, sequence: Sequence, draft: Draft, step_id: int) -> None:
        """Take slot and blocks from a sequence that will run again from its committed tokens."""
        assert sequence.slot is not None, f"preempted without a slot: {sequence.tell()}"
        draft.new_blocks.pop(sequence.slot, None)
        sequence.become(SequenceStatus.PREEMPTED, step_id)
        self.leave(sequence)
        sequence.num_planned = 0
        sequence.protected_until = len(sequence.tokens) + PROGRESS_TOKENS
        draft.preempted.append(sequence)
        self._under_pressure = True

    def _reclaim(self, needy: Sequence, draft: Draft, step_id: int) -> bool:
        """Make sure that a block is free; False if that took the needy sequence's own."""
        while self.blocks.num_free == 0:
            if self._release_drained():
                continue
            candidates = [*self.prefilling, *self._decoding.values()]
            for candidate in candidates:
                self.table.sync(candidate)
            victim = choose_victim(candidates)
            # Alone, a sequence always has enough: its length was cut to what the pool holds.
            assert victim is not None, f"no block for the only sequence: {needy.tell()}"
            self.preempt(victim, draft, step_id)
            if victim is needy:
                return False
        return True

    def _release_drained(self) -> bool:
        """Free the blocks of one sequence whose rows are all planned; False if there is none.

        The ranks read and write in plan order, so its blocks may serve another already.
        """
        for sequence in reversed(self._draining):
            if sequence.block_table:
                self.table.sync(sequence)
                self.register(sequence)
                self._release_blocks(sequence)
                return True
        return False

    def _release_blocks(self, sequence: Sequence) -> int:
        freed = self.blocks.release(sequence.block_table)
        sequence.block_table = []
        return freed

    def _stop_decoding(self, sequence: Sequence) -> None:
        if sequence.slot is not None and self._decoding.pop(sequence.slot, None) is not None:
            self._rows = None
