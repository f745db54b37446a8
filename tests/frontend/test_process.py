"""The frontend as a process: what it reports, how it ends."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time

import msgspec
import psutil
import pytest
import zmq.asyncio

from frontend.config import FrontendConfig
from protocol.child import Child
from protocol.columns import unpack_int32
from protocol.flags import to_flags
from protocol.lifecycle import ProcessConfig
from protocol.messages import FinishReason, StatusReply
from tests.frontend import tiny_tokenizers
from tests.frontend.conftest import FACTS, ROOT, FakeScheduler, Http, parse_events, until

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


class Running:
    """A frontend process, its scheduler, and the launcher's end of its pipes."""

    def __init__(self, child, scheduler, http, encode):
        self.child, self.scheduler, self.http, self.encode = child, scheduler, http, encode

    def _is_ready(self):
        self.child.read_reports()
        self.child.read_log()
        return self.child.ready is not None

    async def ready(self):
        """Wait until it has reported ready."""
        await until(self._is_ready)

    async def end(self):
        """Wait for the process's end; return its exit code."""
        async with asyncio.timeout(20):
            while self.child.process.poll() is None:
                self.child.read_log()
                await asyncio.sleep(0.01)
        self.child.read_to_end()
        return self.child.process.returncode


@pytest.fixture
def frontend(tmp_path, gguf_file, tokenizer_cache, smol_tokenizer):
    """Return a function that runs a coroutine function with a running frontend."""

    async def main(use, with_scheduler, fields):
        listener = socket.create_server(("127.0.0.1", 0))
        config = FrontendConfig(
            process=ProcessConfig(run_dir=str(tmp_path)),
            **{
                "model": str(gguf_file),
                "served_model_name": "smol",
                "http_fd": listener.fileno(),
                "tokenizer_cache": str(tokenizer_cache),
                "drain_timeout_s": 1.0,
                **fields,
            },
        )
        child = Child(
            "frontend-0",
            [sys.executable, "-m", "frontend", *to_flags(config)],
            directory=str(ROOT),
            environment=dict(os.environ),
            pass_fds=(listener.fileno(),),
        )
        context = zmq.asyncio.Context()
        scheduler = FakeScheduler(context, f"ipc://{tmp_path}/scheduler", FACTS)
        tasks = [asyncio.create_task(scheduler.run())] if with_scheduler else []
        http = Http(listener.getsockname()[1])
        encode = smol_tokenizer.encode
        try:
            async with asyncio.timeout(40):
                return await use(Running(child, scheduler, http, lambda text: encode(text).ids))
        finally:
            http.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            child.signal(signal.SIGKILL)
            child.process.wait()
            child.read_to_end()
            child.close()
            scheduler.close()
            context.destroy(linger=0)
            listener.close()

    def run(use, *, with_scheduler=True, **fields):
        return asyncio.run(main(use, with_scheduler, fields))

    return run


def test_it_serves_once_scheduler_and_text_process_have_reported(frontend):
    async def use(running):
        early, _, _ = await running.http.request("GET", "/health")
        await running.ready()
        running.scheduler.answer = lambda sequence: running.scheduler.say(
            sequence, [*running.encode("Paris."), 2]
        )
        status, answer = await running.http.post(CHAT, HI)
        return early, running.child.ready.detail, status, answer, running.child.heartbeats

    early, detail, status, answer, heartbeats = frontend(use)
    assert early == 503
    assert detail.startswith("ipc:///")
    assert detail.endswith("/clients-0")
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "Paris.")
    assert heartbeats >= 1


def test_without_a_scheduler_it_answers_that_it_is_not_ready(frontend):
    async def use(running):
        while True:
            _, _, content = await running.http.request("GET", "/health")
            reason = json.loads(content)["reason"]
            if "tokenizer" in reason or psutil.Process(running.child.process.pid).children():
                break
        status, answer = await running.http.post(CHAT, HI)
        return status, answer, running.child.ready

    status, answer, ready = frontend(use, with_scheduler=False)
    assert status == 503
    assert answer["error"]["message"].startswith("The engine is starting: the scheduler")
    assert ready is None


