import shutil
import tempfile
import time
from pathlib import Path

import pytest

from protocol.connection import Codec, Connection
from protocol.errors import ConfigError, ErrorCode, ProcessError, ProtocolError
from protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    AbortAck,
    AbortState,
    CacheReset,
    FinishReason,
    Hello,
    Ping,
    Ready,
    Reset,
    ResetCache,
    Role,
    SchedulerToFrontend,
    StepPlan,
    StepResult,
    TokenDeltas,
)
from scheduler import process, self_check
from tests.scheduler.process_driver import ProcessDriver, wait_for
from tests.scheduler.simulation import add_message, expected_output

pytestmark = pytest.mark.slow

PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture
def start():
    """Return a function that makes a driver in a directory with a short name."""
    # Not tmp_path: a Unix socket's path has at most 107 bytes.
    path = Path(tempfile.mkdtemp(prefix="tw"))
    yield lambda **settings: ProcessDriver(path, **settings)
    shutil.rmtree(path)


def serve(driver, num_ranks=1):
    """Bring ranks and one frontend up."""
    ranks = [driver.rank(number) for number in range(num_ranks)]
    for rank in ranks:
        rank.hello()
    frontend = driver.frontend()
    frontend.hello()
    for rank in ranks:
        rank.receive(Hello)
    return (*ranks, frontend)


# Start


def test_everybody_is_greeted_once_all_ranks_are_there(start):
    with start(tp=2) as driver:
        frontend = driver.frontend()
        frontend.connection.hello(Hello(role=Role.FRONTEND, identity=b"early"))
        first = driver.rank(0, num_blocks=40)
        first.hello()
        frontend.collect(0.3)
        assert not frontend.pending
        assert not any(isinstance(report, Ready) for report in driver.reports())
        second = driver.rank(1, num_blocks=30)
        second.hello()
        to_frontend = frontend.receive(Hello)
        assert (to_frontend.role, to_frontend.facts.num_blocks) == (Role.SCHEDULER, 30)
        assert (to_frontend.facts.rank, to_frontend.facts.slots) == (0, 4)
        for rank in (first, second):
            to_rank = rank.receive(Hello)
            assert (to_rank.fingerprint, to_rank.facts) == ("f" * 64, None)
            assert to_rank.epoch == to_frontend.epoch > 0
        assert any(isinstance(report, Ready) for report in driver.reports())
        driver.ends_quietly()


def test_it_ends_with_its_launcher_while_it_waits_for_ranks(start):
    with start(tp=2) as driver:
        started = time.monotonic()
        driver.ends_quietly()
        assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"fingerprint": "0" * 64}, f"Rank 1 has the fingerprint {'0' * 64}, those before it fff"),
        (
            {"protocol_version": 99},
            f"The worker speaks protocol version 99, this process {PROTOCOL_VERSION}",
        ),
        ({"epoch": 3}, "Rank 1 is of epoch 3, this scheduler of epoch "),
        ({"role": Role.FRONTEND}, "A frontend that is rank 1 connected where rank 1 belongs"),
        ({"facts": None}, "A worker that is no rank connected where rank 1 belongs"),
    ],
)
def test_a_rank_that_does_not_fit_ends_the_run(start, caplog, changes, sentence):
    caplog.set_level("INFO")
    with start(tp=2) as driver:
        driver.rank(0).hello()
        wait_for(lambda: "met rank=0" in caplog.text)
        driver.rank(1).hello(**changes)
        assert sentence in driver.ends_with(ProtocolError)


def test_ranks_with_other_sizes_end_the_run(start, caplog):
    caplog.set_level("INFO")
    with start(tp=2) as driver:
        driver.rank(0).hello()
        wait_for(lambda: "met rank=0" in caplog.text)
        driver.rank(1, block_size=8).hello()
        assert "Rank 1 and rank 0 differ in more than" in driver.ends_with(ProtocolError)


# Requests


@pytest.mark.parametrize("settings", [{}, {"max_in_flight": 1, "policy": "throughput"}])
def test_a_request_goes_all_the_way(start, settings):
    with start(**settings) as driver:
        rank, frontend = serve(driver)
        message = add_message(3, PROMPT, max_tokens=6)
        frontend.connection.send(message)
        tokens, reason = frontend.output(3, rank.answer)
        assert (tokens, reason) == expected_output(PROMPT, message.params, 64)
        driver.ends_quietly()


def test_a_request_that_cannot_be_run_is_refused_by_its_terminal_reason(start):
    with start() as driver:
        _, frontend = serve(driver)
        frontend.connection.send(add_message(3, [1] * 64, sample=2))
        assert frontend.rows() == [(3, 2, 0, 0, ErrorCode.CONTEXT_LENGTH_EXCEEDED)]


