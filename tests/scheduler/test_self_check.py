import pytest

from protocol.errors import ErrorCode
from protocol.messages import FinishReason
from scheduler import self_check
from scheduler.policy import ThroughputPolicy
from scheduler.self_check import BUSY_INTERVAL_S, LEAST_TIMES_APART, REST_INTERVAL_S, CheckTimer
from tests.scheduler.simulation import add_message, simulate

PROMPT = list(range(8))


@pytest.fixture
def corrupted():
    """A simulation with two running sequences, which a test corrupts."""
    simulation = simulate(num_blocks=16, block_size=4)
    simulation.is_corrupted = True
    simulation.add(add_message(0, PROMPT, max_tokens=8))
    simulation.add(add_message(1, [9, *PROMPT], max_tokens=8, seed=1))
    simulation.plan()
    simulation.answer()
    return simulation, simulation.scheduler.block_manager


def table_of(simulation, request_id):
    (sequence,) = (
        each
        for each in simulation.scheduler.running_sequences()
        if each.key.request_id == request_id
    )
    return sequence.block_table


def reasons(simulation):
    received = simulation.frontends[0].sequences
    return {request_id: received[request_id, 0].reason for request_id, _ in received}


def test_a_sound_core_has_no_problems_and_nobody_is_told_anything():
    simulation = simulate()
    simulation.add(add_message(0, PROMPT))
    simulation.plan()
    assert not simulation.scheduler.has_stumbled
    assert simulation.scheduler.check() == ([], [])
    simulation.run()
    assert simulation.scheduler.check() == ([], [])


def test_a_wrong_count_takes_a_block_out_of_use_until_all_who_ran_have_left(corrupted):
    simulation, manager = corrupted
    block = table_of(simulation, 1)[0]
    manager._references[block] += 1
    (problem,) = simulation.check()
    assert problem.startswith(f"block {block} has 2 references but is in the tables of ['request=1")
    stats = simulation.scheduler.cache_stats()
    assert (stats.quarantined_blocks, stats.quarantines, stats.free_blocks) == (1, 1, 11)
    assert not manager.is_registered(block)
    # Its holder goes on with it and ends; the other one ran at that time too.
    simulation.abort(1, 0)
    assert (manager.num_quarantined, manager.num_free) == (1, 13)
    simulation.add(add_message(2, PROMPT, max_tokens=30))
    simulation.plan()
    assert block not in table_of(simulation, 2)
    while not simulation.received(0).reason:
        simulation.answer()
        simulation.plan()
    assert simulation.scheduler.num_running == 1
    assert manager.num_quarantined == 0
    simulation.run()
    assert reasons(simulation) == {0: FinishReason.LENGTH, 1: 0, 2: FinishReason.LENGTH}
    simulation.check_outputs()


def test_only_who_may_have_read_anothers_content_ends(corrupted):
    simulation, manager = corrupted
    block = table_of(simulation, 0)[1]
    manager._content[block] = manager._content[table_of(simulation, 1)[0]]
    problems = simulation.check()
    assert any("holds other tokens than request=0" in problem for problem in problems)
    assert reasons(simulation) == {0: ErrorCode.INTERNAL, 1: 0}
    simulation.run()
    assert reasons(simulation) == {0: ErrorCode.INTERNAL, 1: FinishReason.LENGTH}
    simulation.check_outputs()
    assert simulation.scheduler.num_free_blocks == 16
    simulation.scheduler.check_invariants()


def test_what_was_given_to_another_ends_its_holder_at_the_latest_when_that_ends(corrupted):
    simulation, manager = corrupted
    block = table_of(simulation, 0)[0]
    manager.release([block])
    free, manager._free = manager._free, []
    assert manager.take() == block
    manager._free = free
    manager.release([block])
    simulation.run()
    assert reasons(simulation) == {0: ErrorCode.INTERNAL, 1: FinishReason.LENGTH}
    assert len(simulation.received(0).tokens) == 8
    assert simulation.problems[0] == f"block {block} was given to another while it was held"
    assert simulation.scheduler.num_free_blocks == 16
    simulation.check_outputs()


