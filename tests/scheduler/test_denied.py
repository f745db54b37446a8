from scheduler.denied import Denied
from scheduler.sequence import SequenceStatus
from tests.scheduler.simulation import make_sequence


def test_a_denial_holds_until_there_is_more_of_something():
    denied, sequence = Denied(), make_sequence(0, 4)
    denied.deny(sequence, num_free=5, num_running=3)
    assert denied.still_holds(sequence, num_free=5, num_running=3)
    assert denied.still_holds(sequence, num_free=4, num_running=4)
    assert not denied.still_holds(sequence, num_free=6, num_running=3)
    assert not denied.still_holds(sequence, num_free=5, num_running=2)
    assert not denied.still_holds(make_sequence(1, 4), num_free=5, num_running=3)
    denied.computed_chunk()
    assert not denied.still_holds(sequence, num_free=5, num_running=3)


def test_who_was_denied_waits_until_it_is_admitted_or_ends():
    denied, sequence, other = Denied(), make_sequence(0, 4), make_sequence(1, 4)
    assert denied.waits is None
    denied.deny(sequence, num_free=5, num_running=3)
    denied.admitted(other)
    assert denied.waits is sequence
    assert not denied.still_holds(sequence, num_free=5, num_running=3)
    denied.admitted(sequence)
    assert denied.waits is None
    denied.deny(other, num_free=5, num_running=3)
    other.become(SequenceStatus.FINISHED, 1)
    assert denied.waits is None
