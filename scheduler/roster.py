"""Every live sequence by its key, the deadlines, and which sequences ended not long ago."""

import heapq
from collections import OrderedDict

from protocol.errors import ErrorCode, RequestError
from protocol.messages import AbortState
from scheduler.sequence import Sequence, SequenceKey, SequenceStatus

FINISHED_REMEMBERED = 65_536
"""Requests whose end is remembered, to tell "finished" from "unknown" in an AbortAck."""


class Roster:
    """Finds live sequences; remembers a bounded number of finished requests."""

    def __init__(self, remembered: int = FINISHED_REMEMBERED) -> None:
        self._live: dict[bytes, dict[int, dict[int, Sequence]]] = {}
        self._num_live = 0
        # Request to the set of its ended samples, as bits.
        self._finished: OrderedDict[tuple[bytes, int], int] = OrderedDict()
        self._remembered = remembered
        # Entries of sequences that ended by other means are dropped when they come up, or when
        # they are the majority: an hour's deadlines would keep an hour's prompts in memory.
        self._deadlines: list[tuple[float, int, Sequence]] = []

    def __len__(self) -> int:
        return self._num_live

    def check_new(self, key: SequenceKey) -> None:
        """Raise RequestError (INVALID_REQUEST) if a sequence with this key is live."""
        if self.find(key.source, key.request_id, key.sample):
            raise RequestError(
                ErrorCode.INVALID_REQUEST,
                f"Request {key.request_id} sample {key.sample} is still running; a request id "
                "must be unique among the live ones.",
                param="request_id",
            )

    def add(self, sequence: Sequence) -> None:
        """Enter a new sequence."""
        source, request_id, sample = sequence.key
        self._live.setdefault(source, {}).setdefault(request_id, {})[sample] = sequence
        self._num_live += 1
        if sequence.deadline is not None:
            heapq.heappush(self._deadlines, (sequence.deadline, sequence.arrival, sequence))

    def finish(self, sequence: Sequence) -> None:
        """Take out a sequence that has ended, and remember that it did."""
        source, request_id, sample = sequence.key
        requests = self._live[source]
        samples = requests[request_id]
        del samples[sample]
        self._num_live -= 1
        if not samples:
            del requests[request_id]
        if not requests:
            del self._live[source]
        bits = self._finished.pop((source, request_id), 0)
        self._finished[source, request_id] = bits | 1 << sample
        if len(self._finished) > self._remembered:
            self._finished.popitem(last=False)
        if len(self._deadlines) > 2 * self._num_live + 64:
            self._forget_past_deadlines()

    def find(self, source: bytes, request_id: int, sample: int) -> list[Sequence]:
        """Return the live sequences of a request's sample; -1: of all its samples."""
        samples = self._live.get(source, {}).get(request_id, {})
        if sample < 0:
            return list(samples.values())
        return [samples[sample]] if sample in samples else []

    def of_source(self, source: bytes) -> list[Sequence]:
        """Return all live sequences of a frontend."""
        requests = self._live.get(source, {})
        return [sequence for samples in requests.values() for sequence in samples.values()]

    def sequences(self) -> list[Sequence]:
        """Return all live sequences."""
        return [sequence for source in self._live for sequence in self.of_source(source)]

    def past_state(self, source: bytes, request_id: int, sample: int) -> AbortState:
        """Return what is known about a sequence that is not live; -1: about any sample."""
        bits = self._finished.get((source, request_id), 0)
        wanted = bits if sample < 0 else bits & 1 << sample
        return AbortState.FINISHED if wanted else AbortState.UNKNOWN

    def expired(self, now: float) -> list[Sequence]:
        """Return the live sequences whose deadline has come, and forget those deadlines."""
        expired: list[Sequence] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, sequence = heapq.heappop(self._deadlines)
            if sequence.status is not SequenceStatus.FINISHED:
                expired.append(sequence)
        return expired

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of a live sequence."""
        while self._deadlines and self._deadlines[0][2].status is SequenceStatus.FINISHED:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _forget_past_deadlines(self) -> None:
        self._deadlines = [
            entry for entry in self._deadlines if entry[2].status is not SequenceStatus.FINISHED
        ]
        heapq.heapify(self._deadlines)
