"""The running sequences by slot, as columns.

A step at 256 running sequences has 50 microseconds (`benchmarks/scheduler.py`), 0.2 for each of
its rows: too little to look at each one in Python. So what every step needs of every row lies in
numpy columns indexed by slot, and two of them, `plan_event` and `commit_event`, say at which
length or output index a row needs more than counting. Python looks at those rows only.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scheduler.sequence import Sequence

NEVER = np.iinfo(np.int32).max
"""An event that does not come."""

RECENT_TOKENS = 64
"""Committed tokens a slot holds before they have to move to their sequence. A power of two."""


@dataclass(frozen=True, slots=True)
class Audience:
    """The rows that one frontend hears about, with the columns that do not change by step."""

    source: bytes
    picks: NDArray[np.intp] | None
    """Which of the rows; None: all."""
    requests: bytes
    samples: bytes
    cached_tokens: bytes
    ones: bytes
    zeros: bytes


@dataclass(frozen=True, slots=True)
class Rows:
    """Some slots in order, with what commit needs of them gathered once.

    Valid as long as no slot of it changes hands, and recognised later by its generations.
    """

    slots: NDArray[np.intp]
    generations: NDArray[np.int64]
    sequences: list[Sequence]
    audiences: list[Audience]
    column: bytes = field(repr=False)
    """The slots as the column of a plan."""
    ones: bytes = field(repr=False)
    """A column of ones, as long."""

    def __len__(self) -> int:
        return len(self.sequences)


class SlotTable:
    """Owner of the slots. Its columns are written by `Scheduler` alone."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.generation = np.zeros(num_slots, np.int64)
        """Raised when a slot is given up; tokens for an older one are dropped."""
        self.length = np.zeros(num_slots, np.int32)
        """Positions planned: the length that the ranks will have reached."""
        self.plan_event = np.full(num_slots, NEVER, np.int32)
        """Length at which a decoding row needs a block or has all its tokens planned."""
        self.output_index = np.zeros(num_slots, np.int32)
        """Index of the next output token to be committed."""
        self.commit_event = np.full(num_slots, NEVER, np.int32)
        """Output index at which the last permitted token has come or `recent` is full."""
        self.recent = np.zeros((num_slots, RECENT_TOKENS), np.int32)
        """[num_slots, RECENT_TOKENS] the newest output tokens; index i is in column i modulo the
        width. Appending to 256 arrays one by one would take a third of a step's time."""
        self._requests = np.zeros(num_slots, np.int64)
        self._samples = np.zeros(num_slots, np.int32)
        self._cached_tokens = np.zeros(num_slots, np.int32)
        self._sequences: list[Sequence | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self.changes = 0
        """Slots given up so far: if it has not moved, no generation has."""

    @property
    def num_free(self) -> int:
        """Slots without a sequence."""
        return len(self._free)

    @property
    def num_running(self) -> int:
        """Slots with a sequence."""
        return self.num_slots - len(self._free)

    def take(self, sequence: Sequence) -> int:
        """Give a slot to a sequence whose `cached_tokens` are known; return the slot."""
        assert sequence.cached_tokens is not None, f"not looked up: {sequence.tell()}"
        slot = self._free.pop()
        sequence.slot = slot
        self._sequences[slot] = sequence
        self._requests[slot] = sequence.key.request_id
        self._samples[slot] = sequence.key.sample
        self._cached_tokens[slot] = sequence.cached_tokens
        self.output_index[slot] = sequence.num_output_tokens
        self.plan_event[slot] = NEVER
        self.expect_output(sequence)
        return slot

    def give_back(self, sequence: Sequence) -> int:
        """Take the slot from a sequence; whatever is still computed for it is void."""
        slot = sequence.slot
        assert slot is not None, f"no slot to give back: {sequence.tell()}"
        self.sync(sequence)
        sequence.slot = None
        self._sequences[slot] = None
        self.generation[slot] += 1
        self.changes += 1
        self._free.append(slot)
        return slot

    def sync(self, sequence: Sequence) -> None:
        """Move a sequence's newest committed tokens from its slot, if it has one, to itself.

        A token is sampled from what is computed of all tokens before it, so now all but the
        newest are.
        """
        slot = sequence.slot
        if slot is None:
            return
        start, stop = sequence.num_output_tokens, int(self.output_index[slot])
        if start == stop:
            return
        recent = self.recent[slot]
        first, last = start % RECENT_TOKENS, (stop - 1) % RECENT_TOKENS + 1
        if first < last:
            sequence.tokens.frombytes(recent[first:last].tobytes())
        else:
            sequence.tokens.frombytes(recent[first:].tobytes() + recent[:last].tobytes())
        sequence.num_computed = len(sequence.tokens) - 1

    def expect_output(self, sequence: Sequence) -> None:
        """Set the event at which a sequence that is in sync has to be looked at."""
        assert sequence.slot is not None, f"no slot to set an event for: {sequence.tell()}"
        num_tokens = min(sequence.max_tokens, len(sequence.tokens) + RECENT_TOKENS)
        self.commit_event[sequence.slot] = num_tokens - sequence.num_prompt_tokens

    def running(self) -> list[Sequence]:
        """Return the sequences that have a slot, by slot."""
        return [sequence for sequence in self._sequences if sequence is not None]

    def holds(self, slot: int, generation: int) -> bool:
        """Return whether a slot is still in the use it was planned for."""
        return bool(self.generation[slot] == generation)

    def rows(self, slots: list[int]) -> Rows:
        """Gather what commit needs of some slots, all in use."""
        sequences = [self._sequences[slot] for slot in slots]
        known = [sequence for sequence in sequences if sequence is not None]
        assert len(known) == len(slots), "a row without a sequence"
        return self._gather(np.array(slots, np.intp), known)

    def select(self, rows: Rows, picks: NDArray[np.intp]) -> Rows:
        """Return some of the rows, in order."""
        return self._gather(rows.slots[picks], [rows.sequences[pick] for pick in picks.tolist()])

    def _gather(self, slots: NDArray[np.intp], sequences: list[Sequence]) -> Rows:
        return Rows(
            slots=slots,
            generations=self.generation[slots],
            sequences=sequences,
            audiences=self._audiences(slots, sequences),
            column=slots.astype(np.int32).tobytes(),
            ones=np.ones(len(slots), np.int32).tobytes(),
        )

    def _audiences(self, slots: NDArray[np.intp], sequences: list[Sequence]) -> list[Audience]:
        sources = [sequence.key.source for sequence in sequences]
        distinct = dict.fromkeys(sources)
        if len(distinct) == 1:
            return [self._audience(sources[0], None, slots)]
        audiences: list[Audience] = []
        for source in distinct:
            picks = np.array([i for i, other in enumerate(sources) if other == source], np.intp)
            audiences.append(self._audience(source, picks, slots[picks]))
        return audiences

    def _audience(
        self, source: bytes, picks: NDArray[np.intp] | None, slots: NDArray[np.intp]
    ) -> Audience:
        return Audience(
            source=source,
            picks=picks,
            requests=self._requests[slots].tobytes(),
            samples=self._samples[slots].tobytes(),
            cached_tokens=self._cached_tokens[slots].tobytes(),
            ones=np.ones(len(slots), np.int32).tobytes(),
            zeros=bytes(4 * len(slots)),
        )
