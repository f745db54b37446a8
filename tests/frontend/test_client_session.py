"""A session on its own: what the endpoint's tests do not reach."""

import asyncio

import pytest

from frontend.client_session import MAX_REQUESTS, ClientSession
from frontend.engine_client import EngineClient
from frontend.seeds import SeedSource
from protocol.columns import pack_int32
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import Abort, AbortAck, AbortState, Generate, SamplingParams
from tests.frontend.conftest import FACTS, DeskText

PROMPT = pack_int32([1, 2, 3])


class Sent(list):
    """Stands for a connection: keeps what is sent."""

    def send(self, message):
        self.append(message)


@pytest.fixture
def run(smol, smol_desk, smol_vocabulary):
    """Return a function that runs a coroutine function with a session, its output, its engine."""

    async def main(use):
        to_scheduler = []
        engine = EngineClient(
            to_scheduler.append, DeskText(smol_desk), SeedSource(0, 0), max_live_sequences=10**6
        )
        engine.meet_scheduler(FACTS)
        engine.learn_text(smol, smol_vocabulary)
        sent = Sent()
        session = ClientSession(sent, engine, "smol")
        try:
            return await use(session, sent, engine)
        finally:
            session.close()
            await asyncio.sleep(0)

    return lambda use: asyncio.run(main(use))


def generate(request_id):
    return Generate(request_id=request_id, prompt_ids=PROMPT, params=SamplingParams())


async def turn():
    for _ in range(3):
        await asyncio.sleep(0)


def test_a_live_id_cannot_be_used_again(run):
    async def use(session, sent, engine):
        session.handle(generate(1))
        with pytest.raises(ProtocolError, match="Request 1 is live already"):
            session.handle(generate(1))

    run(use)


def test_too_many_requests_of_one_client_are_refused(run):
    async def use(session, sent, engine):
        for request_id in range(MAX_REQUESTS + 1):
            session.handle(generate(request_id))
        await turn()
        return sent, engine.num_live_requests

    (refused,), live = run(use)
    assert (refused.request_id, refused.error.code) == (MAX_REQUESTS, ErrorCode.OVERLOADED)
    assert live == MAX_REQUESTS


def test_closing_aborts_what_is_live_and_stops_what_has_not_started(run):
    async def use(session, sent, engine):
        session.handle(generate(1))
        await turn()
        live = engine.num_live_requests
        session.handle(generate(2))
        session.close()
        await turn()
        return live, engine.num_live_requests, sent

    assert run(use) == (1, 0, [])


@pytest.mark.parametrize("token_id", [1, -1])
def test_an_abort_of_one_sample_before_the_start_leaves_the_others(run, token_id):
    async def use(session, sent, engine):
        prompt_ids = pack_int32([token_id])
        session.handle(
            Generate(request_id=1, prompt_ids=prompt_ids, params=SamplingParams(n=2), stream=False)
        )
        for _ in range(3):
            session.handle(Abort(request_id=1, sample=0))
        await turn()
        for _ in range(engine.num_unacknowledged_aborts):
            engine.take_ack(
                AbortAck(request_id=1, sample=0, state=AbortState.LIVE, blocks_returned=2)
            )
        await turn()
        acks = [message for message in sent if isinstance(message, AbortAck)]
        return acks, engine.num_live_requests

    (ack,), num_live = run(use)
    state, live = (AbortState.LIVE, 1) if token_id == 1 else (AbortState.UNKNOWN, 0)
    assert (ack.sample, ack.state) == (0, state)
    assert num_live == live


def test_an_abort_that_the_scheduler_does_not_confirm_is_answered_all_the_same(run, monkeypatch):
    monkeypatch.setattr("frontend.client_session.ABORT_TIMEOUT_S", 0.02)

    async def use(session, sent, engine):
        session.handle(generate(1))
        await turn()
        session.handle(Abort(request_id=1))
        await turn()
        early = list(sent)
        await asyncio.sleep(0.05)
        return early, sent

    early, (ack,) = run(use)
    assert early == []
    assert isinstance(ack, AbortAck)
    assert (ack.state, ack.blocks_returned) == (AbortState.LIVE, 0)
