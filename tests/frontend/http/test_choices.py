import asyncio

import pytest

from frontend.engine_client import EngineClient
from frontend.generation import GenerationRequest
from frontend.http.choices import start_choices, watch_client
from frontend.seeds import SeedSource
from protocol.columns import pack_int32
from protocol.errors import RequestError
from protocol.messages import Abort, AddSequence, FinishReason, SamplingParams, Usage
from tests.frontend.conftest import FACTS, DeskText, make_deltas


@pytest.fixture
def run(smol, smol_desk, smol_vocabulary):
    """Return a function that runs a coroutine function with an engine client and what it sends."""

    async def main(use):
        sent = []
        engine = EngineClient(
            sent.append, DeskText(smol_desk), SeedSource(0, 0), max_live_sequences=64
        )
        engine.meet_scheduler(FACTS)
        engine.learn_text(smol, smol_vocabulary)
        return await use(engine, sent)

    return lambda use: asyncio.run(main(use))


def requests(*prompts, n=1):
    params = SamplingParams(n=n)
    return [GenerationRequest(prompt=prompt, params=params) for prompt in prompts]


def test_choices_are_numbered_prompt_first(run):
    async def use(engine, sent):
        choices = await start_choices(engine, requests("a", "b c", n=2))
        for sequence in sent:
            deltas = make_deltas(
                sequence, [5], first=0, reason=FinishReason.LENGTH, cached=sequence.request_id
            )
            engine.take_deltas(deltas)
        return choices.count, await choices.take(), choices.usage()

    count, deltas, usage = run(use)
    assert count == 4
    assert [(d.choice, d.delta.request_id, d.delta.sample) for d in deltas] == [
        (0, 1, 0),
        (1, 1, 1),
        (2, 2, 0),
        (3, 2, 1),
    ]
    assert usage == Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=3)


def test_of_requests_one_of_which_is_refused_none_starts(run):
    async def use(engine, sent):
        with pytest.raises(RequestError):
            await start_choices(engine, requests("fine", ""))
        return sent, engine.num_live_requests

    assert run(use) == ([], 0)


def test_closing_aborts_what_has_not_ended(run):
    async def use(engine, sent):
        choices = await start_choices(engine, requests("a", "b"))
        engine.take_deltas(make_deltas(sent[0], [5], first=0, reason=FinishReason.LENGTH))
        choices.close()
        choices.close()
        return [type(message) for message in sent], sent[-1]

    types, abort = run(use)
    assert types == [AddSequence, AddSequence, Abort]
    assert (abort.request_id, abort.sample) == (2, -1)


def test_a_client_that_leaves_wakes_the_reader(run):
    async def use(engine, sent):
        choices = await start_choices(engine, requests("a"))
        messages = asyncio.Queue()
        with watch_client(messages.get, choices) as client:
            reader = asyncio.create_task(choices.take())
            messages.put_nowait({"type": "http.request"})
            await asyncio.sleep(0.01)
            before = (client.is_gone, reader.done())
            messages.put_nowait({"type": "http.disconnect"})
            return before, await reader, client.is_gone

    assert run(use) == ((False, False), [], True)


def test_nobody_is_watched_after_the_answer(run):
    async def use(engine, sent):
        choices = await start_choices(engine, requests(pack_int32([1])))
        before = len(asyncio.all_tasks())
        with watch_client(asyncio.Queue().get, choices):
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        return len(asyncio.all_tasks()) - before

    assert run(use) == 0
