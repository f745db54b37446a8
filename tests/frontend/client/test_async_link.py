"""What ends the task behind an asyncio client ends what waits for it."""

import asyncio

import pytest

from frontend.client.async_link import AsyncLink
from frontend.client.errors import ClientUseError
from frontend.client.results import Ended
from protocol.errors import ProtocolError
from protocol.messages import Generate, Output, SamplingParams


def with_link(endpoint, use):
    async def main():
        link = AsyncLink(endpoint.address, window=4, silence_limit_s=5.0)
        try:
            async with asyncio.timeout(10):
                await link.greet(5.0)
                return await use(link)
        finally:
            await link.close()

    return asyncio.run(main())


def submit(link):
    events = asyncio.Queue()
    generate = Generate(request_id=0, prompt="x", params=SamplingParams())
    link.session.submit(generate, events.put_nowait)
    return events


def test_a_broken_protocol_fails_the_session(endpoint):
    def skip_a_token(source, generate):
        endpoint.send(
            source,
            Output(
                request_id=generate.request_id,
                sample=0,
                first_index=5,
                text="",
                token_ids=b"",
            ),
        )

    endpoint.on_generate = skip_a_token

    async def use(link):
        event = await link.next_event(submit(link), 5.0)
        assert isinstance(event, Ended)
        with pytest.raises(ProtocolError, match="left out tokens"):
            link.session.ask_status(lambda _: None)
        return event.error

    assert isinstance(with_link(endpoint, use), ProtocolError)


def test_closing_tells_who_waits(endpoint):
    endpoint.on_generate = endpoint.hold

    async def use(link):
        events = submit(link)
        await link.close()
        await link.next_event(events, 1.0)
        assert (await link.next_event(events, 1.0)) == Ended(request_id=1)
        with pytest.raises(ClientUseError, match="This client is closed"):
            submit(link)

    with_link(endpoint, use)


def test_a_link_that_never_greeted_closes(address):
    async def main():
        link = AsyncLink(address, window=4, silence_limit_s=5.0)
        await link.close()

    asyncio.run(main())
