import pytest

from protocol.errors import ErrorCode, RequestError
from scheduler.policy import Order
from scheduler.sequence import MAX_PASSES, SequenceStatus
from scheduler.waiting_queue import WaitingQueue
from tests.scheduler.simulation import make_sequence


def queue_of(*sequences):
    queue = WaitingQueue(100, 10_000)
    for sequence in sequences:
        queue.push(sequence)
    return queue


def drain(queue, order):
    taken = []
    while (sequence := queue.first(order)) is not None:
        queue.admit(sequence)
        taken.append(sequence)
    return taken


def test_first_come_first_served_within_a_priority():
    late, early, urgent = make_sequence(2, 5), make_sequence(1, 9), make_sequence(3, 7, priority=1)
    assert drain(queue_of(late, early, urgent), Order.ARRIVAL) == [urgent, early, late]


def test_the_shortest_within_a_priority():
    long, short = make_sequence(1, 9), make_sequence(2, 5)
    urgent = make_sequence(3, 7, priority=1)
    assert drain(queue_of(long, short, urgent), Order.SHORTEST) == [urgent, short, long]


def test_a_sequence_that_comes_back_takes_its_old_place():
    queue = queue_of(make_sequence(1, 5), make_sequence(2, 5))
    preempted = make_sequence(0, 5)
    queue.push(preempted)
    assert queue.first(Order.ARRIVAL) is preempted


def test_the_oldest_is_next_after_it_has_been_passed_over_often_enough():
    oldest = make_sequence(0, 50, priority=-1)
    queue = queue_of(oldest)
    for arrival in range(1, MAX_PASSES + 1):
        queue.push(make_sequence(arrival, 2))
        assert queue.first(Order.ARRIVAL) is not oldest
        queue.admit(queue.first(Order.ARRIVAL))
    queue.push(make_sequence(99, 2))
    assert queue.first(Order.ARRIVAL) is queue.first(Order.SHORTEST) is oldest
    queue.admit(oldest)
    assert queue.first(Order.ARRIVAL) is not oldest


def test_passes_are_counted_anew_for_the_next_oldest():
    first, second = make_sequence(0, 50, priority=-1), make_sequence(1, 50, priority=-1)
    queue = queue_of(first, second)
    for arrival in range(2, MAX_PASSES + 1):
        queue.push(make_sequence(arrival, 2))
        queue.admit(queue.first(Order.ARRIVAL))
    queue.remove(first)
    queue.push(make_sequence(98, 2))
    queue.push(make_sequence(99, 2))
    queue.admit(queue.first(Order.ARRIVAL))
    assert queue.first(Order.ARRIVAL) is not second


def test_it_counts_requests_and_tokens():
    one, two = make_sequence(1, 9), make_sequence(2, 5)
    queue = queue_of(one, two)
    assert (len(queue), queue.num_tokens) == (2, 14)
    queue.remove(one)
    assert (len(queue), queue.num_tokens) == (1, 5)
    assert queue.sequences() == [two]


def test_a_full_queue_refuses_by_requests_and_by_tokens():
    queue, other = WaitingQueue(2, 10), (b"frontend", 9)
    queue.push(make_sequence(0, 8))
    queue.check_room(2, other)
    with pytest.raises(RequestError, match="8 tokens are waiting already") as by_tokens:
        queue.check_room(3, other)
    assert by_tokens.value.code is ErrorCode.OVERLOADED
    queue.push(make_sequence(1, 1))
    with pytest.raises(RequestError, match="2 sequences are waiting already") as by_requests:
        queue.check_room(1, other)
    assert by_requests.value.code is ErrorCode.OVERLOADED


def test_where_nobody_else_waits_a_request_may_with_all_its_samples():
    queue, request = WaitingQueue(1, 10), (b"frontend", 7)
    queue.check_room(1000, request)
    samples = [make_sequence(i, 1000, request_id=7, sample=i) for i in range(3)]
    for sample in samples:
        queue.push(sample)
        queue.check_room(1000, request)
    other = make_sequence(3, 1, request_id=8)
    with pytest.raises(RequestError, match="3 sequences are waiting already"):
        queue.check_room(1, other.key.request)
    queue.push(other)
    with pytest.raises(RequestError, match="4 sequences are waiting already"):
        queue.check_room(1, request)
    for sequence in [*samples, other]:
        queue.remove(sequence)
    queue.check_room(1000, other.key.request)


def test_what_does_not_wait_cannot_be_taken_out():
    with pytest.raises(AssertionError, match="does not wait"):
        queue_of(make_sequence(0, 5)).remove(make_sequence(0, 6))


def places(queue, most):
    return [(place.sequence.arrival, place.position) for place in queue.take_places(most)]


def test_places_are_told_in_turn():
    queue = queue_of(*(make_sequence(arrival, 2) for arrival in range(5)))
    assert places(queue, 2) == [(0, 1), (1, 2)]
    assert places(queue, 2) == [(2, 3), (3, 4)]
    assert places(queue, 2) == [(4, 5)]
    assert places(queue, 9) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert places(queue_of(), 9) == []


def test_who_was_told_and_is_admitted_hears_of_that_once():
    told, other = make_sequence(0, 2), make_sequence(1, 2)
    queue = queue_of(told, other)
    assert places(queue, 1) == [(0, 1)]
    for sequence in (told, other):
        queue.admit(sequence)
        sequence.status = SequenceStatus.PREFILLING
    assert places(queue, 1) == [(0, 0)]
    assert places(queue, 1) == []


def test_who_has_ended_or_waits_again_is_not_told_of_an_admission():
    ended, again = make_sequence(0, 2), make_sequence(1, 2)
    queue = queue_of(ended, again)
    queue.take_places(2)
    queue.admit(ended)
    queue.admit(again)
    ended.status = SequenceStatus.FINISHED
    again.status = SequenceStatus.PREEMPTED
    queue.push(again)
    assert places(queue, 2) == [(1, 1)]


def test_places_follow_the_order_by_priority():
    queue = queue_of(make_sequence(0, 2, priority=-1), make_sequence(1, 2))
    assert places(queue, 2) == [(1, 1), (0, 2)]
