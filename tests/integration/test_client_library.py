"""The client library against real engines: every token is what its own context hashes to."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from frontend import (
    LLM,
    AsyncClient,
    Client,
    EngineGoneError,
    ErrorCode,
    FinishReason,
    RequestError,
    SamplingParams,
)
from frontend.seeds import sample_seed
from protocol.errors import ConfigError
from protocol.sampling import sampling
from tests.integration.conftest import two_free_ports
from worker.checksum import checksum_token

ROOT = Path(__file__).parents[2]
VOCABULARY = 49_152  # the bundled model's, whose tokenizer the frontend uses
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=8000, ignore_eos=True)


def expected(prompt, params, sample=0):
    """Return the output tokens, from the prompt and the parameters alone."""
    context = list(prompt)
    seed = None if params.seed is None else sample_seed(params.seed, sample)
    for _ in range(params.max_tokens):
        context.append(checksum_token(context, seed, sampling(params).temperature, VOCABULARY))
    return context[len(prompt) :]


def draw_prompts(count, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 40))] for _ in range(count)]


def draw_params(count):
    rng = random.Random(1)
    return [
        SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.getrandbits(63),
            max_tokens=rng.randint(1, 20),
            ignore_eos=True,
        )
        for _ in range(count)
    ]


def until_live(client, count, timeout_s=10.0):
    """Wait until the engine works on as many requests."""
    deadline = time.monotonic() + timeout_s
    while client.status().live_requests != count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def until_idle(client):
    """Wait until the engine works on nothing."""
    until_live(client, 0, timeout_s=2.0)


def survivors(processes, within_s):
    """Return what still runs after some time; what has ended and waits for init does not."""
    _, left = psutil.wait_procs(processes, timeout=within_s)
    return [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def client(fake_engine):
    with Client(fake_engine.client) as client:
        yield client


# ------------------------------------------------------------------------------
# Client


def test_every_result_is_its_own_prompts_call_after_call(client):
    for seed in range(3):
        prompts, params = draw_prompts(60, seed), draw_params(60)
        results = client.generate(prompts, params)
        assert [result.prompt for result in results] == prompts
        assert [result.token_ids for result in results] == [
            expected(*each) for each in zip(prompts, params, strict=True)
        ]
        assert {result.finish_reason for result in results} == {FinishReason.LENGTH}
        assert [result.usage.prompt_tokens for result in results] == [len(p) for p in prompts]


def test_each_sample_has_its_own_seed(client):
    params = SamplingParams(n=3, seed=7, max_tokens=8, ignore_eos=True)
    (result,) = client.generate([[5, 6, 7]], params)
    tokens = [sample.token_ids for sample in result.samples]
    assert tokens == [expected([5, 6, 7], params, sample) for sample in range(3)]
    assert result.usage.completion_tokens == 24


def test_text_and_chats_give_what_http_gives(fake_engine, client):
    fields = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    chat = [{"role": "user", "content": "Grüße, 東京"}]
    over_http = [
        fake_engine.post("/v1/completions", {"prompt": "Grüße", **fields})["choices"][0]["text"],
        fake_engine.post("/v1/chat/completions", {"messages": chat, **fields})["choices"][0][
            "message"
        ]["content"],
    ]
    assert [result.text for result in client.generate(["Grüße", chat], GREEDY)] == over_http


def test_a_stream_is_the_same_in_pieces(client):
    whole = client.generate("Once upon", GREEDY)[0]
    stream = client.stream("Once upon", GREEDY)
    deltas = list(stream)
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert stream.result().usage.completion_tokens == whole.usage.completion_tokens


def test_logprobs_come_one_for_each_token(client):
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2)
    (result,) = client.generate([[1, 2]], params)
    (sample,) = result.samples
    assert [next(iter(entry)) for entry in sample.logprobs] == sample.token_ids
    assert {len(entry) for entry in sample.logprobs} == {3}


def test_leaving_a_stream_ends_it_in_the_engine(client):
    for delta in client.stream([1, 2, 3], LONG):
        assert delta.token_ids == expected([1, 2, 3], GREEDY)[: len(delta.token_ids)]
        break
    until_idle(client)


def test_abort_returns_when_the_engine_works_on_it_no_more(client):
    streams = [client.stream([number], LONG) for number in range(3, 9)]
    next(streams[0])
    client.abort()
    assert client.status().live_requests == 0
    for stream in streams:
        assert list(stream)[-1].finish_reason is FinishReason.ABORT


def test_closing_a_client_ends_its_requests_and_no_others(fake_engine, client):
    other = Client(fake_engine.client)
    kept, dropped = client.stream([1, 2, 3], LONG), other.stream([4, 5, 6], LONG)
    next(kept)
    next(dropped)
    other.close()
    assert client.status().live_requests == 1
    next(kept)
    kept.close()
    until_idle(client)


def test_refusals_name_the_parameter_and_harm_nobody(client):
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    prompts = [[1], [VOCABULARY], [2], [3] * 9000]
    results = client.generate(prompts, params, return_errors=True)
    assert [result.token_ids for result in results[::2]] == [
        expected(prompt, params) for prompt in prompts[::2]
    ]
    errors = [result.error for result in results[1::2]]
    assert [error.code for error in errors] == [
        ErrorCode.INVALID_REQUEST,
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
    ]
    assert "49152; ids are 0 to 49151" in errors[0].message
    with pytest.raises(RequestError, match="9000 tokens"):
        client.generate(prompts[3])
    for wrong in ("\ud800", [{"role": "alien", "content": "x"}], ""):
        with pytest.raises(RequestError):
            client.generate(wrong)


def test_more_than_the_frontend_accepts_waits_for_its_turn(fake_engine):
    params = SamplingParams(n=64, max_tokens=1, temperature=0, ignore_eos=True)
    with Client(fake_engine.client, window=10_000) as client:
        results = client.generate([[number] for number in range(3, 83)], params)
    for number, result in zip(range(3, 83), results, strict=True):
        token = checksum_token([number], None, 0.0, VOCABULARY)
        assert [sample.token_ids for sample in result.samples] == [[token]] * 64


def test_a_run_directory_and_tcp_on_loopback_are_addresses(launch):
    port = two_free_ports()
    engine = launch("--fake-workers", "--frontends", "2", "--listen", f"tcp://127.0.0.1:{port}")
    addresses = {f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"}
    assert set(json.loads((engine.run_dir / "run.json").read_text())["clients"]) == addresses
    seen = set()
    for _ in range(40):
        with Client(engine.run_dir) as client:
            seen.add(client.address)
    assert seen == addresses
    for address in addresses:
        with Client(address) as client:
            assert client.generate([[1]], GREEDY)[0].token_ids == expected([1], GREEDY)


def test_an_engine_that_ends_is_noticed_and_named(launch):
    engine = launch("--fake-workers")
    with Client(engine.client) as client:
        stream = client.stream([1, 2], LONG)
        next(stream)
        os.kill(engine.pids["frontend-0"], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(EngineGoneError, match=f"The engine at {engine.client} has ended"):
            list(stream)
        assert time.monotonic() - started < 15


def test_an_engine_that_is_stopped_finishes_or_says_why(launch):
    engine = launch("--fake-workers", "--drain-timeout", "0.5")
    with Client(engine.client) as client:
        stream = client.stream([1, 2], LONG)
        next(stream)
        engine.process.send_signal(signal.SIGTERM)
        with pytest.raises(RequestError, match="stopped before this was finished") as caught:
            list(stream)
        assert caught.value.code is ErrorCode.NOT_READY


# ------------------------------------------------------------------------------
# AsyncClient


async def until_busy(client, *, is_busy):
    """Wait until the engine works on something or nothing; the caller bounds it."""
    while bool((await client.status()).live_requests) != is_busy:  # noqa: ASYNC110 - a process's
        await asyncio.sleep(0.01)


def test_many_tasks_stream_and_leave_at_once(fake_engine):
    prompts = draw_prompts(80, seed=5)

    async def read(client, prompt, most):
        tokens = []
        async for delta in client.stream(prompt, GREEDY):
            tokens += delta.token_ids
            if len(tokens) >= most:
                break
        return tokens

    async def main():
        async with AsyncClient(fake_engine.client) as client:
            streams = [
                read(client, prompt, 5 if index % 3 == 0 else 99)
                for index, prompt in enumerate(prompts)
            ]
            batch, *streamed = await asyncio.gather(client.generate(prompts, GREEDY), *streams)
            await until_busy(client, is_busy=False)
            return batch, streamed

    async def bounded():
        async with asyncio.timeout(30):
            return await main()

    batch, streamed = asyncio.run(bounded())
    for prompt, result, tokens in zip(prompts, batch, streamed, strict=True):
        right = expected(prompt, GREEDY)
        assert result.token_ids == right
        assert len(tokens) >= 5
        assert tokens == right[: len(tokens)]


def test_a_cancelled_call_ends_in_the_engine(fake_engine):
    async def main():
        async with asyncio.timeout(30), AsyncClient(fake_engine.client) as client:
            generating = asyncio.create_task(client.generate(draw_prompts(10), LONG))
            await until_busy(client, is_busy=True)
            generating.cancel()
            await until_busy(client, is_busy=False)
            return generating.cancelled()

    assert asyncio.run(main())


# ------------------------------------------------------------------------------
# LLM


def test_an_engine_of_ones_own(capfd):
    prompts = draw_prompts(30)
    with LLM(fake_workers=True, block_size=4, num_blocks=60, max_num_seqs=8) as llm:
        launcher = psutil.Process(llm.pid)
        processes = [launcher, *launcher.children(recursive=True)]
        results = llm.generate(prompts, GREEDY)
        assert [result.token_ids for result in results] == [expected(p, GREEDY) for p in prompts]
        assert "30/30" in capfd.readouterr().err
        (answer,) = llm.chat([{"role": "user", "content": "Hi"}], GREEDY, progress=False)
        assert answer.usage.completion_tokens == 12
        assert capfd.readouterr().err == ""
        assert llm.client.status().facts.num_blocks == 60
    assert survivors(processes, within_s=0.5) == []


def test_what_the_launcher_refuses_is_raised_in_its_words():
    with pytest.raises(ConfigError, match="--model no/such/model does not exist"):
        LLM("no/such/model", fake_workers=True)
    with pytest.raises(ConfigError, match=r"--tp is 0; it must be at least 1\."):
        LLM(tp=0)


def test_the_death_of_ones_own_engine_is_explained():
    with LLM(fake_workers=True) as llm:
        worker = next(
            child for child in psutil.Process(llm.pid).children() if "worker" in child.cmdline()
        )
        timer = threading.Timer(0.2, worker.kill)
        timer.start()
        with pytest.raises(EngineGoneError, match=r"the run ends because worker-0 .* SIGKILL"):
            llm.generate(draw_prompts(20), LONG, progress=False)
        timer.join()


CLIENT_PROGRAM = """
import sys
from frontend import Client, SamplingParams
client = Client(sys.argv[1])
client.generate([[1]] * 3, SamplingParams(max_tokens=8000, ignore_eos=True))
"""


def test_a_client_that_is_killed_ends_in_the_engine_also_where_it_does_not_stream(
    fake_engine, client
):
    program = subprocess.Popen([sys.executable, "-c", CLIENT_PROGRAM, fake_engine.client], cwd=ROOT)
    try:
        until_live(client, 3)
        program.kill()
        program.wait(10)
        until_live(client, 0, timeout_s=5.0)
    finally:
        program.kill()
        program.wait()


PROGRAM = """
import time
from frontend import LLM, SamplingParams
llm = LLM(fake_workers=True)
print(llm.pid, flush=True)
llm.generate([[1]] * 20, SamplingParams(max_tokens=8000, ignore_eos=True), progress=False)
time.sleep(60)
"""


def test_an_engine_does_not_outlive_the_program_that_started_it():
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        launcher = psutil.Process(int(program.stdout.readline()))
        processes = [launcher, *launcher.children(recursive=True)]
        assert len(processes) >= 4
        time.sleep(0.2)
        program.kill()
        program.wait(10)
        assert survivors(processes, within_s=3.0) == []
    finally:
        program.kill()
        program.wait()
        program.stdout.close()


# ------------------------------------------------------------------------------
# Examples


@pytest.mark.parametrize("name", ["client", "async_client"])
def test_an_example_runs(fake_engine, name):
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{name}", fake_engine.client],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    said = "temperature of params is 9: expected" if name == "client" else "Why is snow white?"
    assert said in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["client", "async_client"])
def test_an_example_without_an_address_says_how_it_is_used(name):
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == f"usage: python -m examples.{name} ADDRESS_OR_RUN_DIR\n"
