"""Makes plans: what the next step computes, and which slots and blocks that takes.

There is no prefill phase and no decode phase. Every sequence has known tokens, and planning lets
the positions planned catch up with them: a prompt by chunks, a decoding sequence by one, its
newest token. Decoding rows come first, because each is one token and somebody is reading; the
policy divides what they leave of the budget.

The planner looks at what is planned, never at results: it runs ahead of them. Only how long steps
took does it learn, where the policy has a target for that.
"""

import math
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from protocol.columns import pack_int32
from protocol.messages import StepPlan
from scheduler.planned_step import Chunk, Draft, PlannedStep
from scheduler.policy import PROMPT_PART, UNMEASURED_TOKENS, Order, Policy, prefill_key
from scheduler.running import Admission, Running
from scheduler.sequence import Sequence
from scheduler.slot_table import Rows
from scheduler.stats import Counters
from scheduler.step_cost import PAIRS, StepCost, StepCostModel, StepWork, chunk_pairs
from scheduler.waiting_queue import WaitingQueue

MAX_JOIN_BYTES = 4 << 20
"""What joins may take before a plan admits no further one; the longest sequence takes twice that,
and the rest of a plan what is left of MAX_FRAME_BYTES."""

MAX_SCORED_TOKENS = 4096
"""Tokens of sequences that want log-probabilities of their prompts that a step computes: their
results have to fit a frame, which other sequences' wait for."""

MAX_UNWILLING = 64
"""Waiting sequences that a plan passes over because they do better to wait."""


class Planned(NamedTuple):
    """A plan, and what is expected back for it."""

    plan: StepPlan
    step: PlannedStep


@dataclass(slots=True)
class _Room:
    """What is left of a step for prompts."""

    cost: StepCost | None
    num_pairs: float
    num_tokens: int = 0
    seconds: float = 0.0

    @property
    def is_empty(self) -> bool:
        return self.num_tokens <= 0 or self.seconds <= 0

    def take(self, start: int, most: int, *, at_least: int) -> int:
        """Take up to `most` tokens from position `start` on out of it; return how many."""
        count = min(most, self.num_tokens)
        if self.cost is not None and self.seconds < math.inf:
            count = min(count, self.cost.tokens_within(self.seconds, start))
            count = max(min(count, PAIRS.tokens_within(self.num_pairs, start)), at_least)
            self.seconds -= self.cost.chunk_seconds(start, count)
            self.num_pairs -= chunk_pairs(start, count)
        self.num_tokens -= count
        return count


