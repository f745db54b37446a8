"""The sequences that wait for a slot and blocks, bounded and sorted.

Sorted three ways, because three questions are asked of it: who is first by priority and arrival,
who is shortest, and who has waited longest. Nobody starves: after `MAX_PASSES` admissions of
others, the longest-waiting sequence is the only one that may be admitted.
"""

from bisect import bisect_left, insort

from protocol.errors import ErrorCode, RequestError
from scheduler.policy import MAX_PASSES, Order
from scheduler.sequence import Sequence

Entry = tuple[tuple[int, ...], Sequence]
"""A sequence behind its sort key. Keys end with the arrival, so no two are equal."""


class WaitingQueue:
    """Waiting and preempted sequences.

    The bounds refuse new sequences only: what once ran is always taken back.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._by_order: dict[Order, list[Entry]] = {order: [] for order in Order}
        self._by_age: list[Entry] = []
        self._num_tokens = 0
        self._passes = 0

    def __len__(self) -> int:
        return len(self._by_age)

    @property
    def num_tokens(self) -> int:
        """Tokens to prefill of everything that waits."""
        return self._num_tokens

    def check_room(self, num_tokens: int) -> None:
        """Raise RequestError (OVERLOADED) unless a new sequence of so many tokens may wait."""
        if len(self) >= self._max_requests:
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"{len(self)} sequences are waiting already; at most {self._max_requests} may.",
            )
        if self and self._num_tokens + num_tokens > self._max_tokens:
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"{self._num_tokens} tokens are waiting already; with {num_tokens} more it would "
                f"be over the limit of {self._max_tokens}.",
            )

    def push(self, sequence: Sequence) -> None:
        """Enter a sequence at its place."""
        for order, entries in self._by_order.items():
            insort(entries, (_key(sequence, order), sequence))
        insort(self._by_age, ((sequence.arrival,), sequence))
        self._num_tokens += len(sequence.tokens)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out that is no longer wanted."""
        for order, entries in self._by_order.items():
            _discard(entries, _key(sequence, order))
        if _discard(self._by_age, (sequence.arrival,)) == 0:
            self._passes = 0
        self._num_tokens -= len(sequence.tokens)

    def admit(self, sequence: Sequence) -> None:
        """Take a sequence out that starts to run, counting whom it passed over."""
        if self._by_age[0][1] is not sequence:
            self._passes += 1
        self.remove(sequence)

    def first(self, order: Order) -> Sequence | None:
        """Return who is to be admitted next, without taking it out."""
        if not self._by_age:
            return None
        if self._passes >= MAX_PASSES:
            return self._by_age[0][1]
        return self._by_order[order][0][1]

    def sequences(self) -> list[Sequence]:
        """Return everything that waits, oldest first."""
        return [sequence for _, sequence in self._by_age]


def _key(sequence: Sequence, order: Order) -> tuple[int, ...]:
    """Return `prefill_key`, of which a waiting sequence has everything pending."""
    match order:
        case Order.ARRIVAL:
            return sequence.rank
        case Order.SHORTEST:
            return (-sequence.priority, len(sequence.tokens), sequence.arrival)


def _discard(entries: list[Entry], key: tuple[int, ...]) -> int:
    """Remove the entry of a key and return where it was."""
    # A one-tuple sorts before every longer one that starts with it, so no sequence is compared.
    where = bisect_left(entries, (key,))
    waits = where < len(entries) and entries[where][0] == key
    assert waits, "a sequence that does not wait cannot be taken out"
    del entries[where]
    return where