def test_the_launchers_end_is_its_end_at_once(frontend):
    async def use(running):
        await running.ready()
        (text,) = psutil.Process(running.child.process.pid).children()
        answer = await running.http.open("POST", CHAT, {**HI, "stream": True})
        sequence = await running.scheduler.next_sequence()
        running.scheduler.tokens(sequence, [5])
        await answer.head()
        started = time.monotonic()
        running.child.cut_lifeline()
        code = await running.end()
        seconds = time.monotonic() - started
        await until(lambda: not text.is_running() or text.status() == psutil.STATUS_ZOMBIE)
        return code, seconds, list(running.child.log_tail)

    code, seconds, log = frontend(use)
    assert code == 0
    assert seconds < 10
    assert not any("Traceback" in line or " E " in line for line in log)


def test_sigterm_lets_streams_finish_and_refuses_new_ones(frontend):
    async def use(running):
        await running.ready()
        answer = await running.http.open("POST", CHAT, {**HI, "stream": True})
        sequence = await running.scheduler.next_sequence()
        running.scheduler.tokens(sequence, running.encode("Hel"))
        await answer.head()
        running.child.signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        refused, _, _ = await running.http.request("POST", CHAT, HI)
        running.scheduler.tokens(sequence, [*running.encode("lo"), 2], reason=1)
        events = parse_events(await answer.rest())
        return refused, events, await running.end()

    refused, events, code = frontend(use)
    assert refused == 503
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1] == "[DONE]"
    assert code == 0


@pytest.mark.parametrize("signals", [1, 2])
def test_after_the_drain_time_open_streams_are_told_why(frontend, signals):
    async def use(running):
        await running.ready()
        answer = await running.http.open("POST", CHAT, {**HI, "stream": True})
        sequence = await running.scheduler.next_sequence()
        running.scheduler.tokens(sequence, running.encode("Hel"))
        await answer.head()
        started = time.monotonic()
        for _ in range(signals):
            running.child.signal(signal.SIGTERM)
            await asyncio.sleep(0.05)
        events = parse_events(await answer.rest())
        code = await running.end()
        return events, code, time.monotonic() - started

    # A second signal does not wait for the drain time.
    drain_timeout_s = 1.0 if signals == 1 else 60.0
    events, code, seconds = frontend(use, drain_timeout_s=drain_timeout_s)
    assert events[-2]["error"]["message"] == "The server stopped before this was finished."
    assert events[-1] == "[DONE]"
    assert code == 0
    assert seconds < 30


def test_an_unusable_model_is_its_failure(frontend, tmp_path):
    async def use(running):
        return await running.end(), running.child.failure

    code, failure = frontend(use, model=str(tmp_path / "nothing"))
    assert code == 2
    assert (failure.exit_code, failure.sentence) == (
        2,
        f"--model: there is no file or directory {tmp_path}/nothing.",
    )