def test_more_than_may_wait_is_refused_and_the_length_of_the_queue_is_told(start):
    with start(max_waiting_requests=2) as driver:
        rank, frontend = serve(driver)
        # Nothing is answered: the first two plans hold the first request, the others wait.
        frontend.connection.send(add_message(0, [1]))
        rank.receive(StepPlan)
        rank.receive(StepPlan)
        for request_id in range(1, 4):
            frontend.connection.send(add_message(request_id, [1]))
        assert frontend.rows() == [(3, 0, 0, 0, ErrorCode.OVERLOADED)]
        ping = frontend.receive(Ping)
        while ping.waiting_requests != 2:
            ping = frontend.receive(Ping)
        assert ping.waiting_tokens == 2


def test_aborts_are_always_answered(start):
    with start() as driver:
        rank, frontend = serve(driver)
        frontend.connection.send(Abort(request_id=9))
        assert frontend.receive(AbortAck).state is AbortState.UNKNOWN
        frontend.connection.send(add_message(3, PROMPT))
        rank.answer()
        frontend.receive(TokenDeltas)
        frontend.connection.send(Abort(request_id=3, sample=0))
        ack = frontend.receive(AbortAck)
        assert (ack.state, ack.blocks_returned) == (AbortState.LIVE, 2)
        frontend.connection.send(Abort(request_id=3))
        assert frontend.receive(AbortAck).state is AbortState.FINISHED


def test_any_frontend_may_reset_the_prefix_cache(start, caplog):
    caplog.set_level("INFO")
    with start() as driver:
        rank, frontend = serve(driver)
        other = driver.frontend()
        other.hello()
        frontend.connection.send(add_message(3, PROMPT, max_tokens=1))
        assert frontend.output(3, rank.answer)[1] == FinishReason.LENGTH
        for asks, forgotten in ((other, 1), (frontend, 0)):
            asks.connection.send(ResetCache())
            assert asks.receive(CacheReset).blocks_forgotten == forgotten
        frontend.connection.send(add_message(4, PROMPT, max_tokens=1))
        assert frontend.output(4, rank.answer)[1] == FinishReason.LENGTH
        assert "reset the prefix cache" in caplog.text
        ping = frontend.receive(Ping)
        while ping.cache.lookup_tokens != 10:
            ping = frontend.receive(Ping)
        assert (ping.cache.cached_tokens, ping.cache.indexed_blocks) == (0, 1)


@pytest.fixture
def built(monkeypatch):
    """The schedulers that processes have built, to be corrupted."""
    build, built = process._build_scheduler, []

    def build_and_keep(*arguments):
        built.append(build(*arguments))
        return built[-1]

    monkeypatch.setattr(process, "_build_scheduler", build_and_keep)
    return built


def test_a_lost_block_is_found_when_the_engine_comes_to_rest(start, caplog, built):
    with start() as driver:
        rank, frontend = serve(driver)
        lost = built[0].block_manager._free.pop()
        frontend.connection.send(add_message(3, PROMPT, max_tokens=2))
        frontend.output(3, rank.answer)
        sentence = f"our bug, please report: block {lost} is in the free lists 0 times instead of 1"
        wait_for(lambda: sentence in caplog.text)
        ping = frontend.receive(Ping)
        while not ping.cache.quarantines:
            ping = frontend.receive(Ping)
        assert (ping.cache.quarantined_blocks, ping.cache.free_blocks) == (0, 32)
        driver.ends_quietly()


def test_corruption_ends_one_sequence_and_no_process(start, caplog, built, monkeypatch):
    monkeypatch.setattr(self_check, "BUSY_INTERVAL_S", 0.05)
    with start() as driver:
        rank, frontend = serve(driver)
        messages = [add_message(number, [number, *PROMPT], max_tokens=9) for number in (1, 2)]
        for message in messages:
            frontend.connection.send(message)
        rank.answer()
        assert frontend.rows()
        manager = built[0].block_manager
        block = next(block for block in range(32) if manager.is_registered(block))
        manager._content[block] = manager._content[block]._replace(domain=b"another's")
        wait_for(lambda: "our bug, please report: it may have read another's" in caplog.text)
        rows = []
        while len({row[0] for row in rows if row[4]}) < 2:
            rank.collect(0.05)
            if any(isinstance(plan, StepPlan) for plan in rank.pending):
                rank.answer()
            frontend.collect(0.05)
            if any(isinstance(deltas, TokenDeltas) for deltas in frontend.pending):
                rows += frontend.rows()
        assert sorted(row[4] for row in rows if row[4]) == [
            FinishReason.LENGTH,
            ErrorCode.INTERNAL,
        ]
        driver.ends_quietly()


def test_a_deadline_passes_without_any_message(start):
    with start() as driver:
        _, frontend = serve(driver)
        frontend.connection.send(add_message(3, PROMPT, deadline=time.monotonic() + 0.1))
        assert frontend.rows() == [(3, 0, 0, 0, FinishReason.TIMEOUT)]


# Peers that come and go


