from types import SimpleNamespace

from protocol.heartbeats import HEARTBEAT_LIMIT_S, LONGEST_WAIT_S, HeartbeatWatch
from protocol.messages import Ready


def child(name="scheduler", *, ready=True):
    return SimpleNamespace(name=name, ready=Ready() if ready else None, heartbeats=0)


def look(watch, children, start, seconds, *, beating=()):
    """Look every `LONGEST_WAIT_S` for some seconds; return when somebody was stuck, and who."""
    now = start
    while now < start + seconds:
        for each in beating:
            each.heartbeats += 1
        if stuck := watch.find_stuck(children, now):
            return now - start, stuck
        now += LONGEST_WAIT_S
    return None


def test_a_child_that_reports_no_more_is_stuck_and_the_others_are_not():
    watch = HeartbeatWatch(100.0)
    first, second = child(), child("frontend-0")
    assert look(watch, [first, second], 100.0, 60.0, beating=[first, second]) is None
    assert look(watch, [first, second], 160.0, 60.0, beating=[first]) == (
        HEARTBEAT_LIMIT_S - LONGEST_WAIT_S,
        second,
    )


def test_a_child_that_is_not_ready_may_take_its_time():
    watch = HeartbeatWatch(100.0)
    loading = child(ready=False)
    assert look(watch, [loading], 100.0, 600.0) is None
    loading.ready = Ready()
    assert look(watch, [loading], 700.0, 60.0) == (HEARTBEAT_LIMIT_S - LONGEST_WAIT_S, loading)


def test_the_time_in_which_the_launcher_did_not_run_does_not_count():
    watch = HeartbeatWatch(100.0)
    stopped = child()
    assert watch.find_stuck([stopped], 100.0) is None
    assert watch.find_stuck([stopped], 10_000.0) is None
    stopped.heartbeats += 1
    assert look(watch, [stopped], 10_001.0, HEARTBEAT_LIMIT_S) is None
