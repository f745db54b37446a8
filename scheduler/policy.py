"""What goes into a step, and who gives way: small rules without state.

Every running sequence that can decode gets its row in every step; what is left of the step's
token budget goes to prefill, in *shares*. A share has an order: first come, first served within a
priority, or fewest pending tokens first within a priority. What one share leaves over flows to the
next.

The budget bounds the work of a step, and with it the gap between two tokens of a running stream;
a target for that gap bounds it in seconds.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from scheduler.sequence import Sequence

THROUGHPUT_BUDGET = 16_384
LATENCY_BUDGET = 2_048

PROGRESS_TOKENS = 16
"""Tokens that a resumed sequence commits before it may be the first choice for preemption."""

HEADROOM_TOKENS = 64
"""Tokens that each running sequence can grow by after an admission, in blocks of at most as many:
of smaller blocks, one."""

WORTH_WAITING_TOKENS = 256
"""Tokens that a sequence saves, at least, by waiting until another has computed its prefix."""

PROMPT_PART = 0.1
"""Part of the target for a step's time that is for prompts, however long decode rows take."""

UNMEASURED_TOKENS = 32
"""Prompt tokens of a step with decode rows that has a target, before its cost is known."""


class Order(enum.Enum):
    """Who comes first among the sequences with tokens to prefill."""

    ARRIVAL = "arrival"
    SHORTEST = "shortest"


class Share(NamedTuple):
    """A part of a step's room for prefill."""

    num_tokens: int
    order: Order


class Policy(Protocol):
    """How a step's room is divided."""

    @property
    def budget(self) -> int:
        """Most tokens that one step computes."""

    @property
    def gather_s(self) -> float:
        """Seconds that arrivals wait for company, where nothing else runs; 0: they do not."""

    @property
    def itl_target_s(self) -> float | None:
        """Seconds that a step with decode rows may take by what is known of its cost; None: any."""

    def shares(self, room: int) -> list[Share]:
        """Divide what the decode rows leave of the budget."""


@dataclass(frozen=True, slots=True)
class ThroughputPolicy:
    """Large chunks, in order of arrival: the most tokens a second, whoever waits."""

    budget: int = THROUGHPUT_BUDGET
    gather_s: float = 0.003
    itl_target_s: float | None = None

    def shares(self, room: int) -> list[Share]:
        """Give everything to the first in the queue, then to the next."""
        return [Share(room, Order.ARRIVAL)]


@dataclass(frozen=True, slots=True)
class LatencyPolicy:
    """Small steps, so that running streams flow; half of the room for whoever is nearly done.

    The first half goes in order, so the oldest prompt always advances. The second half goes to the
    shortest, so a short prompt does not wait for a long one's prefill.
    """

    budget: int = LATENCY_BUDGET
    gather_s: float = 0.0
    itl_target_s: float | None = None

    def shares(self, room: int) -> list[Share]:
        """Give one half to the first in the queue, the other to the shortest."""
        return [Share(room - room // 2, Order.ARRIVAL), Share(room // 2, Order.SHORTEST)]


def prefill_key(sequence: Sequence, order: Order) -> tuple[int, ...]:
    """Return what sorts sequences by an order, the first to be served first."""
    match order:
        case Order.ARRIVAL:
            return sequence.rank
        case Order.SHORTEST:
            # One that runs advances by the share in order of arrival; if it took this one too once
            # it has aged, nobody short would start before it is done.
            if sequence.has_aged and not sequence.is_running:
                return (-sequence.urgency, 0, sequence.arrival)
            return (-sequence.priority, sequence.num_pending, sequence.arrival)


def headroom(num_running: int, block_size: int, *, under_pressure: bool) -> int:
    """Return how many free blocks an admission must leave for the running sequences to grow.

    Twice as many once blocks have run out, until a sequence ends, or a preempted sequence would
    come back only to push the next one out.
    """
    growth = min(num_running, -(-num_running * HEADROOM_TOKENS // block_size))
    return growth * (2 if under_pressure else 1)


def choose_victim(running: Iterable[Sequence]) -> Sequence | None:
    """Return who gives up its blocks: the newest of the lowest priority.

    The first in rank is never chosen, so somebody always reaches its end. A sequence that has
    just been resumed is chosen only if nobody else of its priority is left. None: only the first in
    rank is left.
    """
    first_to_last = sorted(running, key=lambda sequence: sequence.rank)
    if len(first_to_last) < 2:
        return None
    last = first_to_last[-1]
    lowest = [each for each in first_to_last[1:] if each.urgency == last.urgency]
    unprotected = [each for each in lowest if len(each.tokens) >= each.protected_until]
    return unprotected[-1] if unprotected else last
