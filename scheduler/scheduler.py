"""Which sequences run, what the next step computes, and what its result means.

The scheduler plans ahead of the ranks: up to `max_in_flight` plans may be unanswered. A decoding
sequence gets a row in every plan although its newest token is not known here yet; the ranks feed
it on themselves. So two views of a sequence live side by side: what is *planned* (the slot table's
lengths; decides which blocks and rows the next plan needs) and what is *committed* (the tokens;
decides what is shown, cached and resumed from). Ending a sequence raises its slot's generation,
and whatever the unanswered plans still bring for it is dropped.

No I/O, no clock, no randomness: the process around it (`scheduler.process`) has those.
"""

import math
from array import array
from collections import deque
from typing import NamedTuple

from protocol.errors import ErrorCode, ProtocolError, RequestError
from protocol.messages import (
    AbortAck,
    AbortState,
    AddSequence,
    CacheStats,
    EngineFacts,
    FinishReason,
    QueuePositions,
    StepPlan,
    StepResult,
)
from protocol.validation import longest_sequence, validate_sequence
from scheduler.block_manager import BlockManager
from scheduler.committer import Committer
from scheduler.deltas import Addressed, Ending, ending_deltas, resumed_deltas
from scheduler.planned_step import PlannedStep
from scheduler.planner import Planner
from scheduler.policy import Policy
from scheduler.prefix import PrefixChain, PrefixHasher, TokenArray
from scheduler.queue_positions import MAX_POSITIONS, position_reports
from scheduler.roster import Roster
from scheduler.running import Running
from scheduler.self_check import SelfCheck
from scheduler.sequence import Sequence, SequenceKey, SequenceStatus
from scheduler.slot_table import SlotTable
from scheduler.stats import Counters
from scheduler.swap_space import SwapSpace
from scheduler.waiting_queue import WaitingQueue


class Checked(NamedTuple):
    """What a self-check has found, and what frontends are to be told."""

    problems: list[str]
    """A sentence each; every one is our bug."""
    deltas: list[Addressed]


