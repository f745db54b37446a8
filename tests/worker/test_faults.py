import os
import signal

import pytest

from worker.faults import FaultInjector, Faults


def test_by_default_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.faults.time.sleep", lambda _: pytest.fail("slept"))
    for step_id in range(100):
        FaultInjector(Faults(), seed=0).before_step(step_id)


def test_delays_come_from_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("worker.faults.time.sleep", waits.append)
    for _ in range(2):
        injector = FaultInjector(Faults(min_delay_ms=2.0, max_delay_ms=4.0), seed=1)
        injector.before_step(1)
        injector.before_step(2)
    assert waits[:2] == waits[2:]
    assert waits[0] != waits[1]
    assert all(0.002 <= wait <= 0.004 for wait in waits)


def test_memory_ends_in_the_step_named() -> None:
    injector = FaultInjector(Faults(memory_step=3), seed=0)
    injector.before_step(2)
    with pytest.raises(MemoryError):
        injector.before_step(3)
    injector.before_step(4)


def test_a_crash_comes_in_the_step_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kills: list[tuple[int, int]] = []
    monkeypatch.setattr("worker.faults.os.kill", lambda *arguments: kills.append(arguments))
    injector = FaultInjector(Faults(crash_step=3), seed=0)
    injector.before_step(2)
    assert kills == []
    injector.before_step(3)
    assert kills == [(os.getpid(), signal.SIGKILL)]


@pytest.mark.parametrize(("low", "high"), [(-1.0, 0.0), (2.0, 1.0)])
def test_delays_must_make_sense(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="--fault-min-delay-ms"):
        Faults(min_delay_ms=low, max_delay_ms=high)