def test_a_preempted_sequence_that_had_lost_a_block_does_not_resume(corrupted):
    simulation, manager = corrupted
    scheduler = simulation.scheduler
    manager.uses[table_of(simulation, 1)[0]] += 1  # as if it had been given out and given back
    victim = scheduler.running_sequences()[1]
    from scheduler.planned_step import Draft

    scheduler._running.preempt(victim, Draft(), scheduler.last_step_id)
    scheduler._queue.push(victim)
    assert scheduler.has_stumbled
    simulation.check()
    assert reasons(simulation) == {0: 0, 1: ErrorCode.INTERNAL}
    simulation.run()
    simulation.check_outputs()


def test_a_sequence_that_is_alone_gets_the_blocks_that_were_lost():
    simulation = simulate(num_blocks=4, block_size=4, max_model_len=16)
    simulation.is_corrupted = True
    manager = simulation.scheduler.block_manager
    simulation.add(add_message(0, [1, 2], max_tokens=14))
    simulation.plan()
    simulation.answer()
    lost = manager._free.pop()
    simulation.run()
    assert simulation.problems == [
        "a sequence that was alone found no free block",
        f"block {lost} is in the free lists 0 times instead of 1",
    ]
    assert reasons(simulation) == {0: FinishReason.LENGTH}
    assert manager.num_free == 4
    simulation.check_outputs()


def test_a_sequence_that_is_alone_gets_what_is_in_quarantine():
    simulation = simulate(num_blocks=4, block_size=4, max_model_len=16)
    simulation.is_corrupted = True
    manager = simulation.scheduler.block_manager
    simulation.add(add_message(0, [1, 2], max_tokens=14))
    simulation.plan()
    simulation.answer()
    manager._references[manager._free[0]] = 1
    simulation.check()
    assert (manager.num_free, manager.num_quarantined) == (2, 1)
    simulation.run()
    assert len(simulation.problems) == 2  # of one block: its count, and its list
    assert simulation.scheduler.counters.preemptions == 1
    assert (manager.num_free, manager.num_quarantined) == (4, 0)
    simulation.check_outputs()


def test_an_admission_that_comes_short_is_put_off():
    simulation = simulate(num_blocks=8, block_size=4, policy=ThroughputPolicy(budget=64))
    simulation.is_corrupted = True
    manager = simulation.scheduler.block_manager
    simulation.add(add_message(0, [1] * 8, max_tokens=4))
    simulation.plan()
    manager._free.append(table_of(simulation, 0)[1])  # 7 listed, 6 free
    simulation.add(add_message(1, [2] * 24, max_tokens=1))
    simulation.plan()
    simulation.run()
    assert len(simulation.problems) == 1
    assert reasons(simulation) == {0: FinishReason.LENGTH, 1: FinishReason.LENGTH}
    simulation.check_outputs()


def test_every_key_has_its_turn(monkeypatch):
    monkeypatch.setattr(self_check, "HASHED_BLOCKS", 3)
    simulation = simulate(num_blocks=8, block_size=4)
    simulation.is_corrupted = True
    simulation.add(add_message(0, list(range(20)), max_tokens=1))
    simulation.run()
    manager = simulation.scheduler.block_manager
    block = max(block for block in range(8) if manager.is_registered(block))
    content = manager._content[block]
    manager._content[block] = content._replace(tokens=bytes(len(content.tokens)))
    for _ in range(3):
        simulation.check()
    assert simulation.problems == [f"block {block} holds other tokens than its key says"]
    assert manager.num_indexed == 4


def test_checks_are_due_at_rest_and_once_in_a_while():
    timer = CheckTimer(100.0)
    assert not timer.is_due(500.0, is_busy=False)  # nothing has happened
    assert timer.is_due(500.0, is_busy=True)
    timer.checked(500.0, 500.002)
    assert not timer.is_due(500.002 + BUSY_INTERVAL_S / 2, is_busy=True)
    assert timer.is_due(501.0 + BUSY_INTERVAL_S, is_busy=True)
    assert timer.is_due(500.003 + REST_INTERVAL_S + 1, is_busy=False)
    timer.checked(510.0, 510.0)
    assert not timer.is_due(600.0, is_busy=False)  # at rest since


def test_a_check_that_takes_long_is_rare():
    timer = CheckTimer(0.0)
    timer.checked(0.0, 0.5)
    assert not timer.is_due(0.4 + 0.5 * LEAST_TIMES_APART, is_busy=True)
    assert timer.is_due(0.6 + 0.5 * LEAST_TIMES_APART, is_busy=True)
