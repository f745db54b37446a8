"""Many clients at once, over HTTP and ZeroMQ: each gets what it would get alone."""

import random
import shlex
import socket
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from frontend import Client, SamplingParams
from worker.checksum import checksum_token

VOCABULARY = 49_152
NUM_CLIENTS = 32


def ask(engine, number, prompt, max_tokens):
    """Ask as client `number` does: by HTTP or ZeroMQ, streaming or not; return the tokens."""
    if number % 2 == 0:
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if number % 4 == 0:
            return engine.complete(**body)["choices"][0]["token_ids"]
        events = engine.events("/v1/completions", body)
        return [t for e in events for c in e["choices"] for t in c.get("token_ids") or []]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    with Client(engine.client) as client:
        if number % 4 == 1:
            (generation,) = client.generate(prompt, params)
            return list(generation.token_ids)
        return [token for delta in client.stream(prompt, params) for token in delta.token_ids]


def ask_all(engine, prompts, max_tokens):
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        jobs = [
            pool.submit(ask, engine, number, prompts[number // 4 % len(prompts)], max_tokens)
            for number in range(NUM_CLIENTS)
        ]
        return [job.result() for job in jobs]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_ranks_answer_32_clients_as_they_answer_one(launch):
    engine = launch("--tp", "3", "--device", "cpu", "--max-model-len", "512")
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in (5, 17, 40)]
    serial = [ask(engine, 0, prompt, 6) for prompt in prompts]
    answers = ask_all(engine, prompts, 6)
    assert answers == [serial[number // 4 % len(prompts)] for number in range(NUM_CLIENTS)]


def test_a_slow_rank_changes_nothing(cli, tmp_path_factory):
    # Started by hand, since only a worker's own command line has the flags that slow it down.
    run_dir = tmp_path_factory.mktemp("s")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    flags = ["--fake-workers", "--tp", "3", "--port", port, "--run-dir", str(run_dir)]
    code, out, _ = cli(*flags, "--print-commands")
    assert code == 0
    commands = [shlex.split(line) for line in out.splitlines()[1:]]
    commands[2] += ["--fault-max-delay-ms", "300"]
    assert commands[2][2] == "worker"
    processes = [subprocess.Popen(argv, stderr=subprocess.DEVNULL) for argv in commands]
    try:
        wait_until_healthy(port)
        prompt = [5, 6, 7]
        with Client(f"ipc://{run_dir}/clients-0") as client:
            params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
            (generation,) = client.generate(prompt, params)
        context = list(prompt)
        for _ in range(12):
            context.append(checksum_token(context, None, 0.0, VOCABULARY))
        assert list(generation.token_ids) == context[3:]
        assert all(process.poll() is None for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def wait_until_healthy(port):
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                assert answer.status == 200
                return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.2)


@pytest.mark.slow
def test_what_a_full_queue_does_not_take_is_refused_through_either_frontend(launch):
    engine = launch(
        *("--fake-workers", "--frontends", "2", "--max-model-len", "4096"),
        *("--max-num-seqs", "1", "--max-waiting-requests", "1"),
    )
    body = {"prompt": [7] * 8, "max_tokens": 3000, "ignore_eos": True}
    with ThreadPoolExecutor(12) as pool:
        jobs = [pool.submit(engine.request, "POST", "/v1/completions", body) for _ in range(12)]
        answers = [job.result() for job in jobs]
    taken = [answer for status, _, answer in answers if status == 200]
    refused = [(status, headers, answer) for status, headers, answer in answers if status != 200]
    # One runs, and another waits if it came after the first had left the queue.
    assert 1 <= len(taken) <= 2
    for answer in taken:
        assert answer["usage"]["completion_tokens"] == 3000
    for status, headers, answer in refused:
        assert status == 429
        assert 1 <= int(headers["Retry-After"]) <= 60
        assert answer["error"]["code"] == "overloaded"