class Planner:
    """Turns the queue and the running sequences into plans, one after the other."""

    def __init__(
        self, policy: Policy, running: Running, queue: WaitingQueue, counters: Counters
    ) -> None:
        self._policy = policy
        self._running = running
        self._table = running.table
        self._queue = queue
        self._counters = counters
        # The list that the ranks have. Every change makes a new one, a last chunk's included.
        self._sent_decodes: Rows | None = None
        self._model = StepCostModel()
        self._swap = running.swap
        self._wants_cost = policy.itl_target_s is not None or running.swap.num_blocks > 0

    def plan(self, step_id: int) -> Planned | None:
        """Return the next plan, or None if no sequence has anything to compute."""
        draft = Draft(cost=self._model.current())
        self._running.extend_tables(draft, step_id)
        for sequence in draft.preempted:
            self._queue.push(sequence)
        self._counters.preemptions += len(draft.preempted)
        if self._running.prefilling or self._queue:
            self._plan_chunks(draft, step_id)
        decodes = self._running.decode_rows()
        if not decodes and not draft.chunks:
            # What left stays in `running` until there is a plan to say so.
            return None
        step = self._expect(draft, decodes, step_id)
        plan = self._compose(draft, step)
        self._advance(step)
        return Planned(plan, step)

    def learn(self, step: PlannedStep, seconds: float) -> None:
        """Take note of how long the ranks had for a step."""
        if step.work is not None:
            self._model.observe(step.work, seconds)

    def _plan_chunks(self, draft: Draft, step_id: int) -> None:
        num_tokens, seconds = self._most_for_prompts(draft)
        room = _Room(draft.cost, self._model.trusted_pairs)
        draft.pending = {each: None for each in self._running.prefilling if each.num_pending}
        for share in self._policy.shares(num_tokens):
            if share.num_tokens <= 0:
                continue
            room.num_tokens += share.num_tokens
            room.seconds += seconds * share.num_tokens / num_tokens
            while not room.is_empty:
                num_moved = len(draft.swap_ins)
                sequence = self._next_to_prefill(draft, share.order, step_id)
                room.seconds -= self._swap.block_s * (len(draft.swap_ins) - num_moved)
                if sequence is None or self._grant(draft, sequence, room) == 0:
                    break
        self._counters.swapped_in += len(draft.swap_ins)

    def _most_for_prompts(self, draft: Draft) -> tuple[int, float]:
        """Return the tokens and the seconds of a step that prompts may take.

        Where nothing decodes, nobody's gap gets longer, and the target does not count.
        """
        num_tokens = self._policy.budget - self._running.num_decoding
        target_s, cost = self._policy.itl_target_s, draft.cost
        if target_s is None or not self._running.num_decoding:
            return num_tokens, math.inf
        if cost is None:
            return min(num_tokens, UNMEASURED_TOKENS), math.inf
        rows = self._running.decode_rows()
        trusted = max(self._model.trusted_tokens - len(rows), UNMEASURED_TOKENS)
        num_tokens = min(num_tokens, trusted)
        work = StepWork(len(rows), self._table.positions_read(rows), 0)
        taken_s = cost.seconds(work) + self._swap.block_s * self._swap.num_outs
        return num_tokens, max(target_s - taken_s, PROMPT_PART * target_s)

    def _next_to_prefill(self, draft: Draft, order: Order, step_id: int) -> Sequence | None:
        """Return the first sequence with pending tokens, admitting it if it waits."""
        first = min(draft.pending, key=lambda each: prefill_key(each, order), default=None)
        while not draft.admission_closed:
            waiting = self._next_to_admit(draft, order)
            if waiting is None or (
                first is not None and prefill_key(first, order) < prefill_key(waiting, order)
            ):
                return first
            if self._admit(waiting, draft, step_id):
                return waiting
        return first

    def _admit(self, sequence: Sequence, draft: Draft, step_id: int) -> bool:
        """Let a sequence run. If it cannot, nobody is admitted in this step any more; if it does
        better to wait, others are."""
        is_first = sequence.cached_tokens is None and not sequence.num_output_tokens
        is_swapped = sequence.num_swapped > 0
        if draft.join_bytes >= MAX_JOIN_BYTES:
            draft.admission_closed = True
            return False
        match self._running.admit(sequence, draft, step_id):
            case Admission.ADMITTED:
                self._queue.admit(sequence, draft.pending, draft.unwilling)
                draft.pending[sequence] = None
                self._count_lookup(sequence, is_first=is_first, is_swapped=is_swapped)
                return True
            case Admission.UNWILLING:
                draft.unwilling[sequence] = None
                draft.admission_closed = len(draft.unwilling) >= MAX_UNWILLING
            case Admission.NO_ROOM:
                draft.admission_closed = True
        return False

    def _count_lookup(self, sequence: Sequence, *, is_first: bool, is_swapped: bool) -> None:
        # Of what is moved back from the host, only what needed no moving was found.
        num_found = sequence.num_computed if is_swapped else sequence.num_planned
        # What ran before finds its own blocks again, which says nothing of how prompts share.
        if is_first:
            self._counters.lookup_tokens += len(sequence.tokens)
            self._counters.cached_tokens += num_found
        else:
            self._counters.resumed_lookup_tokens += len(sequence.tokens)
            self._counters.resumed_cached_tokens += num_found

    def _next_to_admit(self, draft: Draft, order: Order) -> Sequence | None:
        """Return who is to be admitted next: who waits for blocks goes before all behind it."""
        first = self._queue.first(Order.ARRIVAL, draft.unwilling)
        blocked = self._running.denied.waits
        if first is None or order is Order.ARRIVAL:
            return first
        if blocked and blocked not in draft.unwilling and blocked.urgency >= first.urgency:
            return blocked
        return self._queue.first(order, draft.unwilling)

    def _grant(self, draft: Draft, sequence: Sequence, room: _Room) -> int:
        """Plan as many of a sequence's pending tokens as there is room for; return how many."""
        slot = sequence.slot
        assert slot is not None, f"prefills without a slot: {sequence.tell()}"
        chunk = draft.chunks.get(slot)
        # A join comes with its first chunk, so no chunk is empty.
        most, at_least = sequence.num_pending, int(chunk is None)
        if sequence.wants_scores:
            most = min(most, max(MAX_SCORED_TOKENS - draft.num_scored, at_least))
        count = room.take(sequence.num_planned, most, at_least=at_least)
        if chunk is None:
            generation = int(self._table.generation[slot])
            chunk = Chunk(sequence, slot, generation, start=sequence.num_planned)
            draft.chunks[slot] = chunk
        chunk.count += count
        sequence.num_planned += count
        chunk.last = sequence.num_pending == 0
        if sequence.wants_scores:
            draft.num_scored += count
        if chunk.last or (sequence.wants_scores and draft.num_scored >= MAX_SCORED_TOKENS):
            draft.pending.pop(sequence, None)
        return count

    def _expect(self, draft: Draft, decodes: Rows, step_id: int) -> PlannedStep:
        chunks = list(draft.chunks.values())
        last_slots = [chunk.slot for chunk in chunks if chunk.last]
        sampled = decodes
        if last_slots:
            sampled = self._table.rows(np.append(decodes.slots, last_slots))
        counts = decodes.ones + pack_int32(int(chunk.last) for chunk in chunks)
        work = None
        # A step that moves blocks as well says nothing of what computing costs.
        is_plain = not self._swap.num_outs and not draft.swap_ins
        if self._wants_cost and is_plain:
            num_tokens = len(decodes) + sum(chunk.count for chunk in chunks)
            pairs = sum(chunk_pairs(chunk.start, chunk.count) for chunk in chunks)
            work = StepWork(num_tokens, self._table.positions_read(decodes), pairs)
        return PlannedStep(step_id, decodes, chunks, sampled, counts, self._table.changes, work)

    def _compose(self, draft: Draft, step: PlannedStep) -> StepPlan:
        leaves = self._running.take_leaves()
        # Ranks never edit their list: it is sent whole whenever somebody has come or gone.
        is_known = step.decodes is self._sent_decodes and not leaves and len(step.decodes) > 0
        new_blocks = self._running.take_replaced()
        new_blocks += [(slot, *grown) for slot, grown in draft.new_blocks.items()]
        swap_outs = self._swap.take_outs()
        self._counters.swapped_out += len(swap_outs)
        chunks = ((each.slot, each.start, each.count, int(each.last)) for each in step.chunks)
        return StepPlan(
            step_id=step.step_id,
            leaves=pack_int32(leaves),
            joins=draft.joins,
            copies=_pack_pairs(draft.copies),
            swap_outs=_pack_pairs(swap_outs),
            swap_ins=_pack_pairs(draft.swap_ins),
            new_blocks=pack_int32(chain.from_iterable(new_blocks)),
            decode=None if is_known else step.decodes.column(),
            chunks=pack_int32(chain.from_iterable(chunks)),
            groups=self._running.groups.take(),
        )

    def _advance(self, step: PlannedStep) -> None:
        """Take everything the step will have done as done."""
        self._sent_decodes = step.decodes
        self._table.length[step.decodes.slots] += 1
        for chunk in step.chunks:
            self._table.length[chunk.slot] += chunk.count
            self._counters.prefill_tokens += chunk.count
            chunk.sequence.note(f"chunk[{chunk.start}:{chunk.end}]", step.step_id)
            if chunk.last:
                self._running.prefilled(chunk.sequence, step.step_id)


def _pack_pairs(pairs: list[tuple[int, int]]) -> bytes:
    # Nearly always there are none, and a steady step is to cost nothing for them.
    return pack_int32(chain.from_iterable(pairs)) if pairs else b""
