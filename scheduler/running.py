"""The sequences that run: who holds which slot and which blocks, and who has to give them up.

`Running` carries out what a plan needs of slots and blocks: it admits, grows, preempts and
releases. It decides nothing about who comes next (`policy`, `waiting_queue`), and it does not
know results (`scheduler`).
"""

import enum

import msgspec
import numpy as np

from protocol.columns import pack_int32
from protocol.messages import Join, SamplingParams
from scheduler.block_manager import BlockManager, BlocksLostError
from scheduler.denied import Denied
from scheduler.planned_step import Draft, join_bytes
from scheduler.policy import PROGRESS_TOKENS, choose_victim, headroom
from scheduler.prefix import PrefixBlock
from scheduler.prefix_finder import PrefixFinder
from scheduler.prefix_groups import PrefixGroups
from scheduler.sequence import Sequence, SequenceStatus
from scheduler.slot_table import Rows, SlotTable
from scheduler.swap_space import SwapSpace

MAX_REPLACED = 65_536
"""Entries of block tables that one plan replaces at most: its frame has to hold them."""


class Admission(enum.Enum):
    """What became of a waiting sequence that was to run."""

    ADMITTED = enum.auto()
    UNWILLING = enum.auto()
    """It does better to wait for what another is computing."""
    NO_ROOM = enum.auto()


