"""A scheduler that makes legal plans at random, and knows by an oracle what must come of them."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from protocol.messages import EngineFacts, Join, SamplingParams, StepPlan
from tests.worker.plan_builder import make_join, make_plan

Oracle: TypeAlias = Callable[[list[int], SamplingParams], int]
"""The token that follows a context."""


@dataclass(eq=False)
class Life:
    """One stay of a sequence in a slot."""

    prompt_len: int
    params: SamplingParams
    tokens: list[int]
    """Prompt and output; the newest ones as the oracle has them, before any result came."""
    known: int
    """Tokens at the join: below this length it prefills."""
    blocks: list[int]
    length: int


@dataclass(frozen=True)
class Expected:
    """A plan and what it must produce."""

    plan: StepPlan
    tokens: list[int]
    counts: list[int]


@dataclass
class RandomPlans:
    """Admits, extends, shares, copies and exchanges blocks, preempts and finishes, all at random.

    A preempted sequence comes back with up to two of its newest tokens lost, as when two plans were
    unanswered. Freed slots and blocks are given out again in the same plan.
    """

    random: random.Random
    facts: EngineFacts
    oracle: Oracle
    generations: list[int] = field(default_factory=list)
    holders: Counter[int] = field(default_factory=Counter)
    live: dict[int, Life] = field(default_factory=dict)
    preempted: list[Life] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)
    decode: list[int] = field(default_factory=list)
    num_exchanged: int = 0

    def __post_init__(self) -> None:
        self.generations = [0] * self.facts.slots

    def plans(self, count: int) -> Iterator[Expected]:
        step_id = 1
        while step_id <= count:
            expected = self.next_plan(step_id)
            if expected is not None:
                yield expected
                step_id += 1

    def next_plan(self, step_id: int) -> Expected | None:
        self.release_some()
        copies: list[tuple[int, int]] = []
        new_blocks: list[tuple[int, int, int]] = []
        joins = self.admit_some(copies)
        decode: list[int] = []
        chunks: list[tuple[int, int, int, int]] = []
        tokens: list[int] = []
        self.exchange_some(new_blocks)
        joined = {join.slot for join in joins}
        for slot in self.shuffled(self.live):
            life = self.live[slot]
            if life.length >= life.known and self.extend(slot, life, new_blocks):
                decode.append(slot)
                life.length += 1
                tokens.append(self.foretell(life))
        for slot in self.shuffled(self.live):
            life = self.live[slot]
            if life.length < life.known and (slot in joined or self.random.random() < 0.7):
                count = self.random.randint(1, life.known - life.length)
                is_last = life.length + count == life.known
                chunks.append((slot, life.length, count, int(is_last)))
                life.length += count
                if is_last:
                    tokens.append(self.foretell(life))
        if not decode and not chunks:
            return None  # such a plan is not sent; its leaves wait for the next
        plan = make_plan(
            step_id,
            leaves=self.leaves,
            joins=joins,
            copies=copies,
            new_blocks=new_blocks,
            decode=None if decode == self.decode else decode,
            chunks=chunks,
        )
        self.leaves, self.decode = [], decode
        return Expected(plan, tokens, [1] * len(decode) + [chunk[3] for chunk in chunks])

    def foretell(self, life: Life) -> int:
        token = self.oracle(life.tokens[: life.length], life.params)
        life.tokens.append(token)
        return token

    def release_some(self) -> None:
        for slot, life in list(self.live.items()):
            is_full = life.length >= self.facts.max_model_len
            if is_full or self.random.random() < 0.1:
                del self.live[slot]
                self.leaves.append(slot)
                self.holders.subtract(life.blocks)
                if not is_full and self.random.random() < 0.5:
                    self.preempted.append(life)

    def admit_some(self, copies: list[tuple[int, int]]) -> list[Join]:
        joins = []
        for slot in range(self.facts.slots):
            if slot in self.live or self.random.random() < 0.5:
                continue
            life = self.resumed() or self.forked(copies) or self.fresh()
            if life is None:
                continue
            self.live[slot] = life
            self.generations[slot] += 1
            joins.append(
                make_join(
                    slot,
                    life.tokens,
                    life.blocks,
                    generation=self.generations[slot],
                    prompt_len=life.prompt_len,
                    params=life.params,
                )
            )
        return joins

    def resumed(self) -> Life | None:
        if not self.preempted:
            return None
        old = self.preempted.pop()
        lost = self.random.randint(0, 2)
        tokens = old.tokens[: max(old.prompt_len, len(old.tokens) - lost)]
        return self.placed(old.prompt_len, old.params, tokens, shared=[], length=0)

    def fresh(self) -> Life | None:
        tokens = self.draw_tokens(self.random.randint(1, self.facts.max_model_len // 2))
        if self.live and self.random.random() < 0.3:
            # The same as another, computed once more: blocks to exchange.
            other = self.random.choice(list(self.live.values()))
            tokens = other.tokens[: other.prompt_len]
        return self.placed(len(tokens), self.draw_params(), tokens, shared=[], length=0)

    def forked(self, copies: list[tuple[int, int]]) -> Life | None:
        """A new prompt that starts with what another sequence has computed."""
        donors = [life for life in self.live.values() if life.length > 0]
        if not donors or self.random.random() < 0.5:
            return None
        donor = self.random.choice(donors)
        common = self.random.randint(1, min(donor.length, self.facts.max_model_len // 2))
        full, rest = divmod(common, self.facts.block_size)
        tokens = donor.tokens[:common] + self.draw_tokens(self.random.randint(1, 4))
        life = self.placed(
            len(tokens), self.draw_params(), tokens, shared=donor.blocks[:full], length=common
        )
        if life is not None and rest:
            copies.append((donor.blocks[full], life.blocks[full]))
        return life

    def placed(
        self,
        prompt_len: int,
        params: SamplingParams,
        tokens: list[int],
        shared: Sequence[int],
        length: int,
    ) -> Life | None:
        blocks = list(shared)
        self.holders.update(shared)
        while len(blocks) * self.facts.block_size < len(tokens):
            block = self.free_block()
            if block is None:
                self.holders.subtract(blocks)
                return None
            blocks.append(block)
        return Life(prompt_len, params, tokens, len(tokens), blocks, length)

    def exchange_some(self, new_blocks: list[tuple[int, int, int]]) -> None:
        """Replace full blocks by those with the same content that another sequence holds."""
        block_size = self.facts.block_size
        for (slot, life), other in itertools.product(list(self.live.items()), self.live.values()):
            for index in range(min(life.length, other.length) // block_size):
                mine, theirs = life.blocks[index], other.blocks[index]
                end = (index + 1) * block_size
                is_same = life.tokens[:end] == other.tokens[:end]
                if mine != theirs and is_same and self.random.random() < 0.5:
                    new_blocks.append((slot, index, theirs))
                    life.blocks[index] = theirs
                    self.num_exchanged += 1
                    self.holders.subtract([mine])
                    self.holders.update([theirs])

    def extend(self, slot: int, life: Life, new_blocks: list[tuple[int, int, int]]) -> bool:
        if life.length >= self.facts.max_model_len:
            return False
        if life.length == len(life.blocks) * self.facts.block_size:
            block = self.free_block()
            if block is None:
                return False
            new_blocks.append((slot, len(life.blocks), block))
            life.blocks.append(block)
        return True

    def free_block(self) -> int | None:
        free = [block for block in range(self.facts.num_blocks) if not self.holders[block]]
        if not free:
            return None
        block = self.random.choice(free)
        self.holders[block] += 1
        return block

    def draw_tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self.facts.vocab_size) for _ in range(count)]

    def draw_params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.random.choice([0.0, 0.7]), seed=self.random.randrange(-9, 9)
        )

    def shuffled(self, live: dict[int, Life]) -> list[int]:
        # Sorted half the time, so that runs of steps repeat the list and send nil.
        slots = sorted(live)
        return slots if self.random.random() < 0.5 else self.random.sample(slots, len(slots))
