"""One sequence: its tokens, its blocks, and where it is in its life.

    WAITING ──► PREFILLING ──► DECODING ──► DRAINING ──► FINISHED
                 ▲      │          │                        ▲
                 │      ▼          │                        └── from every status
                PREEMPTED ◄────────┘

A sequence knows nothing of other sequences, plans or slots' columns. Only `Scheduler` changes it.
"""

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from protocol.messages import FinishReason, SamplingParams
from scheduler.prefix import PrefixChain, TokenArray

STORY_LENGTH = 12
"""Events of a sequence that are kept for the message of an internal error."""

MAX_PASSES = 8
"""Admissions of younger sequences that one bears before it has aged."""

AGED_URGENCY = 1 << 31
"""Above every priority."""


class SequenceStatus(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    """Never ran; holds neither slot nor blocks."""
    PREFILLING = "prefilling"
    """Holds a slot and the blocks of all its known tokens, some of which are yet to be planned."""
    DECODING = "decoding"
    """All its known tokens are planned; it gets one row a step, ahead of its newest token."""
    DRAINING = "draining"
    """Its last permitted token is planned; only the answer is missing."""
    PREEMPTED = "preempted"
    """Gave up slot and blocks to others; waits to run again from its committed tokens."""
    FINISHED = "finished"
    """Has its terminal reason."""


TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.PREFILLING, SequenceStatus.FINISHED}),
    SequenceStatus.PREFILLING: frozenset(
        {SequenceStatus.DECODING, SequenceStatus.PREEMPTED, SequenceStatus.FINISHED}
    ),
    SequenceStatus.DECODING: frozenset(
        {SequenceStatus.DRAINING, SequenceStatus.PREEMPTED, SequenceStatus.FINISHED}
    ),
    SequenceStatus.DRAINING: frozenset({SequenceStatus.FINISHED}),
    SequenceStatus.PREEMPTED: frozenset({SequenceStatus.PREFILLING, SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset(),
}
"""Every legal change of status."""

RUNNING = frozenset({SequenceStatus.PREFILLING, SequenceStatus.DECODING, SequenceStatus.DRAINING})
"""The states in which a sequence has a slot."""

WAITING = frozenset({SequenceStatus.WAITING, SequenceStatus.PREEMPTED})
"""The states in which it is in the waiting queue."""


RequestKey: TypeAlias = tuple[bytes, int]


class SequenceKey(NamedTuple):
    """What a frontend calls a sequence, and which frontend that is."""

    source: bytes
    """Identity of the frontend's connection."""
    request_id: int
    sample: int

    @property
    def request(self) -> RequestKey:
        """What all samples of a request have in common."""
        return self.source, self.request_id


class Event(NamedTuple):
    """One line of a sequence's story."""

    name: str
    step_id: int
    num_tokens: int
    num_blocks: int


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A token list being extended. Compared and hashed by identity.

    Invariants, while it holds a slot: `len(block_table) * block_size` covers every planned
    position, except in DRAINING, where the blocks may have been given up already; the newest
    token of `tokens` is not in the cache yet; the first `num_registered` blocks of the table
    are never written again.
    """

    key: SequenceKey
    tokens: TokenArray
    """Prompt, then committed output; while it has a slot, `SlotTable.sync` adds the newest."""
    num_prompt_tokens: int
    max_tokens: int
    """Most tokens of prompt and output together: the request's wish, cut to what fits."""
    params: SamplingParams
    stop_token_ids: frozenset[int]
    chain: PrefixChain
    arrival: int
    """Position in the order of arrival; kept through preemption."""
    priority: int = 0
    deadline: float | None = None
    """Seconds on the host's monotonic clock."""
    status: SequenceStatus = SequenceStatus.WAITING
    slot: int | None = None
    block_table: list[int] = field(default_factory=list)
    block_uses: dict[int, int] = field(default_factory=dict)
    """`BlockBooks.uses` of the blocks it was given, when it was."""
    is_damaged: bool = False
    """Something it held may have been another's: it can only end with an internal error."""
    num_planned: int = 0
    """Positions of `tokens` planned so far, while PREFILLING; cached ones are included."""
    num_computed: int = 0
    """Positions whose keys and values are in the cache, as far as committed steps tell."""
    num_scored: int = 1
    """Prompt tokens whose log-probabilities are committed, if it wants them; the first has none."""
    num_registered: int = 0
    """Blocks of the table that others may share: the prefix index knows them, or they came from
    it or from another sample."""
    host_blocks: list[int] = field(default_factory=list)
    """Where its blocks are while it waits, if they were moved to the host."""
    num_swapped: int = 0
    """Positions that those hold."""
    cached_tokens: int | None = None
    """Prompt tokens it did not have to compute when it was first admitted; None before."""
    admission: int = 0
    """Number of its newest admission, counted over all sequences; 0 before the first."""
    rests_on: int = 0
    """Number of the admission whose computation it goes on with: an earlier one if its blocks were
    moved to the host meanwhile."""
    passes: int = 0
    """Admissions of younger ones counted against it, while it had tokens to prefill."""
    is_place_told: bool = False
    """Its frontend knows its place in the queue, and not yet that it has left it."""
    protected_until: int = 0
    """Number of tokens up to which it is not preempted again if another can be."""
    story: deque[Event] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))

    @property
    def num_output_tokens(self) -> int:
        """Committed output tokens."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """Known tokens that are not planned yet."""
        return len(self.tokens) - self.num_planned

    @property
    def wants_scores(self) -> bool:
        """Whether it wants log-probabilities of prompt tokens that are not committed yet."""
        return self.params.prompt_logprobs is not None and self.num_scored < self.num_prompt_tokens

    @property
    def is_running(self) -> bool:
        """Whether it holds a slot."""
        return self.status in RUNNING

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts sequences from the first to be served to the first to be preempted."""
        return (-self.urgency, self.arrival)

    @property
    def has_aged(self) -> bool:
        """Whether it has been passed over so often that it comes before all that have not."""
        return self.passes >= MAX_PASSES

    @property
    def urgency(self) -> int:
        """Its priority, as long as it has not aged."""
        return AGED_URGENCY if self.has_aged else self.priority

    def natural_end(self) -> FinishReason | None:
        """Return why it ends with its newest output token; None if it goes on."""
        is_stop = self.tokens[-1] in self.stop_token_ids
        if is_stop and self.num_output_tokens >= self.params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.max_tokens else None

    def become(self, status: SequenceStatus, step_id: int) -> None:
        """Change status. An illegal change is our bug and tells the sequence's story."""
        assert status in TRANSITIONS[self.status], (
            f"a sequence cannot go from {self.status.value} to {status.value}: {self.tell()}"
        )
        self.status = status
        self.note(status.value, step_id)

    def note(self, name: str, step_id: int) -> None:
        """Remember an event."""
        self.story.append(Event(name, step_id, len(self.tokens), len(self.block_table)))

    def tell(self) -> str:
        """Return its last events as one line, for the message of an internal error."""
        events = ", ".join(
            f"{event.name}(step={event.step_id} tokens={event.num_tokens} "
            f"blocks={event.num_blocks})"
            for event in self.story
        )
        return (
            f"request={self.key.request_id} sample={self.key.sample} "
            f"status={self.status.value} slot={self.slot} story=[{events}]"
        )
