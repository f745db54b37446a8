"""Deadlines and a full queue with real processes, one or the other of which is stopped."""

import contextlib
import os
import signal
import time

import psutil
import pytest

from frontend import Client, FinishReason, SamplingParams
from tests.integration.conftest import Engine
from tests.integration.test_client_library import LONG, expected

IDS = {"prompt": [5] * 40, "max_tokens": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """An engine with one slot, and room for two in its queue."""
    engine = Engine(
        *("--fake-workers", "--max-num-seqs", "1", "--max-waiting-requests", "2"),
        run_dir=tmp_path_factory.mktemp("r", numbered=True),
    ).wait_until_ready()
    yield engine
    engine.end()


@contextlib.contextmanager
def stopped(pid):
    """Keep a process from running."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def text_process(engine):
    (text,) = psutil.Process(engine.pids["frontend-0"]).children()
    return text.pid


def until_waiting(engine, count):
    deadline = time.monotonic() + 10
    while engine.request("GET", "/health")[2]["waiting_requests"] != count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_deadline_ends_what_runs_and_what_waits(engine):
    with Client(engine.client) as client:
        with stopped(engine.pids["worker-0"]):
            began = time.monotonic()
            # The first is being prefilled; its second sample and the others wait.
            first = client.stream([5] * 40, SamplingParams(n=2), deadline_s=0.3)
            until_waiting(engine, 1)
            (waits,) = client.generate([[6] * 40], LONG, deadline_s=0.2)
            deltas = list(first)
            took_s = time.monotonic() - began
        (after,) = client.generate([[6, 7]], SamplingParams(temperature=0, max_tokens=3))
    assert (waits.finish_reason, waits.token_ids) == (FinishReason.TIMEOUT, [])
    assert [(each.finish_reason, each.token_ids) for each in deltas] == [
        (FinishReason.TIMEOUT, [])
    ] * 2
    assert 0.3 <= took_s < 3
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
    with stopped(text_process(engine)):
        began = time.monotonic()
        body = {"prompt": "Hello", "deadline_s": 0.2}
        status, headers, answer = engine.request("POST", "/v1/completions", body)
        took_s = time.monotonic() - began
    assert (status, answer["error"]["code"]) == (504, "timeout")
    assert headers["x-should-retry"] == "false"
    assert 0.2 <= took_s < 2
