"""A simulated rank and a simulated frontend, to run the scheduler's core against an oracle.

The rank executes plans strictly by its side of the rules and refuses whatever breaks them. Its
cache stores (token, position) at every cache position, and its next token is a hash of the whole
context *read back* through the block table. So the right output of a sequence is a function of its
own prompt and parameters, and a lost, stale or foreign block changes it.
"""

import struct
import zlib
from array import array
from collections import deque
from dataclasses import dataclass, field

from protocol.columns import pack_int32, unpack_int32, unpack_int64, unpack_rows
from protocol.errors import ErrorCode
from protocol.messages import (
    AbortAck,
    AddSequence,
    EngineFacts,
    FinishReason,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenDeltas,
)
from protocol.validation import longest_sequence
from scheduler import prefix_groups
from scheduler.deltas import Addressed
from scheduler.policy import Policy, ThroughputPolicy
from scheduler.prefix import PrefixChain, PrefixHasher
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence, SequenceKey

VOCAB_SIZE = 40


def facts(
    *,
    num_blocks: int,
    block_size: int,
    slots: int = 4,
    max_model_len: int = 64,
    rank: int = 0,
    host_blocks: int = 0,
) -> EngineFacts:
    return EngineFacts(
        rank=rank,
        back_end="checksum",
        block_size=block_size,
        num_blocks=num_blocks,
        slots=slots,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        host_blocks=host_blocks,
    )


def add_message(
    request_id: int,
    prompt: list[int],
    *,
    max_tokens: int = 8,
    seed: int = 0,
    sample: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    min_tokens: int = 0,
    priority: int = 0,
    deadline: float | None = None,
    cache_domain: bytes = b"",
    resume_ids: tuple[int, ...] = (),
    next_index: int = 0,
) -> AddSequence:
    params = SamplingParams(
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=list(stop_token_ids),
    )
    return AddSequence(
        request_id=request_id,
        sample=sample,
        prompt_ids=pack_int32(prompt),
        params=params,
        cache_domain=cache_domain,
        priority=priority,
        deadline=deadline,
        resume_ids=pack_int32(resume_ids),
        next_index=next_index,
    )


def simulate(
    *,
    num_blocks: int = 32,
    block_size: int = 4,
    slots: int = 4,
    max_model_len: int = 64,
    policy: Policy = ThroughputPolicy(budget=64),  # noqa: B008 (frozen)
    max_in_flight: int = 2,
    prefix_key: bytes | None = b"key",
    max_waiting_requests: int = 100,
    max_waiting_tokens: int = 1000,
    sources: int = 1,
    host_blocks: int = 0,
) -> "Simulation":
    """A simulation with a scheduler of its own."""
    engine = facts(
        num_blocks=num_blocks,
        block_size=block_size,
        slots=slots,
        max_model_len=max_model_len,
        host_blocks=host_blocks,
    )
    scheduler = Scheduler(
        engine,
        policy,
        max_in_flight=max_in_flight,
        prefix_key=prefix_key,
        max_waiting_requests=max_waiting_requests,
        max_waiting_tokens=max_waiting_tokens,
    )
    return Simulation(scheduler, engine, sources)


def make_sequence(
    arrival: int,
    num_tokens: int,
    *,
    priority: int = 0,
    request_id: int = 0,
    sample: int = 0,
    source: bytes = b"frontend",
    deadline: float | None = None,
) -> Sequence:
    """A waiting sequence on its own."""
    return Sequence(
        key=SequenceKey(source, request_id, sample),
        tokens=array("i", range(num_tokens)),
        num_prompt_tokens=num_tokens,
        max_tokens=10_000,
        params=SamplingParams(seed=0, max_tokens=1),
        stop_token_ids=frozenset(),
        chain=PrefixChain(PrefixHasher(b""), b"", 4),
        arrival=arrival,
        priority=priority,
        deadline=deadline,
    )


