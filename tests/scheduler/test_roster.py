import pytest

from protocol.errors import ErrorCode, RequestError
from protocol.messages import AbortState
from scheduler.roster import Roster
from scheduler.sequence import SequenceKey, SequenceStatus
from tests.scheduler.simulation import make_sequence


def roster_of(*sequences, remembered=100):
    roster = Roster(remembered)
    for sequence in sequences:
        roster.add(sequence)
    return roster


def end(roster, sequence):
    sequence.become(SequenceStatus.FINISHED, 0)
    roster.finish(sequence)


def test_it_finds_one_sample_or_all_of_a_request():
    first = make_sequence(0, 3, request_id=5, sample=0)
    second = make_sequence(1, 3, request_id=5, sample=1)
    elsewhere = make_sequence(2, 3, request_id=5, source=b"other")
    roster = roster_of(first, second, elsewhere)
    assert len(roster) == 3
    assert roster.find(b"frontend", 5, 1) == [second]
    assert roster.find(b"frontend", 5, -1) == [first, second]
    assert roster.find(b"frontend", 5, 2) == roster.find(b"frontend", 6, -1) == []
    assert roster.of_source(b"other") == [elsewhere]
    assert roster.of_source(b"nobody") == []
    assert set(roster.sequences()) == {first, second, elsewhere}


def test_a_live_key_cannot_be_used_twice():
    one = make_sequence(0, 3, request_id=5)
    roster = roster_of(one)
    with pytest.raises(RequestError, match="Request 5 sample 0 is still running") as caught:
        roster.check_new(one.key)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    roster.check_new(SequenceKey(b"other", 5, 0))
    end(roster, one)
    roster.check_new(one.key)


def test_a_finished_sequence_is_told_from_an_unknown_one():
    one = make_sequence(0, 3, request_id=5, sample=3)
    roster = roster_of(one)
    assert roster.past_state(b"frontend", 5, 3) is AbortState.UNKNOWN
    end(roster, one)
    assert roster.past_state(b"frontend", 5, 3) is AbortState.FINISHED
    assert roster.past_state(b"frontend", 5, -1) is AbortState.FINISHED
    assert roster.past_state(b"frontend", 5, 2) is AbortState.UNKNOWN
    assert roster.past_state(b"other", 5, 3) is AbortState.UNKNOWN


def test_every_finished_sample_of_a_request_is_remembered():
    samples = [make_sequence(sample, 3, request_id=5, sample=sample) for sample in range(3)]
    roster = roster_of(*samples)
    end(roster, samples[0])
    end(roster, samples[2])
    states = [roster.past_state(b"frontend", 5, sample) for sample in range(3)]
    assert states == [AbortState.FINISHED, AbortState.UNKNOWN, AbortState.FINISHED]


def test_the_memory_of_finished_requests_is_bounded():
    roster = Roster(remembered=2)
    for request_id in range(3):
        one = make_sequence(request_id, 3, request_id=request_id)
        roster.add(one)
        end(roster, one)
    states = [roster.past_state(b"frontend", request_id, 0) for request_id in range(3)]
    assert states == [AbortState.UNKNOWN, AbortState.FINISHED, AbortState.FINISHED]


def test_deadlines_come_up_once_and_in_order():
    late, soon = make_sequence(0, 3, deadline=20.0), make_sequence(1, 3, deadline=10.0)
    never = make_sequence(2, 3)
    for number, one in enumerate((late, soon, never)):
        one.key = one.key._replace(request_id=number)
    roster = roster_of(late, soon, never)
    assert roster.next_deadline() == 10.0
    assert roster.expired(9.9) == []
    assert roster.expired(10.0) == [soon]
    assert roster.expired(25.0) == [late]
    assert roster.next_deadline() is None


def test_a_finished_sequence_does_not_expire():
    one = make_sequence(0, 3, deadline=10.0)
    roster = roster_of(one)
    end(roster, one)
    assert roster.next_deadline() is None
    assert roster.expired(50.0) == []


def test_deadlines_of_finished_sequences_are_not_kept():
    roster = Roster()
    for number in range(1000):
        one = make_sequence(number, 3, request_id=number, deadline=1e9)
        roster.add(one)
        end(roster, one)
    assert len(roster._deadlines) < 100
