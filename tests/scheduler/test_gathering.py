from scheduler.gathering import Gathering


def test_an_idle_engine_waits_a_moment_for_a_full_step():
    gathering = Gathering(budget=100, patience_s=3.0)
    assert not gathering.waits(0.0, is_idle=True, waiting_tokens=0)
    assert gathering.deadline is None
    assert gathering.waits(10.0, is_idle=True, waiting_tokens=1)
    assert gathering.deadline == 13.0
    # Later arrivals do not make it wait longer.
    assert gathering.waits(12.0, is_idle=True, waiting_tokens=50)
    assert gathering.deadline == 13.0
    assert not gathering.waits(13.0, is_idle=True, waiting_tokens=60)


def test_a_full_step_has_nothing_to_wait_for():
    gathering = Gathering(budget=100, patience_s=3.0)
    assert gathering.waits(0.0, is_idle=True, waiting_tokens=99)
    assert not gathering.waits(0.5, is_idle=True, waiting_tokens=100)
    # What comes when it is idle again is waited for anew.
    assert gathering.waits(9.0, is_idle=True, waiting_tokens=1)
    assert gathering.deadline == 12.0


def test_a_busy_engine_does_not_wait():
    gathering = Gathering(budget=100, patience_s=3.0)
    assert not gathering.waits(0.0, is_idle=False, waiting_tokens=1)
    assert gathering.deadline is None


def test_no_patience():
    gathering = Gathering(budget=100, patience_s=0.0)
    assert not gathering.waits(5.0, is_idle=True, waiting_tokens=1)