class Scheduler:
    """The core: sequences in, plans out; results in, tokens out.

    Invariants, checked by `check_invariants`: a block is free or held or in quarantine, and held by
    exactly the sequences whose tables name it; a registered block's content is what its key says;
    every live sequence is in the waiting queue or has a slot; step ids have no gaps; a sequence has
    exactly one terminal reason.
    """

    def __init__(
        self,
        facts: EngineFacts,
        policy: Policy,
        *,
        max_in_flight: int,
        prefix_key: bytes | None,
        max_waiting_requests: int,
        max_waiting_tokens: int,
    ) -> None:
        """Build for a group's facts. `prefix_key` None turns the prefix cache off."""
        self.counters = Counters()
        self._facts = facts
        self._max_in_flight = max_in_flight
        self._hasher = PrefixHasher(prefix_key or b"")
        self.block_manager = BlockManager(facts.num_blocks, facts.block_size, self.counters)
        # Every running sequence may have a row in every step, so there are no more of them than
        # the budget has tokens.
        self._table = SlotTable(min(facts.slots, policy.budget))
        self.swap_space = SwapSpace(facts.host_blocks, facts.swap_block_s)
        self._running = Running(
            self._table,
            self.block_manager,
            self.swap_space,
            facts.vocab_size,
            prefix_cache=prefix_key is not None,
        )
        self._queue = WaitingQueue(max_waiting_requests, max_waiting_tokens)
        self._roster = Roster()
        self._arrivals = 0
        self._unanswered: deque[PlannedStep] = deque()
        self._last_step_id = 0
        self._planner = Planner(policy, self._running, self._queue, self.counters)
        self._committer = Committer(self._running, self.counters)
        self._self_check = SelfCheck(self._running, self._queue, self._roster, self._hasher)

    # ------------------------------------------------------------------------------
    # How things are

    @property
    def waiting_requests(self) -> int:
        """Sequences that wait, preempted ones included."""
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        """Tokens those have to prefill."""
        return self._queue.num_tokens

    @property
    def admitted_tokens(self) -> int:
        """Tokens that have waited and been admitted since the start."""
        return self._queue.admitted_tokens

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return self._table.num_running

    def running_sequences(self) -> list[Sequence]:
        """Return the sequences that have a slot, their tokens up to date."""
        running = self._table.running()
        for sequence in running:
            self._table.sync(sequence)
        return running

    @property
    def num_unanswered(self) -> int:
        """Plans that are sent and not yet committed."""
        return len(self._unanswered)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self.block_manager.num_free

    def cache_stats(self) -> CacheStats:
        """Return what the prefix cache has done since the start, and how it is now."""
        counters, blocks = self.counters, self.block_manager
        return CacheStats(
            lookup_tokens=counters.lookup_tokens,
            cached_tokens=counters.cached_tokens,
            resumed_lookup_tokens=counters.resumed_lookup_tokens,
            resumed_cached_tokens=counters.resumed_cached_tokens,
            shared_blocks=counters.shared_blocks,
            revived_blocks=counters.revived_blocks,
            evicted_blocks=counters.evicted_blocks,
            indexed_blocks=blocks.num_indexed,
            free_blocks=blocks.num_free,
            cached_blocks=blocks.num_cached,
            quarantined_blocks=blocks.num_quarantined,
            quarantines=counters.quarantines,
        )

    @property
    def num_live(self) -> int:
        """Sequences without a terminal reason yet."""
        return len(self._roster)

    @property
    def last_step_id(self) -> int:
        """Id of the newest plan; 0 before the first."""
        return self._last_step_id

    def queue_positions(self) -> list[tuple[bytes, QueuePositions]]:
        """Return what frontends are to be told of where their sequences wait."""
        return position_reports(self._queue.take_places(MAX_POSITIONS))

    def next_deadline(self) -> float | None:
        """Return when `expire` has something to do, or None."""
        return self._roster.next_deadline()

    # ------------------------------------------------------------------------------
    # Sequences come and go

    def add(self, source: bytes, message: AddSequence) -> list[Addressed]:
        """Take a sequence; return what its frontend can be told at once.

        That is nothing, except for a resumed sequence whose frontend lacks committed tokens or
        which turns out to have ended. Raises RequestError for one that cannot be taken.
        """
        resumed = _check(message, self._facts)
        key = SequenceKey(source, message.request_id, message.sample)
        self._roster.check_new(key)
        tokens = array("i", message.prompt_ids)
        num_prompt_tokens = len(tokens)
        tokens.extend(resumed)
        if not resumed:
            self._queue.check_room(len(tokens), key.request)
        room = longest_sequence(self._facts)
        sequence = Sequence(
            key=key,
            tokens=tokens,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=min(num_prompt_tokens + (message.params.max_tokens or room), room),
            params=message.params,
            stop_token_ids=frozenset(message.params.stop_token_ids),
            chain=PrefixChain(self._hasher, message.cache_domain, self._facts.block_size),
            arrival=self._arrivals,
            priority=message.priority,
            deadline=message.deadline,
        )
        self._arrivals += 1
        self._roster.add(sequence)
        self._queue.push(sequence)
        if not resumed:
            return []
        reason = sequence.natural_end()
        if reason is not None:
            self._finish(sequence)
        return resumed_deltas(sequence, message.next_index, reason)

    def abort(self, source: bytes, request_id: int, sample: int) -> AbortAck:
        """End a sequence (-1: all samples of a request) that its frontend no longer wants.

        Its frontend hears nothing more of it after the AbortAck.
        """
        live = self._roster.find(source, request_id, sample)
        blocks_returned = sum(self._finish(sequence) for sequence in live)
        state = AbortState.LIVE
        if not live:
            state = self._roster.past_state(source, request_id, sample)
        return AbortAck(
            request_id=request_id, sample=sample, state=state, blocks_returned=blocks_returned
        )

    def drop_source(self, source: bytes) -> int:
        """End every sequence of a frontend that is gone; return how many there were."""
        live = self._roster.of_source(source)
        for sequence in live:
            self._finish(sequence)
        return len(live)

    def expire(self, now: float) -> list[Addressed]:
        """End the sequences whose deadline has come; `now` is on the clock of the deadlines."""
        endings = [Ending(each, FinishReason.TIMEOUT) for each in self._roster.expired(now)]
        return self._end(endings)

    def _end(self, endings: list[Ending]) -> list[Addressed]:
        if not endings:
            return []
        for ending in endings:
            self._finish(ending.sequence)
        return ending_deltas(endings)

    def _finish(self, sequence: Sequence) -> int:
        """Take a sequence out of everything; return how many blocks became free."""
        was_running = sequence.is_running
        sequence.become(SequenceStatus.FINISHED, self._last_step_id)
        self._roster.finish(sequence)
        self.counters.finished += 1
        if not was_running:
            self._queue.remove(sequence)
            self._running.forget_swapped(sequence)
            return 0
        self._running.relieve()
        return self._running.leave(sequence)

    def reset_prefix_cache(self) -> int:
        """Make sure that nothing computed so far is ever found again; return the blocks forgotten.

        Running sequences go on unharmed.
        """
        return self._running.reset_prefix_cache()

    # ------------------------------------------------------------------------------
    # Steps

    @property
    def has_rows(self) -> bool:
        """Whether running sequences have anything to compute that is not planned yet."""
        return self._running.has_rows

    def schedule(self) -> StepPlan | None:
        """Return the next plan, or None: nothing to compute, or too many plans unanswered."""
        if len(self._unanswered) >= self._max_in_flight:
            return None
        planned = self._planner.plan(self._last_step_id + 1)
        if planned is None:
            return None
        self._last_step_id = planned.step.step_id
        self._unanswered.append(planned.step)
        return planned.plan

    def commit(self, result: StepResult, seconds: float = 0.0) -> list[Addressed]:
        """Take rank 0's result of the oldest unanswered plan, once every rank has answered it.

        `seconds` are those that the ranks had for it; 0: not known.
        Raises ProtocolError for a result that does not belong to that plan.
        """
        if not self._unanswered or self._unanswered[0].step_id != result.step_id:
            expected = self._unanswered[0].step_id if self._unanswered else "none"
            raise ProtocolError(f"A result of step {result.step_id} came; expected: {expected}.")
        step = self._unanswered[0]
        committed = self._committer.commit(step, result, self._facts.vocab_size)
        self._unanswered.popleft()
        self._planner.learn(step, seconds)
        for sequence in committed.ended:
            self._finish(sequence)
        return committed.deltas

    # ------------------------------------------------------------------------------
    # Self-check

    def audit(self) -> list[str]:
        """Return one sentence for everything that does not fit together."""
        return self._self_check.audit()

    @property
    def has_stumbled(self) -> bool:
        """Whether something has turned out not to fit together: then `check` is to be called."""
        return self.block_manager.has_stumbled or self._running.is_short

    def check(self) -> Checked:
        """Look at everything, take out of use what is wrong, and end alone whom that may harm."""
        problems, harmed = self._self_check.repair()
        deltas = self._end([Ending(sequence, ErrorCode.INTERNAL) for sequence in harmed])
        if self.block_manager.num_quarantined:
            self._running.end_quarantine()
        return Checked(problems, deltas)

    def check_invariants(self) -> None:
        """Assert that `audit` finds nothing."""
        problems = self.audit()
        assert not problems, "; ".join(problems)


def _check(message: AddSequence, facts: EngineFacts) -> TokenArray:
    """Return the tokens to resume from. Raises RequestError for what cannot be run."""
    validate_sequence(message.prompt_ids, message.params, facts)
    resumed = array("i", message.resume_ids)
    most = message.params.max_tokens or 0
    if len(resumed) > most or message.next_index > len(resumed):
        raise RequestError(
            ErrorCode.INVALID_REQUEST,
            f"resume_ids has {len(resumed)} tokens, of at most {most}, and next_index is "
            f"{message.next_index}; it must not be more than the tokens there are.",
            param="resume_ids",
        )
    if resumed and not 0 <= min(resumed) <= max(resumed) < facts.vocab_size:
        raise RequestError(
            ErrorCode.INVALID_REQUEST,
            f"resume_ids holds an id outside 0 to {facts.vocab_size - 1}.",
            param="resume_ids",
        )
    if message.deadline is not None and math.isnan(message.deadline):
        raise RequestError(ErrorCode.INVALID_REQUEST, "deadline is not a number.", param="deadline")
    return resumed