@pytest.fixture
def directory(tmp_path):
    """A model directory, as far as a frontend looks into it."""
    path = tmp_path / "model"
    path.mkdir()
    tiny_tokenizers.byte_level("<s>", "</s>").save(str(path / "tokenizer.json"))
    files = {
        "config.json": {"eos_token_id": 1},
        "generation_config.json": {
            "do_sample": True,
            "temperature": 0.6,
            "top_k": 20,
            "eos_token_id": [1, 7],
            "repetition_penalty": 2.1,
            "no_repeat_ngram_size": 2,
        },
        "tokenizer_config.json": {"bos_token": "<s>", "chat_template": "{{ bos_token }}model's"},
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    (tmp_path / "mine.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("ignores", [False, True])
def test_a_directorys_defaults_and_an_operators_template(frontend, directory, capfd, ignores):
    async def use(running):
        await running.ready()
        post = asyncio.create_task(running.http.post(CHAT, {**HI, "max_tokens": 1}))
        sequence = await running.scheduler.next_sequence()
        running.scheduler.tokens(sequence, [260], reason=FinishReason.LENGTH)
        return sequence, await post

    sequence, (status, _) = frontend(
        use,
        model=str(directory),
        chat_template=str(directory.parent / "mine.jinja"),
        ignore_generation_config=ignores,
    )
    tokenizer = tiny_tokenizers.byte_level("<s>", "</s>")
    assert status == 200
    assert unpack_int32(sequence.prompt_ids) == tokenizer.encode("<s>hi").ids
    assert sequence.params.stop_token_ids == [1, 7]
    chosen = (sequence.params.temperature, sequence.params.top_k, sequence.params.top_p)
    assert chosen == ((1.0, 0, 1.0) if ignores else (0.6, 20, 1.0))
    log = capfd.readouterr().err
    warning = "for what this engine does not do: repetition_penalty=2.1, no_repeat_ngram_size=2\n"
    assert (warning in log) is not ignores
    says = "1 top_k=0 top_p=1 min_p=0 repetition_penalty=1 max_tokens=room from_model=none"
    if not ignores:
        says = says.replace("1 top_k=0", "0.6 top_k=20").replace("none", "temperature,top_k")
    assert f"sampling defaults temperature={says}\n" in log


def test_a_template_that_does_not_parse_is_its_failure(frontend, directory):
    async def use(running):
        return await running.end(), running.child.failure

    (directory / "tokenizer_config.json").write_text('{"chat_template": "{{ x"}')
    code, failure = frontend(use, model=str(directory))
    assert code == 2
    assert failure.sentence.startswith("The model's chat template is broken in line 1: ")


def test_a_text_process_that_is_killed_is_replaced(frontend):
    async def use(running):
        await running.ready()
        (text,) = psutil.Process(running.child.process.pid).children()
        text.kill()
        running.scheduler.answer = lambda sequence: running.scheduler.say(sequence, [5, 2])
        return await running.http.post(CHAT, HI)

    assert frontend(use)[0] == 200


@pytest.mark.slow
def test_it_sleeps_when_there_is_nothing_to_do(frontend):
    async def use(running):
        await running.ready()
        await asyncio.sleep(0.5)
        process = psutil.Process(running.child.process.pid)
        family = [process, *process.children()]
        before = [member.num_ctx_switches().voluntary for member in family]
        await asyncio.sleep(2)
        after = [member.num_ctx_switches().voluntary for member in family]
        return [then - first for then, first in zip(after, before, strict=True)]

    own, text = frontend(use)
    # The web server looks round ten times a second, and a heartbeat goes out twice; nothing polls.
    assert own <= 32
    assert text <= 2


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--port", "70000"], "--port is 70000; it must be 0 to 65535"),
        (["--served-model-name", ""], "--served-model-name is '', of 0 characters; give 1 to 256"),
        (["--served-model-name", b"\xff"], r"--served-model-name is '\udcff', of 1 characters"),
        (["--listen", "tcp://127.0.0.1:0", "--api-key-file", "x"], "exclude each other"),
        (["--seed", str(-(2**63) - 1)], "--seed is -9223372036854775809; it must fit 64 bits"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_flags_are_checked(flags, sentence):
    done = run_to_its_end("--run-dir", "x", *flags)
    assert done.returncode == 2
    assert sentence in done.stderr


def test_a_port_for_clients_that_is_taken_is_refused(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        done = run_to_its_end("--run-dir", str(tmp_path), "--port", "0", "--listen", listen)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(
        f"Cannot listen on {listen}: Address already in use: give --listen another port."
    )


def run_to_its_end(*flags):
    return subprocess.run(
        [sys.executable, "-m", "frontend", "--model", "y", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize("name", ["x" * 256, "東" * 256, "Hub/name 1"])
def test_a_legal_name_fits_every_answer(name):
    FrontendConfig(process=ProcessConfig(run_dir="x"), model="y", served_model_name=name)
    reply = StatusReply(model=name, ready=True, facts=None, live_requests=0, waiting_requests=0)
    encoded = msgspec.msgpack.encode(reply)
    assert msgspec.msgpack.decode(encoded, type=StatusReply) == reply
