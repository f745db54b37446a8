"""Many replicas behind a router, under one virtual clock."""

import bisect
import heapq
import math
import random
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulation.replica import NEVER, Outcome, Replica
from benchmarks.simulation.trace import TraceRequest

_BOUND = 1.25
"""With prefix affinity, how much over the mean a replica's load may be."""
_POINTS_EACH = 64


class Router(Protocol):
    """Chooses a replica for a request."""

    def choose(self, request: TraceRequest, live: NDArray[np.int64]) -> int:
        """Return who gets the request. `live`: [replicas] requests without an end yet."""


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: TraceRequest, live: NDArray[np.int64]) -> int:  # noqa: ARG002
        """Return the next."""
        chosen = self._next % len(live)
        self._next = chosen + 1
        return chosen


class LeastLoaded:
    """The one with the fewest live requests; of equals, the first."""

    def choose(self, request: TraceRequest, live: NDArray[np.int64]) -> int:  # noqa: ARG002
        """Return the least loaded."""
        return int(live.argmin())


class PrefixAffinity:
    """A group's own replica, or the next on the ring while that has too much to do.

    Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016): no replica
    gets a request that would make it `_BOUND` times as loaded as the mean. A request without a
    group starts at a random place on the ring.
    """

    def __init__(self, num_replicas: int) -> None:
        self._draw = random.Random(0)
        ring = sorted(
            (self._draw.random(), index)
            for index in range(num_replicas)
            for _ in range(_POINTS_EACH)
        )
        self._points = [point for point, _ in ring]
        self._owners = [owner for _, owner in ring]
        self._places: dict[int, float] = {}

    def choose(self, request: TraceRequest, live: NDArray[np.int64]) -> int:
        """Return the first replica from the group's place on that stays within the bound."""
        place = self._draw.random()
        if request.prefix_group:
            place = self._places.setdefault(request.prefix_group, place)
        most = math.ceil(_BOUND * (int(live.sum()) + 1) / len(live))
        where = bisect.bisect(self._points, place) % len(self._owners)
        while live[self._owners[where]] >= most:
            where = (where + 1) % len(self._owners)
        return self._owners[where]


ROUTERS: dict[str, Callable[[int], Router]] = {
    "round-robin": lambda _: RoundRobin(),
    "least-loaded": lambda _: LeastLoaded(),
    "prefix-affinity": PrefixAffinity,
}
"""Every router, as built for a number of replicas."""


def simulate(trace: Sequence[TraceRequest], replicas: Sequence[Replica], router: Router) -> Outcome:
    """Answer a trace, which is in order of arrival; return what all of its requests got."""
    live = np.zeros(len(replicas), np.int64)
    events: list[tuple[float, int]] = []
    expected = [NEVER] * len(replicas)

    def expect(index: int) -> None:
        live[index] = replicas[index].num_live
        at = replicas[index].next_event()
        if at != expected[index]:
            expected[index] = at
            if at != NEVER:
                heapq.heappush(events, (at, index))

    def run_until(moment: float) -> None:
        while events and events[0][0] <= moment:
            at, index = heapq.heappop(events)
            # An event that has moved was entered again.
            if expected[index] == at:
                expected[index] = NEVER
                replicas[index].advance(at)
                expect(index)

    for number, request in enumerate(trace):
        run_until(request.arrival_s)
        index = router.choose(request, live)
        replicas[index].add(request, number, request.arrival_s)
        expect(index)
    run_until(NEVER)
    outcome = Outcome()
    for replica in replicas:
        outcome.merge(replica.finish())
    return outcome
