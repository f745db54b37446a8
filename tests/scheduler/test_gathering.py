from functools import partial

from scheduler.gathering import Gathering


def make(patience_s: float = 3.0):
    gathering = Gathering(budget=100, patience_s=patience_s)
    return gathering, partial(gathering.waits, has_rows=False, is_computing=False)


def test_an_idle_engine_waits_a_moment_for_a_full_step():
    gathering, waits = make()
    assert not waits(0.0, waiting_tokens=0)
    assert gathering.deadline is None
    assert waits(10.0, waiting_tokens=1)
    assert gathering.deadline == 13.0
    # Later arrivals do not make it wait longer.
    assert waits(12.0, waiting_tokens=50)
    assert gathering.deadline == 13.0
    assert not waits(13.0, waiting_tokens=60)


def test_a_full_step_has_nothing_to_wait_for():
    gathering, waits = make()
    assert waits(0.0, waiting_tokens=99)
    assert not waits(0.5, waiting_tokens=100)
    # What comes afterwards is waited for anew.
    assert waits(9.0, waiting_tokens=1)
    assert gathering.deadline == 12.0


def test_while_a_step_computes_arrivals_gather_until_it_ends():
    _, waits = make()
    assert waits(0.0, waiting_tokens=10, is_computing=True)
    assert waits(50.0, waiting_tokens=20, is_computing=True)
    assert not waits(50.5, waiting_tokens=100, is_computing=True)
    assert waits(60.0, waiting_tokens=10, is_computing=True)
    # They have waited long enough by then.
    assert not waits(70.0, waiting_tokens=10)


def test_running_sequences_never_wait():
    gathering, waits = make()
    assert not waits(0.0, waiting_tokens=1, has_rows=True)
    assert not waits(0.0, waiting_tokens=1, has_rows=True, is_computing=True)
    assert gathering.deadline is None


def test_no_patience():
    _, waits = make(patience_s=0.0)
    assert not waits(5.0, waiting_tokens=1)
    assert not waits(5.0, waiting_tokens=1, is_computing=True)
