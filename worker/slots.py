"""The host's mirror of what plans say about each slot.

Everything a rank knows of a sequence it learns here: generation, tokens, parameters, blocks and
length follow from plans alone, so all ranks hold the same table after the same plans. A plan that
does not fit the table means that scheduler and rank disagree; that is fatal, never repaired. The
table knows neither device nor model, and it does not know sampled tokens: those are the back
end's.

             known tokens (from the Join)            sampled by this rank
    ├───────────── chunks ─────────────────┤├──────────── decode ───────────┤
    0                                  known                             length
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import Join, SamplingParams, StepPlan
from protocol.sampling import sampling
from worker.prefix_groups import find_fault
from worker.step_rows import Chunk, Int32Array, StepRows, int32_view

NEVER = np.int32(2**31 - 1)
"""Known tokens of a free slot: no length reaches it, so no decode row of it passes."""


class SlotTable:
    """Applies plans, in order, to `slots` rows of persistent state. Others only read it.

    Invariants: a slot is free (`params[slot] is None`) or in use; `lengths <= capacities`; a slot
    decodes only once its length has reached its known tokens.
    """

    def __init__(
        self,
        *,
        slots: int,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        vocab_size: int,
        host_blocks: int = 0,
    ) -> None:
        self._num_slots = slots
        self._num_host_blocks = host_blocks
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size

        max_blocks = -(-max_model_len // block_size)
        self.block_tables: Int32Array = np.full((slots, max_blocks), -1, dtype=np.int32)
        """[slots, max_blocks] blocks in order; -1 where there is none."""
        self.num_blocks_held: Int32Array = np.zeros(slots, dtype=np.int32)
        """[slots]"""
        self.lengths: Int32Array = np.zeros(slots, dtype=np.int32)
        """[slots] tokens whose KV is written once every plan so far has run."""
        self.generations: NDArray[np.int64] = np.full(slots, -1, dtype=np.int64)
        """[slots] of the last join; -1 before the first."""
        self.prompt_lens: Int32Array = np.zeros(slots, dtype=np.int32)
        """[slots]"""
        self.params: list[SamplingParams | None] = [None] * slots
        """[slots] None: the slot is free."""
        self.token_ids: list[Int32Array] = [int32_view(b"")] * slots
        """[slots] prompt, then output committed before the join; empty for a free slot."""

        self._known: Int32Array = np.full(slots, NEVER, dtype=np.int32)
        self._capacities: Int32Array = np.zeros(slots, dtype=np.int32)
        self._failed: dict[int, ErrorCode] = {}
        self._step_id = 0
        self._decode_slots: Int32Array = int32_view(b"")
        self._decode_rows: Int32Array = int32_view(b"")
        self._groups: Int32Array = int32_view(b"").reshape(-1, 3)

    def apply(self, plan: StepPlan) -> StepRows:
        """Apply a plan's leaves, joins, moves, copies and new blocks; return the step's rows.

        Raises ProtocolError naming step and slot when the plan does not fit the table. The table
        is then of no further use.
        """
        self._step_id = plan.step_id
        leaves = int32_view(plan.leaves)
        copies = int32_view(plan.copies).reshape(-1, 2)
        swap_outs = int32_view(plan.swap_outs).reshape(-1, 2)
        swap_ins = int32_view(plan.swap_ins).reshape(-1, 2)
        new_blocks = int32_view(plan.new_blocks).reshape(-1, 3)
        chunk_rows: list[list[int]] = int32_view(plan.chunks).reshape(-1, 4).tolist()

        self._leave(leaves.tolist())
        self._join(plan.joins, {slot: start for slot, start, _, _ in chunk_rows})
        self._check_blocks("a block copy", copies.ravel())
        self._check_swaps(swap_outs[:, 0], swap_outs[:, 1])
        self._check_swaps(swap_ins[:, 1], swap_ins[:, 0])
        self._extend(new_blocks)

        if plan.decode is not None:
            self._set_decode_list(int32_view(plan.decode))
        if plan.groups is not None:
            self._groups = int32_view(plan.groups).reshape(-1, 3)
        if plan.groups is not None or plan.decode is not None:
            self._check_groups()
        positions = self._advance_decode()
        num_decode = len(self._decode_slots)
        chunks = self._advance_chunks(chunk_rows, first_row=num_decode)
        if num_decode + len(chunks) == 0:
            raise ProtocolError(f"step {plan.step_id} has no rows; such a plan is never sent")

        rows = StepRows(
            step_id=plan.step_id,
            num_rows=num_decode + len(chunks),
            leaves=leaves,
            joins=tuple(join.slot for join in plan.joins),
            copies=copies,
            swap_outs=swap_outs,
            swap_ins=swap_ins,
            new_blocks=new_blocks,
            decode_rows=self._decode_rows,
            decode_slots=self._decode_slots,
            decode_positions=positions,
            chunks=chunks,
            failures={},
        )
        return self._without_failed(rows) if self._failed else rows

    def fail(self, slot: int, code: ErrorCode) -> None:
        """Answer `code` for every later row of this slot, uncomputed, until it leaves."""
        assert self.params[slot] is not None, f"slot {slot} failed but is free"
        self._failed.setdefault(slot, code)

    # --------------------------------------------------------------------------
    # Deltas

    def _leave(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._check_slot(slot, "leaves")
            if self.params[slot] is None:
                self._refuse(slot, "leaves but is free")
            self.block_tables[slot, : self.num_blocks_held[slot]] = -1
            self.num_blocks_held[slot] = 0
            self.lengths[slot] = 0
            self.prompt_lens[slot] = 0
            self.params[slot] = None
            self.token_ids[slot] = int32_view(b"")
            self._known[slot] = NEVER
            self._capacities[slot] = 0
            self._failed.pop(slot, None)

    def _join(self, joins: Sequence[Join], chunk_starts: dict[int, int]) -> None:
        for join in joins:
            slot = join.slot
            self._check_slot(slot, "joins")
            if self.params[slot] is not None:
                self._refuse(slot, "joins but is in use")
            if join.generation <= self.generations[slot]:
                self._refuse(
                    slot,
                    f"joins with generation {join.generation}, not above the last one, "
                    f"{self.generations[slot]}",
                )
            start = chunk_starts.get(slot)
            if start is None:
                self._refuse(slot, "joins without its first chunk")
            if start < 0:
                self._refuse(slot, f"joins with its first chunk at {start}")
            if join.params.seed is None and sampling(join.params).temperature > 0:
                self._refuse(slot, "joins without a seed for its sampling")
            self.params[slot] = join.params
            self.generations[slot] = join.generation
            self.lengths[slot] = start
            self._take_tokens(slot, join)
            self._take_blocks(slot, int32_view(join.block_table))

    def _take_tokens(self, slot: int, join: Join) -> None:
        token_ids = int32_view(join.token_ids)
        count = len(token_ids)
        if not join.prompt_len <= count <= self._max_model_len:
            self._refuse(
                slot,
                f"joins with {count} tokens; legal are its prompt's {join.prompt_len} "
                f"to max_model_len {self._max_model_len}",
            )
        if token_ids.min() < 0 or token_ids.max() >= self._vocab_size:
            self._refuse(slot, f"joins with a token id outside 0 to {self._vocab_size - 1}")
        self.token_ids[slot] = token_ids
        self.prompt_lens[slot] = join.prompt_len
        self._known[slot] = count

    def _take_blocks(self, slot: int, blocks: Int32Array) -> None:
        held = len(blocks)
        if held > self.block_tables.shape[1]:
            self._refuse(slot, f"joins with {held} blocks of {self.block_tables.shape[1]} at most")
        self._check_blocks(f"the block table of slot {slot}", blocks)
        self.block_tables[slot, :held] = blocks
        self.num_blocks_held[slot] = held
        self._set_capacity(slot, held)

    def _extend(self, new_blocks: Int32Array) -> None:
        entries: list[list[int]] = new_blocks.tolist()
        for slot, index, block in entries:
            self._check_slot(slot, "gets a new block")
            if self.params[slot] is None:
                self._refuse(slot, "gets a new block but is free")
            held = int(self.num_blocks_held[slot])
            if not 0 <= index <= held:
                self._refuse(slot, f"gets a new block at index {index} but holds {held}")
            if index >= self.block_tables.shape[1]:
                self._refuse(slot, f"gets more than {self.block_tables.shape[1]} blocks")
            if not 0 <= block < self._num_blocks:
                self._refuse(slot, f"gets block {block}; blocks are 0 to {self._num_blocks - 1}")
            length = int(self.lengths[slot])
            if index < held and length < (index + 1) * self._block_size:
                # It will write there, and nothing that it writes may lie in two tables.
                self._refuse(
                    slot, f"gets another block at index {index} but its length is {length}"
                )
            self.block_tables[slot, index] = block
            if index == held:
                self.num_blocks_held[slot] = held + 1
                self._set_capacity(slot, held + 1)

    def _set_capacity(self, slot: int, held: int) -> None:
        self._capacities[slot] = min(held * self._block_size, self._max_model_len)

    # --------------------------------------------------------------------------
    # Rows

    def _set_decode_list(self, slots: Int32Array) -> None:
        if len(slots):
            lowest, highest = int(slots.min()), int(slots.max())
            self._check_slot(lowest, "decodes")
            self._check_slot(highest, "decodes")
            uses = np.bincount(slots)
            if uses.max() > 1:
                self._refuse(int(uses.argmax()), "decodes twice")
        self._decode_slots = slots
        self._decode_rows = np.arange(len(slots), dtype=np.int32)

    def _check_groups(self) -> None:
        if len(self._groups):
            fault = find_fault(
                self._groups, self._decode_slots, self.lengths, self.block_tables, self._block_size
            )
            if fault is not None:
                self._refuse(fault.slot, fault.what)

    def _advance_decode(self) -> Int32Array:
        """Return the positions of the decode rows and add one to their lengths."""
        slots = self._decode_slots
        positions = self.lengths[slots]
        wrong = (positions < self._known[slots]) | (positions >= self._capacities[slots])
        if wrong.any():
            slot = int(slots[wrong.argmax()])
            position = int(self.lengths[slot])
            if self.params[slot] is None:
                self._refuse(slot, "decodes but is free")
            if position < self._known[slot]:
                self._refuse(
                    slot, f"decodes with {position} of its {self._known[slot]} tokens computed"
                )
            self._refuse_position(slot, position)
        self.lengths[slots] = positions + np.int32(1)
        return positions

    def _advance_chunks(
        self, chunk_rows: Sequence[Sequence[int]], first_row: int
    ) -> tuple[Chunk, ...]:
        chunks: list[Chunk] = []
        seen: set[int] = set()
        for row, (slot, start, count, last) in enumerate(chunk_rows, start=first_row):
            self._check_slot(slot, "has a chunk")
            if slot in seen:
                self._refuse(slot, "has two chunks")
            seen.add(slot)
            if self.params[slot] is None:
                self._refuse(slot, "has a chunk but is free")
            if start != self.lengths[slot]:
                self._refuse(slot, f"has a chunk at {start} but its length is {self.lengths[slot]}")
            known = int(self._known[slot])
            end = start + count
            if count < 1 or end > known:
                self._refuse(slot, f"has a chunk of {count} at {start} but knows {known} tokens")
            if last != int(end == known):
                self._refuse(slot, f"has a chunk to {end} of {known} tokens marked last={last}")
            if end > self._capacities[slot]:
                self._refuse_position(slot, end - 1)
            self.lengths[slot] = end
            chunks.append(
                Chunk(
                    row=row,
                    slot=slot,
                    start=start,
                    token_ids=self.token_ids[slot][start:end],
                    is_last=end == known,
                )
            )
        return tuple(chunks)

    def _without_failed(self, rows: StepRows) -> StepRows:
        """Move the rows of failed slots from what is computed to what is answered."""
        failures: dict[int, ErrorCode] = {}
        keep = np.ones(len(rows.decode_slots), dtype=np.bool_)
        for row, slot in enumerate(rows.decode_slots.tolist()):
            if slot in self._failed:
                failures[row] = self._failed[slot]
                keep[row] = False
        chunks: list[Chunk] = []
        for chunk in rows.chunks:
            if chunk.slot in self._failed:
                failures[chunk.row] = self._failed[chunk.slot]
            else:
                chunks.append(chunk)
        return replace(
            rows,
            decode_rows=rows.decode_rows[keep],
            decode_slots=rows.decode_slots[keep],
            decode_positions=rows.decode_positions[keep],
            chunks=tuple(chunks),
            failures=failures,
        )

    # --------------------------------------------------------------------------
    # Refusals

    def _check_slot(self, slot: int, what: str) -> None:
        if not 0 <= slot < self._num_slots:
            self._refuse(slot, f"{what}; slots are 0 to {self._num_slots - 1}")

    def _check_blocks(self, what: str, blocks: Int32Array) -> None:
        if len(blocks) and (blocks.min() < 0 or blocks.max() >= self._num_blocks):
            raise ProtocolError(
                f"step {self._step_id}: {what} names a block outside 0 to {self._num_blocks - 1}"
            )

    def _check_swaps(self, blocks: Int32Array, host_blocks: Int32Array) -> None:
        self._check_blocks("a move to or from the host", blocks)
        if len(host_blocks) and not (
            0 <= host_blocks.min() <= host_blocks.max() < self._num_host_blocks
        ):
            raise ProtocolError(
                f"step {self._step_id}: a move names a host block that is not below "
                f"{self._num_host_blocks}"
            )

    def _refuse_position(self, slot: int, position: int) -> NoReturn:
        self._refuse(
            slot,
            f"computes position {position} but holds {self.num_blocks_held[slot]} blocks of "
            f"{self._block_size}, and max_model_len is {self._max_model_len}",
        )

    def _refuse(self, slot: int, what: str) -> NoReturn:
        raise ProtocolError(f"step {self._step_id}: slot {slot} {what}")