def word(token: int, position: int) -> bytes:
    return struct.pack("<ii", token, position)


def next_token(context_hash: int, seed: int) -> int:
    return zlib.crc32(struct.pack("<q", seed), context_hash) % VOCAB_SIZE


def expected_output(
    prompt: list[int], params: SamplingParams, longest: int
) -> tuple[list[int], FinishReason]:
    """The output of a sequence as a direct function of what was asked for."""
    assert params.seed is not None
    assert params.max_tokens is not None
    context = 0
    for position, token in enumerate(prompt):
        context = zlib.crc32(word(token, position), context)
    output: list[int] = []
    while True:
        token = next_token(context, params.seed)
        output.append(token)
        if token in params.stop_token_ids and len(output) >= params.min_tokens:
            return output, FinishReason.STOP
        if len(output) == params.max_tokens or len(prompt) + len(output) == longest:
            return output, FinishReason.LENGTH
        context = zlib.crc32(word(token, len(prompt) + len(output) - 1), context)


@dataclass
class SlotState:
    """What a rank knows of a slot."""

    token_ids: list[int]
    params: SamplingParams
    block_table: list[int]
    length: int | None = None
    sampled: list[int] = field(default_factory=list)
    has_failed: bool = False
    era: int = 0
    """How often the prefix cache had been reset when it joined."""


