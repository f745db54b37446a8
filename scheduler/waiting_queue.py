"""The sequences that wait for a slot and blocks, bounded and sorted.

Sorted three ways, because three questions are asked of it: who is first by priority and arrival,
who is shortest, and who has waited longest.

Nobody starves. Every admission that passes over older sequences with tokens to prefill, waiting or
running, is counted against the oldest of them that has not aged. At `MAX_PASSES` it has aged: from
then on it comes before all that have not, and aged ones are served in order of arrival. So while k
older sequences live, a sequence that waits is admitted at the latest with the
((MAX_PASSES + 1) * (k + 1) + r)th admission from now, whatever arrives; r is how often those
older ones are admitted again after a preemption (docs/scheduling.md has the proof).
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import islice
from typing import NamedTuple

from protocol.errors import ErrorCode, RequestError
from scheduler.policy import Order
from scheduler.sequence import MAX_PASSES, RequestKey, Sequence

Entry = tuple[tuple[int, ...], Sequence]
"""A sequence behind its sort key. Keys end with the arrival, so no two are equal."""


class Place(NamedTuple):
    """Where a sequence is."""

    sequence: Sequence
    position: int
    """1: the next in order of priority and arrival; 0: it has been admitted."""


class WaitingQueue:
    """Waiting and preempted sequences.

    The bounds refuse new sequences only: what once ran is always taken back.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._by_order: dict[Order, list[Entry]] = {order: [] for order in Order}
        # By arrival, without those that have aged: who ages next is the first of these.
        self._unaged: list[Entry] = []
        self._of_request: Counter[RequestKey] = Counter()
        self._num_tokens = 0
        self.admitted_tokens = 0
        """Tokens that have waited and been admitted; only grows."""
        self._told_and_admitted: list[Sequence] = []
        self._next_told = 0

    def __len__(self) -> int:
        return len(self._by_order[Order.ARRIVAL])

    @property
    def num_tokens(self) -> int:
        """Tokens to prefill of everything that waits."""
        return self._num_tokens

    def check_room(self, num_tokens: int, request: RequestKey) -> None:
        """Raise RequestError (OVERLOADED) unless a new sequence of so many tokens may wait.

        Where nobody else waits, a request may: with all its samples, and however long it is.
        """
        if self._of_request[request] == len(self):
            return
        if len(self) >= self._max_requests:
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"{len(self)} sequences are waiting already; at most {self._max_requests} may.",
            )
        if self._num_tokens + num_tokens > self._max_tokens:
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"{self._num_tokens} tokens are waiting already; with {num_tokens} more it would "
                f"be over the limit of {self._max_tokens}.",
            )

    def push(self, sequence: Sequence) -> None:
        """Enter a sequence at its place."""
        for order, entries in self._by_order.items():
            insort(entries, (_key(sequence, order), sequence))
        if not sequence.has_aged:
            insort(self._unaged, ((sequence.arrival,), sequence))
        self._of_request[sequence.key.request] += 1
        self._num_tokens += len(sequence.tokens)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out that is no longer wanted."""
        for order, entries in self._by_order.items():
            _discard(entries, _key(sequence, order))
        if not sequence.has_aged:
            _discard(self._unaged, (sequence.arrival,))
        self._of_request[sequence.key.request] -= 1
        if not self._of_request[sequence.key.request]:
            del self._of_request[sequence.key.request]
        self._num_tokens -= len(sequence.tokens)

    def admit(
        self,
        sequence: Sequence,
        prefilling: Iterable[Sequence] = (),
        unwilling: Collection[Sequence] = (),
    ) -> None:
        """Take a sequence out that starts to run, and let the oldest it passes over age.

        `prefilling`: the running sequences that may have tokens to prefill. `unwilling`: those that
        wait by their own choice, and so are not passed over.
        """
        self.remove(sequence)
        self.admitted_tokens += len(sequence.tokens)
        if sequence.is_place_told:
            sequence.is_place_told = False
            self._told_and_admitted.append(sequence)
        unserved = [each for each in prefilling if each.num_pending and not each.has_aged]
        unserved += islice((each for _, each in self._unaged if each not in unwilling), 1)
        oldest = min(unserved, key=lambda each: each.arrival, default=sequence)
        if oldest.arrival >= sequence.arrival:
            return
        if oldest.is_running or oldest.passes + 1 < MAX_PASSES:
            oldest.passes += 1
        else:
            # It ages, which changes its keys.
            self.remove(oldest)
            oldest.passes += 1
            self.push(oldest)

    def first(self, order: Order, unwilling: Collection[Sequence] = ()) -> Sequence | None:
        """Return who is to be admitted next, but for the unwilling, without taking it out."""
        willing = (each for _, each in self._by_order[order] if each not in unwilling)
        return next(willing, None)

    def take_places(self, most: int) -> list[Place]:
        """Return where sequences are, for their frontends to be told.

        These are all whose place was told and who have been admitted since, and `most` of those
        that wait: those that come after the last call's, or the first.
        """
        admitted, self._told_and_admitted = self._told_and_admitted, []
        places = [Place(each, 0) for each in admitted if each.is_running]
        start = self._next_told if self._next_told < len(self) else 0
        self._next_told = start + most
        window = self._by_order[Order.ARRIVAL][start : start + most]
        for position, (_, sequence) in enumerate(window, start + 1):
            sequence.is_place_told = True
            places.append(Place(sequence, position))
        return places

    def sequences(self) -> list[Sequence]:
        """Return everything that waits, oldest first."""
        waiting = (sequence for _, sequence in self._by_order[Order.ARRIVAL])
        return sorted(waiting, key=lambda sequence: sequence.arrival)


def _key(sequence: Sequence, order: Order) -> tuple[int, ...]:
    """Return `prefill_key`, of which a waiting sequence has everything pending."""
    match order:
        case Order.ARRIVAL:
            return sequence.rank
        case Order.SHORTEST:
            num_pending = 0 if sequence.has_aged else len(sequence.tokens)
            return (-sequence.urgency, num_pending, sequence.arrival)


def _discard(entries: list[Entry], key: tuple[int, ...]) -> None:
    """Remove the entry of a key."""
    # A one-tuple sorts before every longer one that starts with it, so no sequence is compared.
    where = bisect_left(entries, (key,))
    waits = where < len(entries) and entries[where][0] == key
    assert waits, "a sequence that does not wait cannot be taken out"
    del entries[where]
