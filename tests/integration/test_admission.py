"""Deadlines and a full queue with real processes, one or the other of which is stopped."""

import contextlib
import os
import signal
import time

import psutil
import pytest

from frontend import Client, ErrorCode, FinishReason, RequestError, SamplingParams
from tests.integration.conftest import Engine
from tests.integration.test_client_library import LONG, expected

SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """An engine with one slot, room for two in its queue, and two frontends before it."""
    engine = Engine(
        *("--fake-workers", "--frontends", "2"),
        *("--max-num-seqs", "1", "--max-waiting-requests", "2"),
        run_dir=tmp_path_factory.mktemp("r", numbered=True),
    ).wait_until_ready()
    yield engine
    engine.end()


@pytest.fixture(autouse=True)
def _nobody_waits(engine):
    until_waiting(engine, 0)


@contextlib.contextmanager
def stopped(pid):
    """Keep a process from running."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def stopped_text_processes(engine):
    """Keep every frontend from tokenizing."""
    with contextlib.ExitStack() as stack:
        for frontend in ("frontend-0", "frontend-1"):
            (text,) = psutil.Process(engine.pids[frontend]).children()
            stack.enter_context(stopped(text.pid))
        yield


def until_waiting(engine, count):
    """Wait until both frontends know that so many wait."""
    deadline = time.monotonic() + 10
    for frontend in (0, 1):
        with Client(engine.run_dir / f"clients-{frontend}") as client:
            while client.status().waiting_requests != count:
                assert time.monotonic() < deadline
                time.sleep(0.01)


@pytest.mark.slow
def test_a_deadline_ends_what_runs_and_what_waits(engine):
    with Client(engine.client) as client:
        with stopped(engine.pids["worker-0"]):
            began = time.monotonic()
            # The first is being prefilled; its second sample and the others wait.
            first = client.stream([5] * 40, SamplingParams(n=2), deadline_s=2)
            until_waiting(engine, 1)
            (waits,) = client.generate([[6] * 40], LONG, deadline_s=0.2)
            deltas = list(first)
            took_s = time.monotonic() - began
        (after,) = client.generate([[6, 7]], SamplingParams(temperature=0, max_tokens=3))
    assert (waits.finish_reason, waits.token_ids) == (FinishReason.TIMEOUT, [])
    assert [(each.finish_reason, each.token_ids) for each in deltas] == [
        (FinishReason.TIMEOUT, [])
    ] * 2
    assert 2 <= took_s < 10
    assert after.token_ids == expected([6, 7], SamplingParams(temperature=0, max_tokens=3))


@pytest.mark.slow
def test_a_deadline_keeps_the_tokens_there_are(engine):
    prompt = [9, 8, 7]
    body = {"prompt": prompt, "max_tokens": 8000, "temperature": 0, "ignore_eos": True}
    answer = engine.complete(**body, deadline_s=0.3, return_token_ids=True)
    (choice,) = answer["choices"]
    count = answer["usage"]["completion_tokens"]
    assert choice["finish_reason"] == "timeout"
    assert 0 < count < 8000
    assert choice["token_ids"] == expected(prompt, SamplingParams(temperature=0, max_tokens=count))


@pytest.mark.slow
def test_a_deadline_does_not_wait_for_the_tokenizer(engine):
    with stopped_text_processes(engine):
        began = time.monotonic()
        body = {"prompt": "Hello", "deadline_s": 0.2}
        status, headers, answer = engine.request("POST", "/v1/completions", body)
        took_s = time.monotonic() - began
    assert (status, answer["error"]["code"]) == (504, "timeout")
    assert headers["x-should-retry"] == "false"
    assert 0.2 <= took_s < 2


@pytest.mark.slow
def test_a_full_queue_refuses_at_once_though_nothing_can_be_tokenized(engine):
    with (
        Client(engine.client, window=8) as client,
        Client(engine.run_dir / "clients-1") as other,
        client.stream([5] * 40, LONG) as runs,
    ):
        next(runs)
        with stopped(engine.pids["worker-0"]), contextlib.ExitStack() as streams:
            for number in (6, 7):
                streams.enter_context(client.stream([number] * 40, LONG))
            until_waiting(engine, 2)
            with stopped_text_processes(engine):
                began = time.monotonic()
                bodies = [
                    {"prompt": "Hello"},
                    {"prompt": [1, 2]},
                    {"prompt": "Hello", "stream": True},
                ]
                answers = [engine.request("POST", "/v1/completions", body) for body in bodies]
                with pytest.raises(RequestError) as caught:
                    list(other.stream("Hello"))
                took_s = time.monotonic() - began
            assert took_s < 1
            for status, headers, answer in answers:
                assert (status, answer["error"]["code"]) == (429, "overloaded")
                assert answer["error"]["message"].startswith(
                    "2 sequences are waiting already, and 2"
                )
                assert 1 <= int(headers["Retry-After"]) <= 60
            assert caught.value.code is ErrorCode.OVERLOADED
            assert 1 <= caught.value.retry_after_s <= 60
    until_waiting(engine, 0)


@pytest.mark.slow
def test_a_stream_that_waits_sees_its_position(engine):
    told = []
    with (
        Client(engine.client, window=8) as client,
        client.stream([5] * 40, LONG) as runs,
        client.stream([6] * 40, LONG) as ahead,
    ):
        next(runs)
        last = client.stream([7] * 40, SHORT, on_position=told.append)
        until_waiting(engine, 2)
        runs.close()
        ahead.close()
        assert list(last)[-1].finish_reason is FinishReason.LENGTH
    assert told[0] == 2
    assert sorted(told, reverse=True) == told
    assert last.queue_position == told[-1]