@dataclass
class SimulatedRank:
    """Executes plans; every broken rule is an AssertionError."""

    num_blocks: int
    block_size: int
    host_blocks: int = 0
    slots: dict[int, SlotState] = field(default_factory=dict)
    decode: list[int] | None = None
    last_step_id: int = 0
    writes: list[int] = field(default_factory=list)
    """Blocks written by the last plan."""
    generations: dict[int, int] = field(default_factory=dict)
    num_moved: int = 0
    """Blocks moved to the host so far."""
    groups: bytes = b""
    num_replaced: int = 0
    """Entries of block tables replaced so far."""
    era: int = 0
    """How often the prefix cache has been reset."""

    def __post_init__(self) -> None:
        # By block, the oldest era of anything that its content rests on.
        self.eras = [0] * self.num_blocks
        self.host_eras: dict[int, int] = {}
        self.cache = [bytearray(8 * self.block_size) for _ in range(self.num_blocks)]
        self.host: dict[int, bytes] = {}

    def execute(self, plan: StepPlan, failing: dict[int, ErrorCode] | None = None) -> StepResult:
        """Apply a plan and compute its rows; `failing` names rows (by index) that go wrong."""
        assert plan.step_id == self.last_step_id + 1, "a gap in the step ids"
        self.last_step_id = plan.step_id
        self.writes = []
        self._apply(plan, ErrorCode.OUT_OF_MEMORY in (failing or {}).values())
        decode = self.decode or []
        chunks = unpack_rows(plan.chunks, 4)
        assert decode or chunks, "a plan without rows"
        rows = [*decode, *(chunk[0] for chunk in chunks)]
        assert len(set(rows)) == len(rows), "two rows for one slot"
        tokens: list[int] = []
        counts: list[int] = []
        failures: list[int] = []
        for number, slot in enumerate(rows):
            state = self.slots[slot]
            if number < len(decode):
                start, count, last = self._decode_row(state)
            else:
                _, start, count, last = chunks[number - len(decode)]
                self._check_chunk(state, start, count, last)
            state.length = start + count
            code = (failing or {}).get(number)
            if state.has_failed or code is not None:
                # What a failed step leaves in the cache is anybody's guess.
                self._write(state, start, [-7] * count)
                state.has_failed = True
                counts.append(-1)
                failures.append(code or ErrorCode.NUMERIC)
                continue
            self._write(state, start, (state.token_ids + state.sampled)[start : start + count])
            counts.append(last)
            if last:
                assert state.params.seed is not None
                state.sampled.append(next_token(self._read_back(state), state.params.seed))
                tokens.append(state.sampled[-1])
        return StepResult(
            step_id=plan.step_id,
            digest=0,
            tokens=pack_int32(tokens),
            counts=pack_int32(counts),
            failures=pack_int32(failures),
        )

    def _apply(self, plan: StepPlan, has_no_memory: bool) -> None:
        for slot in unpack_int32(plan.leaves):
            del self.slots[slot]
        chunks = {slot: start for slot, start, _, _ in unpack_rows(plan.chunks, 4)}
        for join in plan.joins:
            assert join.slot not in self.slots, "a join into a slot that is taken"
            assert join.generation > self.generations.get(join.slot, -1), "an old generation"
            self.generations[join.slot] = join.generation
            table = unpack_int32(join.block_table)
            token_ids = unpack_int32(join.token_ids)
            assert len(table) * self.block_size >= len(token_ids)
            self.slots[join.slot] = SlotState(
                token_ids, join.params, table, length=chunks[join.slot]
            )
        new_blocks = unpack_rows(plan.new_blocks, 3)
        for slot, index, block in new_blocks:
            # Looked at before anything is written: the block that is replaced is free by now.
            self._check_new_block(self.slots[slot], index, block)
        # Whatever happens to the step: whose blocks these are is not part of it.
        for block, host_block in unpack_rows(plan.swap_outs, 2):
            assert 0 <= host_block < self.host_blocks, "a host block that there is not"
            self.host[host_block] = bytes(self.cache[block])
            self.host_eras[host_block] = self.eras[block]
            self.num_moved += 1
        self._copy(unpack_rows(plan.copies, 2), is_lost=has_no_memory)
        for host_block, block in unpack_rows(plan.swap_ins, 2):
            self.cache[block][:] = word(-7, -7) * self.block_size
            if not has_no_memory:
                self.cache[block][:] = self.host[host_block]
            self.eras[block] = self.host_eras[host_block]
            self.writes.append(block)
        self._check_eras(plan)
        for slot, index, block in new_blocks:
            self.slots[slot].block_table[index : index + 1] = [block]
        if plan.decode is None:
            assert self.decode, "nil without a list to repeat"
            assert not plan.leaves, "nil after a leave"
        else:
            self.decode = unpack_int32(plan.decode)
        assert set(self.decode) <= set(self.slots), "a decode row that has left"
        if plan.groups is not None:
            assert plan.groups != self.groups, "groups that are known already"
            self.groups = plan.groups
        self._check_groups()

    def _check_eras(self, plan: StepPlan) -> None:
        # What a sequence had itself comes back to it from the host, however old it is.
        own = {block for _, block in unpack_rows(plan.swap_ins, 2)}
        for join in plan.joins:
            state = self.slots[join.slot]
            assert state.length is not None
            known = state.block_table[: -(-state.length // self.block_size)]
            eras = [self.eras[block] for block in known]
            for block, era in zip(known, eras, strict=True):
                assert block in own or era == self.era, "a hit on what was written before a reset"
            state.era = min([self.era, *eras])

    def _check_new_block(self, state: SlotState, index: int, block: int) -> None:
        assert index <= len(state.block_table), "a new block at the wrong place"
        if index < len(state.block_table):
            self.num_replaced += 1
            assert state.length is not None
            assert (index + 1) * self.block_size <= state.length, "replaced while it is written"
            old = state.block_table[index]
            assert self.cache[block] == self.cache[old], "replaced by other keys and values"

    def _check_groups(self) -> None:
        members = unpack_rows(self.groups, 3)
        slots = [slot for slot, _, _ in members]
        assert len(set(slots)) == len(slots), "in two groups"
        assert set(slots) <= set(self.decode or []), "in a group without a decode row"
        prefixes: dict[int, list[tuple[int, ...]]] = {}
        for slot, group, shared in members:
            state = self.slots[slot]
            assert state.length is not None
            assert shared * self.block_size <= state.length, "shares what it has not computed"
            assert shared * self.block_size >= prefix_groups.GROUP_TOKENS
            prefixes.setdefault(group, []).append(tuple(state.block_table[:shared]))
        for each in prefixes.values():
            assert len(each) >= prefix_groups.GROUP_ROWS
            assert len(set(each)) == 1, "a group whose tables differ"

    def _copy(self, copies: list[tuple[int, ...]], *, is_lost: bool) -> None:
        for source, target in copies:
            self.cache[target][:] = self.cache[source]
            self.eras[target] = self.eras[source]
            self.writes.append(target)
            if is_lost:
                # Out of memory, a rank may not get as far as the copies.
                self.cache[target][:] = word(-7, -7) * self.block_size

    def _decode_row(self, state: SlotState) -> tuple[int, int, int]:
        assert state.length is not None
        assert state.has_failed or state.sampled, "decoded before its last chunk"
        return state.length, 1, 1

    def _check_chunk(self, state: SlotState, start: int, count: int, last: int) -> None:
        assert start == state.length, "a chunk does not start at the length"
        assert count > 0
        assert start + count <= len(state.token_ids), "a chunk beyond the known tokens"
        assert last == (start + count == len(state.token_ids))

    def _write(self, state: SlotState, start: int, tokens: list[int]) -> None:
        for position, token in enumerate(tokens, start):
            block = state.block_table[position // self.block_size]
            offset = position % self.block_size
            self.cache[block][8 * offset : 8 * offset + 8] = word(token, position)
            self.eras[block] = state.era
            self.writes.append(block)

    def _read_back(self, state: SlotState) -> int:
        context = 0
        assert state.length is not None
        for start in range(0, state.length, self.block_size):
            block = self.cache[state.block_table[start // self.block_size]]
            size = min(self.block_size, state.length - start)
            context = zlib.crc32(memoryview(block)[: 8 * size], context)
        return context


@dataclass
class Received:
    """What a frontend has of one sequence."""

    message: AddSequence
    tokens: list[int] = field(default_factory=list)
    reason: int = 0
    is_aborted: bool = False
    cached_tokens: int = 0


@dataclass
class SimulatedFrontend:
    """Collects deltas by sequence and insists on order, completeness and one end."""

    source: bytes
    sequences: dict[tuple[int, int], Received] = field(default_factory=dict)

    def take(self, deltas: TokenDeltas) -> None:
        tokens = deque(unpack_int32(deltas.token_ids))
        columns = zip(
            unpack_int64(deltas.requests),
            unpack_int32(deltas.samples),
            unpack_int32(deltas.first_index),
            unpack_int32(deltas.counts),
            unpack_int32(deltas.cached_tokens),
            unpack_int32(deltas.reasons),
            strict=True,
        )
        for request, sample, first_index, count, cached_tokens, reason in columns:
            received = self.sequences[request, sample]
            assert not received.is_aborted, "a delta after an abort"
            assert not received.reason, "a delta after the terminal reason"
            assert first_index == len(received.tokens), "a gap or a repetition"
            received.tokens += [tokens.popleft() for _ in range(count)]
            received.reason = reason
            received.cached_tokens = cached_tokens
        assert not tokens


class Simulation:
    """A scheduler, one rank whose results come late, and frontends."""

    def __init__(self, scheduler: Scheduler, engine: EngineFacts, sources: int = 1) -> None:
        self.scheduler = scheduler
        self.facts = engine
        self.rank = SimulatedRank(engine.num_blocks, engine.block_size, engine.host_blocks)
        self.frontends = [SimulatedFrontend(b"frontend-%d" % i) for i in range(sources)]
        self.plans: list[StepPlan] = []
        self.results: deque[StepResult] = deque()
        self.is_corrupted = False
        """Whether a test has corrupted the block manager, so that problems are to be expected."""
        self.problems: list[str] = []

    def add(self, message: AddSequence, frontend: int = 0) -> None:
        front = self.frontends[frontend]
        deltas = self.scheduler.add(front.source, message)
        received = Received(message, unpack_int32(message.resume_ids)[: message.next_index])
        front.sequences[message.request_id, message.sample] = received
        self.deliver(deltas)

    def abort(self, request_id: int, sample: int, frontend: int = 0) -> AbortAck:
        front = self.frontends[frontend]
        for (request, index), received in front.sequences.items():
            if request == request_id and sample in (-1, index) and not received.reason:
                received.is_aborted = True
        return self.scheduler.abort(front.source, request_id, sample)

    def reset_prefix_cache(self) -> int:
        self.rank.era += 1
        return self.scheduler.reset_prefix_cache()

    def plan(self, failing: dict[int, ErrorCode] | None = None) -> StepPlan | None:
        """Plan one step and let the rank execute it; its result waits for `answer`."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
            self.results.append(self.rank.execute(plan, failing))
            self._check_writes()
            self._check_tables(plan)
        self._check_if_stumbled()
        return plan

    def received(self, request_id: int, sample: int = 0, frontend: int = 0) -> Received:
        return self.frontends[frontend].sequences[request_id, sample]

    def answer(self, seconds: float = 0.0) -> bool:
        """Commit the oldest result, which took so long; False if there is none."""
        if not self.results:
            return False
        self.deliver(self.scheduler.commit(self.results.popleft(), seconds))
        self._check_if_stumbled()
        return True

    def check(self) -> list[str]:
        """Check and repair everything; return the problems, which `problems` collects."""
        checked = self.scheduler.check()
        self.problems += checked.problems
        self.deliver(checked.deltas)
        return checked.problems

    def _check_if_stumbled(self) -> None:
        # As the process does whenever its loop comes round.
        if self.scheduler.has_stumbled:
            self.check()

    def deliver(self, addressed: list[Addressed]) -> None:
        for source, deltas in addressed:
            (front,) = (each for each in self.frontends if each.source == source)
            front.take(deltas)

    def run(self, max_steps: int = 10_000) -> None:
        """Plan and answer until nothing is left."""
        for _ in range(max_steps):
            while self.plan() is not None:
                pass
            if not self.answer():
                assert self.scheduler.num_live == 0, "live sequences, but nothing to plan"
                return
        raise AssertionError("the scheduler does not come to an end")

    def _check_writes(self) -> None:
        if self.is_corrupted:
            return
        # Looked at while the plan is the newest: nobody has been given these blocks since.
        blocks = self.scheduler.block_manager
        for block in self.rank.writes:
            assert blocks.num_holders(block) == 1, "a write into a block of two sequences"
            assert not blocks.is_registered(block), "a write into a registered block"

    def _check_tables(self, plan: StepPlan) -> None:
        changed = {slot for slot, _, _ in unpack_rows(plan.new_blocks, 3)}
        for sequence in self.scheduler.running_sequences():
            assert sequence.slot is not None
            if sequence.block_table:
                state = self.rank.slots[sequence.slot]
                assert state.block_table == sequence.block_table, "the rank has another table"
            else:
                # It drains and has given its blocks away.
                assert sequence.slot not in changed, "a new block for nothing"

    def check_outputs(self) -> None:
        """Every sequence's output is the oracle's, or starts like it if it was cut off.

        Where a test has corrupted something, only what ended normally promises anything.
        """
        assert self.is_corrupted or not self.problems
        longest = longest_sequence(self.facts)
        for front in self.frontends:
            for received in front.sequences.values():
                message = received.message
                prompt = unpack_int32(message.prompt_ids)
                tokens, reason = expected_output(prompt, message.params, longest)
                if received.reason in (FinishReason.STOP, FinishReason.LENGTH):
                    assert (received.tokens, received.reason) == (tokens, reason)
                elif not self.is_corrupted:
                    assert received.tokens == tokens[: len(received.tokens)]
                    assert received.reason or received.is_aborted
