"""One replica: the real scheduler, and ranks that take the time a cost model says.

The virtual clock is the caller's: it asks for `next_event` and calls `advance` with that time.
Ranks execute plans one after the other; as in the engine up to two are under way, so the
scheduler's work and the hops are hidden behind a step that takes longer than they do.
"""

from array import array
from collections import deque
from typing import NamedTuple

import numpy as np

from benchmarks.simulation.card import Card
from benchmarks.simulation.latencies import Latencies
from benchmarks.simulation.trace import TraceRequest
from protocol.columns import pack_int32
from protocol.messages import AddSequence, EngineFacts, SamplingParams, StepPlan, StepResult
from scheduler.gathering import Gathering
from scheduler.policy import Policy
from scheduler.scheduler import Scheduler
from scheduler.step_cost import StepWork, chunk_pairs

VOCAB_SIZE = 151_936
BLOCK_SIZE = 64
MAX_IN_FLIGHT = 2
_SOURCE = b"trace"
NEVER = float("inf")


class Outcome:
    """What the requests of one or more replicas got, in seconds."""

    def __init__(self) -> None:
        self.first_token = Latencies()
        self.gap = Latencies()
        self.finished = 0
        self.output_tokens = 0
        self.cached_tokens = 0
        self.preemptions = 0
        self.steps = 0
        self.end_s = 0.0

    def merge(self, other: "Outcome") -> None:
        """Count another replica's requests too."""
        self.first_token.merge(other.first_token)
        self.gap.merge(other.gap)
        self.finished += other.finished
        self.output_tokens += other.output_tokens
        self.cached_tokens += other.cached_tokens
        self.preemptions += other.preemptions
        self.steps += other.steps
        self.end_s = max(self.end_s, other.end_s)


class _Answer(NamedTuple):
    """A step's result, and when the scheduler has it."""

    at: float
    result: StepResult


