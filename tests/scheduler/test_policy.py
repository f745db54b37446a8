import pytest

from scheduler.policy import (
    LATENCY_BUDGET,
    PROGRESS_TOKENS,
    THROUGHPUT_BUDGET,
    LatencyPolicy,
    Order,
    Share,
    ThroughputPolicy,
    choose_victim,
    headroom,
    prefill_key,
)
from tests.scheduler.simulation import make_sequence


def test_the_default_budgets():
    assert (THROUGHPUT_BUDGET, LATENCY_BUDGET) == (16_384, 2_048)
    assert ThroughputPolicy().budget == 16_384
    assert LatencyPolicy().budget == 2_048


def test_throughput_gives_everything_to_the_first():
    assert ThroughputPolicy().shares(100) == [Share(100, Order.ARRIVAL)]


@pytest.mark.parametrize(("room", "shares"), [(100, (50, 50)), (7, (4, 3)), (1, (1, 0))])
def test_latency_gives_half_to_the_first_and_half_to_the_shortest(room, shares):
    first, shortest = shares
    assert LatencyPolicy().shares(room) == [
        Share(first, Order.ARRIVAL),
        Share(shortest, Order.SHORTEST),
    ]


def test_higher_priorities_come_first_in_every_order():
    urgent = make_sequence(9, 100, priority=1)
    early = make_sequence(0, 100)
    short = make_sequence(5, 2)
    for order, expected in (
        (Order.ARRIVAL, [urgent, early, short]),
        (Order.SHORTEST, [urgent, short, early]),
    ):
        ranked = sorted([short, early, urgent], key=lambda each: prefill_key(each, order))
        assert ranked == expected


@pytest.mark.parametrize(
    ("num_running", "block_size", "calm", "pressed"),
    [(0, 16, 0, 0), (10, 16, 10, 20), (10, 64, 10, 20), (10, 256, 3, 6), (1, 256, 1, 2)],
)
def test_an_admission_leaves_room_to_grow(num_running, block_size, calm, pressed):
    assert headroom(num_running, block_size, under_pressure=False) == calm
    assert headroom(num_running, block_size, under_pressure=True) == pressed


def test_the_newest_of_the_lowest_priority_gives_way():
    low_old = make_sequence(1, 4, priority=-1)
    low_new = make_sequence(2, 4, priority=-1)
    newest = make_sequence(3, 4)
    oldest = make_sequence(0, 4)
    assert choose_victim([newest, low_old, oldest, low_new]) is low_new


def test_the_first_in_rank_never_gives_way():
    one = make_sequence(0, 4)
    assert choose_victim([one]) is None
    assert choose_victim([]) is None
    other = make_sequence(1, 4)
    other.protected_until = 1000
    assert choose_victim([one, other]) is other


def test_no_higher_priority_gives_way_for_a_resumed_sequence():
    first, high = (make_sequence(arrival, 4, priority=1) for arrival in range(2))
    resumed = make_sequence(2, 4)
    resumed.protected_until = 1000
    assert choose_victim([first, high, resumed]) is resumed


def test_a_resumed_sequence_gives_way_only_without_an_alternative_until_it_has_progressed():
    first, second, resumed = (make_sequence(arrival, 4) for arrival in range(3))
    resumed.protected_until = len(resumed.tokens) + PROGRESS_TOKENS
    assert choose_victim([first, second, resumed]) is second
    resumed.tokens.extend(range(PROGRESS_TOKENS))
    assert choose_victim([first, second, resumed]) is resumed
