"""Text jobs under deadlines and deaths, with real processes."""

import asyncio
import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
import zmq.asyncio

from frontend.text.config import TextConfig
from frontend.text_client import TextClient
from protocol.columns import unpack_int32
from protocol.errors import ErrorCode, ModelFileError, ProcessError, RequestError
from protocol.lifecycle import ProcessConfig
from protocol.messages import ChatMessage

TEMPLATE = """
{%- set text = messages[0].content -%}
{%- if text == 'loop' -%}
  {%- for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor -%}
{%- elif text == 'fill' -%}
  {{ 'x' * 10000000000 }}
{%- elif text == 'refuse' -%}
  {{ raise_exception('Say something else.') }}
{%- endif -%}
<|im_start|>{{ text }}<|im_end|>"""


@pytest.fixture
def model(tmp_path, smol):
    """A model directory whose template loops, fills memory or refuses on demand."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "tokenizer.json").symlink_to(smol.tokenizer_file)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return directory


def say(text):
    return [ChatMessage(role="user", content=text)]


async def until(condition):
    """Wait until something is so; the test's timeout bounds it."""
    while not condition():  # noqa: ASYNC110 - it is a process's doing, not ours
        await asyncio.sleep(0.01)


def with_client(model, use, *, run_dir=None, render_timeout_s=2.0, **settings):
    """Run a text client over a model, use it once it is ready, and return what `use` returns."""
    run_dir = run_dir or model.parent

    async def main():
        context = zmq.asyncio.Context()
        config = TextConfig(
            process=ProcessConfig(run_dir=str(run_dir)),
            address=f"ipc://{run_dir}/text-0",
            model=str(model),
            tokenizer_cache=str(run_dir / "cache"),
            **settings,
        )
        client = TextClient(
            context, config, tokenize_timeout_s=5.0, render_timeout_s=render_timeout_s
        )
        running = asyncio.create_task(client.run())
        try:
            async with asyncio.timeout(30):
                ready = asyncio.create_task(client.ready.wait())
                await asyncio.wait({ready, running}, return_when=asyncio.FIRST_COMPLETED)
                ready.cancel()
                return await use(client) if client.ready.is_set() else await running
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError, ModelFileError, ProcessError):
                await running
            context.destroy(linger=0)

    return asyncio.run(main())


def test_jobs_are_answered(model):
    async def use(client):
        texts = await asyncio.gather(*(client.tokenize("hello" + " hello" * n) for n in range(40)))
        return texts, await client.render(say("hello"))

    texts, chat = with_client(model, use)
    assert [len(unpack_int32(text)) for text in texts] == list(range(1, 41))
    assert unpack_int32(chat) == [1, 28120, 2]


def test_a_job_past_its_deadline_fails_alone(model):
    async def use(client):
        first = client.pid
        started = time.monotonic()
        results = await asyncio.gather(
            client.render(say("hello")),
            client.render(say("loop")),
            *(client.tokenize("hello") for _ in range(20)),
            return_exceptions=True,
        )
        return results, time.monotonic() - started, client.pid != first, client.restarts

    results, seconds, replaced, restarts = with_client(model, use, render_timeout_s=0.5)
    (good, failed, *others) = results
    assert unpack_int32(good) == [1, 28120, 2]
    assert isinstance(failed, RequestError)
    assert failed.code is ErrorCode.TEXT_FAILED
    assert failed.message == (
        "Rendering the messages took longer than 0.5 s; nothing else was affected."
    )
    assert [unpack_int32(other) for other in others] == [[28120]] * 20
    assert replaced
    assert restarts == 1
    assert seconds < 5


def test_the_templates_own_refusal_reaches_the_client(model):
    async def use(client):
        with pytest.raises(RequestError) as caught:
            await client.render(say("refuse"))
        return caught.value, client.restarts

    error, restarts = with_client(model, use)
    assert error.message == "The model's chat template refuses the messages: Say something else."
    assert restarts == 0


def test_a_template_that_fills_memory_costs_one_request(model):
    async def use(client):
        with pytest.raises(RequestError, match=r"needs too much memory|ended the text process"):
            await client.render(say("fill"))
        return await client.render(say("hello"))

    assert unpack_int32(with_client(model, use)) == [1, 28120, 2]


def test_a_process_killed_while_idle_is_replaced(model):
    async def use(client):
        for _ in range(2):
            first = client.pid
            os.kill(first, signal.SIGKILL)
            assert unpack_int32(await client.tokenize("hello")) == [28120]
            assert client.pid != first
        return client.restarts

    assert with_client(model, use) == 2


def test_a_job_whose_process_dies_is_tried_once_more(model):
    async def use(client):
        job = asyncio.create_task(client.render(say("loop")))
        others = [asyncio.create_task(client.tokenize("hello")) for _ in range(12)]
        for deaths in (0, 1):
            await until(lambda deaths=deaths: client.pid and client.restarts == deaths)
            await asyncio.sleep(0.1)
            os.kill(client.pid, signal.SIGKILL)
        results = await asyncio.gather(job, *others, return_exceptions=True)
        return results, client.restarts

    (failed, *others), restarts = with_client(model, use, render_timeout_s=10.0)
    assert isinstance(failed, RequestError)
    assert "ended the text process twice" in failed.message
    assert [unpack_int32(other) for other in others] == [[28120]] * 12
    assert restarts == 2


def test_a_job_nobody_waits_for_is_not_done(model):
    async def use(client):
        slow = asyncio.create_task(client.render(say("loop")))
        gone = [asyncio.create_task(client.render(say("loop"))) for _ in range(20)]
        await asyncio.sleep(0.05)
        for job in gone:
            job.cancel()
        ids = await client.tokenize("hello")
        with pytest.raises(RequestError):
            await slow
        return unpack_int32(ids), client.restarts

    ids, restarts = with_client(model, use, render_timeout_s=0.2)
    assert ids == [28120]
    # Those already at the process could not be called back; the other thirteen were never sent.
    assert restarts <= 8


def test_too_many_waiting_texts_are_refused(model):
    async def use(client):
        slow = asyncio.create_task(client.render(say("loop")))
        await asyncio.sleep(0)
        many = [asyncio.create_task(client.tokenize("x")) for _ in range(1024 + 7)]
        await asyncio.sleep(0.05)
        with pytest.raises(RequestError) as caught:
            await client.tokenize("one more")
        for job in [slow, *many]:
            job.cancel()
        return caught.value.code

    assert with_client(model, use) is ErrorCode.OVERLOADED


def test_a_broken_tokenizer_ends_the_start(model):
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is not a tokenizer file"):
        with_client(model, None)


def test_a_process_that_never_becomes_ready_ends_the_start(model, monkeypatch):
    monkeypatch.setenv("PYTHONHOME", str(Path("/nothing")))
    with pytest.raises(ProcessError, match="No text process becomes ready"):
        with_client(model, None)


@pytest.mark.parametrize(
    "loop",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 99999999 ** 99999999 }}",  # one call of C, while the template is compiled
    ],
)
def test_a_template_that_loops_at_once_ends_the_client_with_a_sentence(model, loop):
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": loop}))
    with pytest.raises(ModelFileError) as caught:
        with_client(model, None, rehearsal_cpu_s=1.0)
    assert str(caught.value) == (
        f"The chat template of {model} takes more than 1 s for one plain message: it loops, and "
        "the model needs another."
    )