class Running:
    """Owner of the running sequences' slots and blocks.

    Invariants: a slot that is given up appears in the leaves of the next plan; a decoding row is
    planned only with the block for its position in its table; blocks found in the prefix index
    are never written, because a hit ends before the last known token's block. Of a copy that was
    exchanged for the index's block, the next plan tells the ranks. The copy is free at once: they
    work in plan order, so what reads it has been sent, and what overwrites it comes in that plan
    at the earliest.
    """

    def __init__(
        self,
        table: SlotTable,
        blocks: BlockManager,
        swap: SwapSpace,
        stop_watch_size: int,
        *,
        prefix_cache: bool,
    ) -> None:
        self.table = table
        self.blocks = blocks
        self.swap = swap
        self.prefix_cache = prefix_cache
        self.stop_watch = np.zeros(stop_watch_size, np.int32)
        """[vocab_size] how many running sequences end at a token."""
        self.prefilling: dict[Sequence, None] = {}
        """In order of admission."""
        self._decoding: dict[int, Sequence] = {}
        self._draining: dict[Sequence, None] = {}
        self._prefixes = PrefixFinder(blocks, prefix_cache=prefix_cache)
        self.groups = PrefixGroups(blocks.block_size)
        # (slot, index in its block table) to the block that the ranks do not know to be there yet.
        self._replaced: dict[tuple[int, int], int] = {}
        self._leaves: list[int] = []
        self._rows: Rows | None = None
        self._under_pressure = False
        self.denied = Denied()
        self.is_short = False
        """A sequence that was alone found no block, which a sound pool always has."""
        self.num_admissions = 0

    @property
    def num_decoding(self) -> int:
        """Sequences that get a decode row in the next plan."""
        return len(self._decoding)

    @property
    def has_rows(self) -> bool:
        """Whether any sequence has a position to plan."""
        return self.num_decoding > 0 or any(each.num_pending for each in self.prefilling)

    def decode_rows(self) -> Rows:
        """Return the decode rows; the same object as long as the list is the same."""
        if self._rows is None:
            self._rows = self.table.rows(self._decoding)
        return self._rows

    def take_leaves(self) -> list[int]:
        """Return the slots given up since the last plan."""
        leaves, self._leaves = self._leaves, []
        return leaves

    def take_replaced(self) -> list[tuple[int, int, int]]:
        """Return what replaces entries of block tables: (slot, index, block)."""
        if not self._replaced:
            return []
        replaced, self._replaced = self._replaced, {}
        return [(*place, block) for place, block in replaced.items()]

    # ------------------------------------------------------------------------------
    # In

    def admit(self, sequence: Sequence, draft: Draft, step_id: int) -> Admission:
        """Give a waiting sequence a slot and the blocks of all its tokens, if that can be."""
        free, running = self.blocks.num_free, self.table.num_running
        if self.table.num_free == 0 or self.denied.still_holds(
            sequence, num_free=free, num_running=running
        ):
            return Admission.NO_ROOM
        prefix = self._prefixes.find(sequence)
        if prefix is None:
            return Admission.UNWILLING
        shared, num_shared = prefix.blocks, len(prefix.blocks)
        total = self.blocks.blocks_for(len(sequence.tokens))
        wanted = total - num_shared + self.blocks.num_free_among(shared)
        kept_free = headroom(running, self.blocks.block_size, under_pressure=self._under_pressure)
        if wanted + kept_free > free:
            self.denied.deny(sequence, num_free=free, num_running=running)
            return Admission.NO_ROOM
        self.denied.admitted(sequence)
        self.blocks.share(shared)
        try:
            own = self.blocks.allocate(total - num_shared)
        except BlocksLostError:
            self.blocks.release(shared)
            return Admission.NO_ROOM
        if prefix.tail is not None:
            draft.copies.append((prefix.tail, own[0]))
        draft.swap_ins += zip(sequence.host_blocks[num_shared:], own, strict=False)
        is_swapped = bool(sequence.host_blocks)
        self.forget_swapped(sequence)
        sequence.block_table = shared + own
        sequence.block_uses = {block: self.blocks.uses[block] for block in shared + own}
        self.num_admissions += 1
        sequence.admission = self.num_admissions
        if not is_swapped:
            sequence.rests_on = sequence.admission
        sequence.num_registered = num_shared
        sequence.num_planned = prefix.num_tokens
        # The step that copies or moves may fail yet: nobody is to copy from that before its commit.
        sequence.num_computed = num_shared * self.blocks.block_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.num_planned, sequence.num_prompt_tokens)
        self._enter(sequence, draft, step_id)
        return Admission.ADMITTED

    def _enter(self, sequence: Sequence, draft: Draft, step_id: int) -> None:
        slot = self.table.take(sequence)
        self.table.length[slot] = sequence.num_planned
        for token_id in sequence.stop_token_ids:
            self.stop_watch[token_id] += 1
        sequence.become(SequenceStatus.PREFILLING, step_id)
        self.prefilling[sequence] = None
        self._prefixes.enter(sequence)
        draft.joins.append(
            Join(
                slot=slot,
                generation=int(self.table.generation[slot]),
                token_ids=sequence.tokens.tobytes(),
                prompt_len=sequence.num_prompt_tokens,
                params=_join_params(sequence),
                block_table=pack_int32(sequence.block_table),
            )
        )
        draft.join_bytes += join_bytes(sequence)

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
        self.groups.enter(slot, sequence.block_table)
        self._rows = None

    def extend_tables(self, draft: Draft, step_id: int) -> None:
        """Make every decode row of the next plan possible: blocks for the positions it writes.

        Rows whose last permitted token is planned already leave the list; where blocks run out,
        others do.
        """
        if not self._decoding:
            return
        slots = self.decode_rows().slots
        lengths = self.table.length[slots]
        due = np.flatnonzero(lengths == self.table.plan_event[slots])
        if not due.size:
            return
        growing: list[Sequence] = []
        for slot, length in zip(slots[due].tolist(), lengths[due].tolist(), strict=True):
            sequence = self._decoding[slot]
            if length + 1 >= sequence.max_tokens:
                self._stop_decoding(sequence)
                sequence.become(SequenceStatus.DRAINING, step_id)
                self._draining[sequence] = None
            else:
                growing.append(sequence)
        if len(growing) <= self.blocks.num_free and self._grow_all(growing, draft):
            return
        # First in rank first: whoever is preempted below has then had nothing in vain.
        growing.sort(key=lambda each: each.rank)
        for sequence in growing:
            # Still decoding, unless it gave way to one of those before it.
            while sequence.status is SequenceStatus.DECODING and self._reclaim(
                sequence, draft, step_id
            ):
                if self._grow_all([sequence], draft):
                    break

    def _grow_all(self, sequences: list[Sequence], draft: Draft) -> bool:
        """Add a block to each table; False, and none, if what was counted as free was not."""
        try:
            blocks = self.blocks.allocate(len(sequences))
        except BlocksLostError:
            return False
        for sequence, block in zip(sequences, blocks, strict=True):
            slot, table = sequence.slot, sequence.block_table
            assert slot is not None, f"grows without a slot: {sequence.tell()}"
            # A block that it holds already has been lost to it: the older use stays noted, and
            # shows.
            sequence.block_uses.setdefault(block, self.blocks.uses[block])
            draft.new_blocks[slot] = (len(table), block)
            table.append(block)
            self._set_plan_event(sequence, slot)
        return True

    def _set_plan_event(self, sequence: Sequence, slot: int) -> None:
        capacity = len(sequence.block_table) * self.blocks.block_size
        self.table.plan_event[slot] = min(capacity, sequence.max_tokens - 1)

    def register(self, sequence: Sequence) -> None:
        """Enter a sequence's full, computed blocks into the prefix index.

        Called when a chunk of a prompt is committed, and once more when the sequence leaves: what
        it writes in between is of use to those who continue its text, not before it ends. Where
        another has computed the same meanwhile, its own copy gives way to the index's block.
        Nothing of a sequence that was running at a reset is entered: what it computes later rests
        on what was written before. Nor is anything of one that may have read another's.
        """
        self.denied.computed_chunk()
        if not self.registers(sequence):
            return
        # A draining sequence may have given up its blocks.
        full = min(sequence.num_computed // self.blocks.block_size, len(sequence.block_table))
        if full > sequence.num_registered and not self.is_intact(sequence):
            return
        num_replaced = len(self._replaced)
        for number in range(sequence.num_registered, full):
            content = sequence.chain.block(number, sequence.tokens)
            if not self.blocks.register(sequence.block_table[number], content):
                if len(self._replaced) >= MAX_REPLACED:
                    break
                self._exchange(sequence, number, content)
            sequence.num_registered = number + 1
        if len(self._replaced) > num_replaced and sequence.slot in self._decoding:
            self.groups.update(sequence.slot, sequence.block_table)
        if sequence.num_computed >= len(sequence.tokens) - 1:
            self._prefixes.registered(sequence)

    def _exchange(self, sequence: Sequence, number: int, content: PrefixBlock) -> None:
        """Hold the index's block instead of a sequence's own copy of the same content."""
        if sequence.slot is None:
            return  # It leaves, and gives up the copy.
        block = self.blocks.exchange(sequence.block_table[number], content)
        if block is not None:
            sequence.block_uses.pop(sequence.block_table[number], None)
            sequence.block_uses[block] = self.blocks.uses[block]
            sequence.block_table[number] = block
            self._replaced[sequence.slot, number] = block

    def registers(self, sequence: Sequence) -> bool:
        """Return whether a running sequence enters what it computes into the prefix index."""
        return self.prefix_cache and not self._prefixes.is_old(sequence)

    def is_intact(self, sequence: Sequence) -> bool:
        """Return whether everything that a sequence holds is still its own."""
        if not sequence.is_damaged:
            table, uses = sequence.block_table, sequence.block_uses
            sequence.is_damaged = not self.blocks.is_untouched(table, uses)
        return not sequence.is_damaged

    def end_quarantine(self) -> int:
        """Take blocks back into use that no running sequence can hold; return how many.

        Nobody who runs was given them; and what unanswered plans do with them, ranks do first.
        """
        first = min((sequence.admission for sequence in self.table.running()), default=None)
        return self.blocks.end_quarantine(first)

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix; return how many blocks that were. Who runs goes on."""
        self._prefixes.reset(self.num_admissions)
        return self.blocks.forget_all()

    # ------------------------------------------------------------------------------
    # Out

    def leave(self, sequence: Sequence) -> int:
        """Take slot and blocks from a sequence; return how many blocks nobody holds now."""
        self.prefilling.pop(sequence, None)
        self._draining.pop(sequence, None)
        self._prefixes.leave(sequence)
        self._stop_decoding(sequence)
        slot = self.table.give_back(sequence)
        self._leaves.append(slot)
        self._forget_replaced(slot)
        self.register(sequence)
        for token_id in sequence.stop_token_ids:
            self.stop_watch[token_id] -= 1
        freed = self._release_blocks(sequence)
        return freed + (self.end_quarantine() if self.blocks.num_quarantined else 0)

    def relieve(self) -> None:
        """Note that a running sequence has ended, which ends the caution after a preemption."""
        self._under_pressure = False

    def preempt(self, sequence: Sequence, draft: Draft, step_id: int) -> None:
        """Take slot and blocks from a sequence that will run again from its committed tokens."""
        assert sequence.slot is not None, f"preempted without a slot: {sequence.tell()}"
        draft.new_blocks.pop(sequence.slot, None)
        sequence.become(SequenceStatus.PREEMPTED, step_id)
        self._swap_out(sequence, draft)
        self.leave(sequence)
        sequence.num_planned = 0
        sequence.protected_until = len(sequence.tokens) + PROGRESS_TOKENS
        draft.preempted.append(sequence)
        self._under_pressure = True

    def _swap_out(self, sequence: Sequence, draft: Draft) -> None:
        """Move what is committed of a sequence to the host, where that is cheaper.

        Its blocks may be given out in the same plan: a rank moves before it computes.
        """
        count = self.blocks.blocks_for(sequence.num_computed)
        if self.swap.pays(sequence.num_computed, count, draft.cost) and self.is_intact(sequence):
            sequence.host_blocks = self.swap.move_out(sequence.block_table[:count])
            sequence.num_swapped = sequence.num_computed

    def forget_swapped(self, sequence: Sequence) -> None:
        """Give back the host blocks of a sequence that needs them no more, if it has any.

        The next plan's moves to the host come after this plan's moves from there.
        """
        self.swap.give_back(sequence.host_blocks)
        sequence.host_blocks = []
        sequence.num_swapped = 0

    def _reclaim(self, needy: Sequence, draft: Draft, step_id: int) -> bool:
        """Make sure that a block is free; False if that took the needy sequence's own."""
        while self.blocks.num_free == 0:
            if self._release_drained():
                continue
            candidates = [*self.prefilling, *self._decoding.values()]
            for candidate in candidates:
                self.table.sync(candidate)
            # Alone, a sequence always has enough: its length was cut to what the pool holds. Unless
            # blocks are lost or in quarantine: they come back at the latest when nobody runs.
            victim = choose_victim(candidates) or needy
            self.is_short |= len(candidates) == 1 and not self.blocks.num_quarantined
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
                assert sequence.slot is not None, f"drains without a slot: {sequence.tell()}"
                self.table.sync(sequence)
                self.register(sequence)
                self._release_blocks(sequence)
                self._forget_replaced(sequence.slot)
                return True
        return False

    def _forget_replaced(self, slot: int) -> None:
        """Keep from the ranks what they need not know of a slot that reads no block any more."""
        if self._replaced:
            self._replaced = {
                place: block for place, block in self._replaced.items() if place[0] != slot
            }

    def _release_blocks(self, sequence: Sequence) -> int:
        self.is_intact(sequence)  # looked at while it can be seen
        freed = self.blocks.release(sequence.block_table, sequence.block_uses)
        sequence.block_table, sequence.block_uses = [], {}
        return freed

    def _stop_decoding(self, sequence: Sequence) -> None:
        if sequence.slot is not None and self._decoding.pop(sequence.slot, None) is not None:
            self.groups.leave(sequence.slot)
            self._rows = None


def _join_params(sequence: Sequence) -> SamplingParams:
    """Return the parameters for the ranks: a prompt is scored once."""
    params = sequence.params
    if params.prompt_logprobs is None or sequence.wants_scores:
        return params
    return msgspec.structs.replace(params, prompt_logprobs=None)