def test_a_frontend_that_says_hello_again_starts_anew(start):
    with start() as driver:
        rank, frontend = serve(driver)
        frontend.connection.send(add_message(3, PROMPT, max_tokens=9))
        rank.answer()
        frontend.receive(TokenDeltas)
        frontend.connection = new_connection(frontend)
        frontend.hello()
        # The old sequence is gone, so its key is free.
        message = add_message(3, PROMPT, max_tokens=4)
        frontend.connection.send(message)
        tokens, reason = frontend.output(3, lambda: answer_until_row(rank))
        assert (tokens, reason) == expected_output(PROMPT, message.params, 64)


def new_connection(frontend):
    return Connection(frontend.dealer.send, Codec(SchedulerToFrontend))


def answer_until_row(rank):
    rank.collect(0.05)
    while any(isinstance(message, StepPlan) for message in rank.pending):
        rank.answer()
        rank.collect(0.05)


def test_a_frontend_that_is_gone_leaves_nothing_running(start):
    with start() as driver:
        rank, frontend = serve(driver)
        other = driver.frontend()
        other.hello()
        frontend.connection.send(add_message(3, PROMPT, max_tokens=50))
        rank.answer()
        frontend.receive(TokenDeltas)
        frontend.dealer.close()
        for _ in range(50):
            rank.collect(0.05)
            if not any(isinstance(message, StepPlan) for message in rank.pending):
                break
            rank.answer()
        else:
            raise AssertionError("the dead frontend's sequence goes on")
        message = add_message(0, PROMPT, max_tokens=2)
        other.connection.send(message)
        tokens, _ = other.output(0, rank.answer)
        assert tokens == expected_output(PROMPT, message.params, 64)[0]


def test_a_stranger_is_told_to_say_hello(start):
    with start() as driver:
        rank, frontend = serve(driver)
        stranger = driver.frontend()
        stranger.connection.adopt_epoch(1)
        stranger.connection.send(add_message(0, PROMPT))
        stranger.receive(Reset)
        frontend.dealer.send(b"\x93not a message")
        frontend.receive(Reset)
        # Whoever starts again is served.
        stranger.connection = new_connection(stranger)
        stranger.hello()
        message = add_message(0, PROMPT, max_tokens=3)
        stranger.connection.send(message)
        assert stranger.output(0, rank.answer) == expected_output(PROMPT, message.params, 64)


def test_a_rank_that_restarts_ends_the_run(start):
    with start() as driver:
        rank, _ = serve(driver)
        rank.hello()
        assert "Rank 0 has restarted" in driver.ends_with(ProcessError)


# Steps


def test_a_step_is_answered_when_all_ranks_have_answered(start):
    with start(tp=2) as driver:
        first, second, frontend = serve(driver, 2)
        frontend.connection.send(add_message(3, PROMPT, max_tokens=1))
        first.answer()
        frontend.collect(0.2)
        assert not any(isinstance(message, TokenDeltas) for message in frontend.pending)
        second.answer()
        ((request_id, _, _, count, reason),) = frontend.rows()
        assert (request_id, count, reason) == (3, 1, FinishReason.LENGTH)


def test_ranks_that_disagree_end_the_run(start):
    with start(tp=2) as driver:
        first, second, frontend = serve(driver, 2)
        frontend.connection.send(add_message(3, PROMPT, max_tokens=1))
        first.answer(digest=1)
        second.answer(digest=2)
        assert "The ranks disagree about step 1" in driver.ends_with(ProcessError)


def test_a_late_step_ends_the_run_and_names_the_missing_ranks(start):
    with start(tp=2, step_timeout_s=0.3) as driver:
        first, _, frontend = serve(driver, 2)
        frontend.connection.send(add_message(3, PROMPT, max_tokens=1))
        first.answer()
        sentence = driver.ends_with(ProcessError)
        assert sentence.startswith("Step 1 has no answer of rank 1 after 0.3 s")


def test_a_cache_for_no_sequence_at_all_is_refused(start):
    with start() as driver:
        driver.rank(num_blocks=1, block_size=1).hello()
        assert driver.ends_with(ConfigError) == (
            "--num-blocks 1 of --block-size 1 at --max-model-len 64 hold 1 token; a sequence has "
            "at least 2, one of prompt and one of output."
        )


def test_a_result_of_another_shape_ends_the_run(start):
    with start() as driver:
        rank, frontend = serve(driver)
        frontend.connection.send(add_message(3, PROMPT, max_tokens=1))
        rank.receive(StepPlan)
        rank.connection.send(StepResult(step_id=1, digest=0))
        assert "does not have the counts of its plan" in driver.ends_with(ProtocolError)


def test_an_idle_scheduler_only_says_that_it_is_there(start):
    with start() as driver:
        _, frontend = serve(driver)
        for _ in range(3):
            frontend.receive(Ping)
        frontend.collect(2.0)
        assert {type(message) for message in frontend.pending} == {Ping}