class Replica:
    """The scheduler's core and its ranks."""

    def __init__(
        self,
        card: Card,
        policy: Policy,
        *,
        max_num_seqs: int,
        max_model_len: int,
        prefix_cache: bool,
    ) -> None:
        facts = EngineFacts(
            rank=0,
            back_end="simulated",
            block_size=BLOCK_SIZE,
            num_blocks=card.cache_tokens // BLOCK_SIZE,
            slots=max_num_seqs,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
        )
        self.scheduler = Scheduler(
            facts,
            policy,
            max_in_flight=MAX_IN_FLIGHT,
            prefix_key=b"simulation" if prefix_cache else None,
            max_waiting_requests=2**20,
            max_waiting_tokens=2**31,
        )
        self.outcome = Outcome()
        self.num_live = 0
        self.totals = np.zeros(4)
        """Steps, tokens, positions read and pairs: what a cost's coefficients multiply."""
        self._card = card
        self._gathering = Gathering(budget=policy.budget, patience_s=policy.gather_s)
        self._ranks = _Ranks(max_num_seqs)
        self._answers: deque[_Answer] = deque()
        self._free_at = 0.0
        # When the oldest unanswered step began, as far as the scheduler can tell.
        self._began = 0.0
        self._last_token_at = np.zeros(1_024)
        # What a request's entry in `_last_token_at` is until its first token: minus its arrival.
        self._names: list[int] = list(range(1_023, -1, -1))

    def add(self, request: TraceRequest, number: int, now: float) -> None:
        """Take a request; `number` tells its prompt from all others."""
        name = self._take_name()
        self._last_token_at[name] = -request.arrival_s
        self.num_live += 1
        params = SamplingParams(seed=0, max_tokens=request.num_output_tokens)
        prompt = prompt_ids(request, number)
        self.scheduler.add(
            _SOURCE, AddSequence(request_id=name, sample=0, prompt_ids=prompt, params=params)
        )
        self._plan(now)

    def next_event(self) -> float:
        """Return when `advance` has something to do; infinity: not before another request."""
        if self._answers:
            return self._answers[0].at
        deadline = self._gathering.deadline
        return NEVER if deadline is None else deadline

    def advance(self, now: float) -> None:
        """Do what is due at the time of the next event."""
        if self._answers and self._answers[0].at <= now:
            result = self._answers.popleft().result
            for _, deltas in self.scheduler.commit(result, now - self._began):
                self._note(deltas.requests, deltas.reasons, now)
            self._began = now
        self._plan(now)

    def finish(self) -> Outcome:
        """Return the outcome, once nothing is left to do."""
        counters = self.scheduler.counters
        self.outcome.cached_tokens = counters.cached_tokens
        self.outcome.preemptions = counters.preemptions
        self.outcome.steps = counters.steps
        return self.outcome

    def _plan(self, now: float) -> None:
        scheduler = self.scheduler
        while not self._gathering.waits(
            now,
            waiting_tokens=scheduler.waiting_tokens,
            has_rows=scheduler.has_rows,
            is_computing=bool(self._answers),
        ):
            plan = scheduler.schedule()
            if plan is None:
                return
            work, result = self._ranks.execute(plan)
            self.totals += (1, *work)
            if not self._answers:
                self._began = now
            starts = max(self._free_at, now + self._card.hop_s)
            self._free_at = starts + self._card.cost.seconds(work)
            self._answers.append(_Answer(self._free_at + self._card.hop_s, result))

    def _note(self, requests: bytes, reasons: bytes, now: float) -> None:
        names = np.frombuffer(requests, np.int64)
        ended = np.frombuffer(reasons, np.int32)
        outcome, last = self.outcome, self._last_token_at[names]
        is_first = last <= 0
        if is_first.any():
            outcome.first_token.add(now + last[is_first])
            outcome.gap.add(now - last[~is_first])
        else:
            outcome.gap.add(now - last)
        self._last_token_at[names] = now
        outcome.output_tokens += len(names)
        if ended.any():
            over = names[ended != 0].tolist()
            self._names.extend(over)
            self.num_live -= len(over)
            outcome.finished += len(over)
            outcome.end_s = now

    def _take_name(self) -> int:
        if not self._names:
            size = len(self._last_token_at)
            self._last_token_at = np.append(self._last_token_at, np.zeros(size))
            self._names = list(range(2 * size - 1, size - 1, -1))
        return self._names.pop()


class _Ranks:
    """Keeps each slot's length, as a rank does, and answers every sampled row with token 0."""

    def __init__(self, slots: int) -> None:
        self._length = np.zeros(slots, np.int64)
        self._decodes = np.empty(0, np.intp)

    def execute(self, plan: StepPlan) -> tuple[StepWork, StepResult]:
        """Return what a plan costs and its result."""
        if plan.decode is not None:
            self._decodes = np.frombuffer(plan.decode, np.int32).astype(np.intp)
        rows = self._decodes
        self._length[rows] += 1
        num_tokens, num_read = len(rows), int(self._length[rows].sum())
        num_pairs = 0
        lasts: list[int] = []
        columns = array("i", plan.chunks)
        for place in range(0, len(columns), 4):
            slot, start, count, last = columns[place : place + 4]
            self._length[slot] = start + count
            num_tokens += count
            num_pairs += chunk_pairs(start, count)
            lasts.append(last)
        num_sampled = len(rows) + sum(lasts)
        result = StepResult(
            step_id=plan.step_id,
            digest=0,
            counts=pack_int32([1] * len(rows) + lasts),
            tokens=bytes(4 * num_sampled),
        )
        return StepWork(num_tokens, num_read, num_pairs), result


def prompt_ids(request: TraceRequest, number: int) -> bytes:
    """Return a prompt's column of token ids: its group's first, then what only it has."""
    shared, own = request.num_prefix_tokens, request.num_prompt_tokens - request.num_prefix_tokens
    return _text(shared, request.prefix_group, 1) + _text(own, number, 2)


def _text(length: int, name: int, kind: int) -> bytes:
    high, low = divmod(name, 100_000)
    return pack_int32([kind, 3 + low, 3 + high] * (length // 3 + 1))[: 4 * length]
