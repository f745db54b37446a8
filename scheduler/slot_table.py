"""The running sequences by slot, as columns.

A step at 256 running sequences has 50 microseconds (`benchmarks/scheduler.py`), 0.2 for each of
its rows: too little to look at each one in Python. So what every step needs of every row lies in
numpy columns indexed by slot, and two of them, `plan_event` and `commit_event`, say at which
length or output index a row needs more than counting. Python looks at those rows only.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.sequence import Sequence

NEVER = np.iinfo(np.int32).max
"""An event that does not come."""

RECENT_TOKENS = 256
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


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some slots in order, as they were in use when a plan named them."""

    slots: NDArray[np.intp]
    generations: NDArray[np.int64]
    ones: bytes
    """A column of ones, as long."""

    def __len__(self) -> int:
        return len(self.slots)

    def column(self) -> bytes:
        """Return the slots as the column of a plan."""
        return self.slots.astype(np.int32).tobytes()


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
        self._sources = np.zeros(num_slots, np.int32)
        # Frontends with running sequences, by a number that a column can hold.
        self._source_numbers: dict[bytes, int] = {}
        self._source_names: dict[int, bytes] = {}
        self._source_uses: dict[bytes, int] = {}
        self._next_source = 0
        self._ones = np.ones(num_slots, np.int32).tobytes()
        self._heard: tuple[Rows | None, list[Audience]] = (None, [])
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

    def positions_read(self, rows: Rows) -> int:
        """Return how many positions the decode rows of a next step attend to, all together."""
        return int(self.length[rows.slots].sum(dtype=np.int64)) + len(rows)

    def take(self, sequence: Sequence) -> int:
        """Give a slot to a sequence whose `cached_tokens` are known; return the slot."""
        assert sequence.cached_tokens is not None, f"not looked up: {sequence.tell()}"
        slot = self._free.pop()
        sequence.slot = slot
        self._sequences[slot] = sequence
        self._requests[slot] = sequence.key.request_id
        self._samples[slot] = sequence.key.sample
        self._cached_tokens[slot] = sequence.cached_tokens
        self._sources[slot] = self._enter_source(sequence.key.source)
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
        self._leave_source(sequence.key.source)
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

    def sequence(self, slot: int) -> Sequence:
        """Return the sequence in a slot that is in use."""
        sequence = self._sequences[slot]
        assert sequence is not None, f"slot {slot} is free"
        return sequence

    def rows(self, slots: Iterable[int] | NDArray[np.intp]) -> Rows:
        """Return slots that are in use now, as rows."""
        array = slots if isinstance(slots, np.ndarray) else np.array(list(slots), np.intp)
        return Rows(array, self.generation[array], self._ones[: 4 * len(array)])

    def audiences(self, rows: Rows) -> list[Audience]:
        """Return who hears about rows whose slots have not changed hands.

        Remembers its last answer: as long as nobody comes or goes, all steps have the same rows.
        """
        asked, audiences = self._heard
        if asked is not rows:
            audiences = [
                self._audience(self._source_names[number], picks, rows)
                for number, picks in self._split(rows)
            ]
            self._heard = (rows, audiences)
        return audiences

    def _split(self, rows: Rows) -> Iterator[tuple[int, NDArray[np.intp] | None]]:
        """Yield each source's number and which of the rows are its own; None: all."""
        numbers = self._sources[rows.slots]
        distinct: list[int] = list(dict.fromkeys(numbers.tolist()))
        for number in distinct:
            yield number, np.flatnonzero(numbers == number) if len(distinct) > 1 else None

    def _audience(self, source: bytes, picks: NDArray[np.intp] | None, rows: Rows) -> Audience:
        slots = rows.slots if picks is None else rows.slots[picks]
        return Audience(
            source=source,
            picks=picks,
            requests=self._requests[slots].tobytes(),
            samples=self._samples[slots].tobytes(),
            cached_tokens=self._cached_tokens[slots].tobytes(),
            ones=self._ones[: 4 * len(slots)],
            zeros=bytes(4 * len(slots)),
        )

    def _enter_source(self, source: bytes) -> int:
        number = self._source_numbers.get(source)
        if number is None:
            number, self._next_source = self._next_source, self._next_source + 1
            self._source_numbers[source] = number
            self._source_names[number] = source
        self._source_uses[source] = self._source_uses.get(source, 0) + 1
        return number

    def _leave_source(self, source: bytes) -> None:
        self._source_uses[source] -= 1
        if self._source_uses[source] == 0:
            del self._source_uses[source]
            del self._source_names[self._source_numbers.pop(source)]
