"""An asyncio stream, and every way to leave it."""

import asyncio
import gc

import pytest

from frontend.client.async_client import AsyncClient
from frontend.client.errors import EngineTimeoutError
from protocol.columns import pack_int32, pack_int64
from protocol.errors import ErrorCode, RequestError
from protocol.messages import (
    Abort,
    ErrorInfo,
    FinishReason,
    Generate,
    QueuePositions,
    Usage,
)

BAD = ErrorInfo(code=ErrorCode.INVALID_REQUEST, message="No.", param="prompt")


def with_client(endpoint, use):
    """Connect a client, and return what `use` returns."""

    async def main():
        async with asyncio.timeout(30), AsyncClient(endpoint.address) as client:
            return await use(client)

    return asyncio.run(main())


def test_deltas_come_as_they_are_made(endpoint):
    async def use(client):
        async with client.stream("ab") as stream:
            deltas = [delta async for delta in stream]
        assert [delta async for delta in stream] == []
        return deltas, stream.result()

    deltas, result = with_client(endpoint, use)
    assert [delta.token_ids for delta in deltas] == [[97], [98], [0], [7]]
    assert [delta.finish_reason for delta in deltas] == [None] * 3 + [FinishReason.STOP]
    assert (result.text, result.token_ids) == ("[97][98][0][7]", [97, 98, 0, 7])
    assert result.usage == Usage(prompt_tokens=2, completion_tokens=4)
    endpoint.take(Generate)
    assert endpoint.received.empty()


async def leave_by_break(client):
    async for _ in client.stream("a"):
        break


async def leave_by_exception(client):
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the loop is the point
        async for _ in client.stream("a"):
            raise ZeroDivisionError


async def leave_by_cancellation(client):
    async def read():
        async for _ in client.stream("a"):
            pass

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.05)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def leave_by_close(client):
    stream = client.stream("a")
    await anext(stream)
    stream.close()
    assert [delta async for delta in stream] == []


async def leave_by_context(client):
    async with client.stream("a") as stream:
        await anext(stream)


async def leave_by_dropping(client):
    client.stream("a")


async def leave_by_dropping_in_a_thread(client):
    streams = [client.stream("a")]
    await asyncio.to_thread(streams.clear)


async def leave_in_a_cycle(client):
    cycle = [client.stream("a")]
    cycle.append(cycle)
    del cycle
    gc.collect()


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_break,
        leave_by_exception,
        leave_by_cancellation,
        leave_by_close,
        leave_by_context,
        leave_by_dropping,
        leave_by_dropping_in_a_thread,
        leave_in_a_cycle,
    ],
)
def test_leaving_early_aborts_the_request(endpoint, leave):
    endpoint.on_generate = endpoint.begin

    async def use(client):
        await leave(client)
        (generate,) = await asyncio.to_thread(endpoint.take, Generate)
        (abort,) = await asyncio.to_thread(endpoint.take, Abort)
        assert abort.request_id == generate.request_id
        return (await client.status()).live_requests

    assert with_client(endpoint, use) == 0


def test_a_stream_that_outlives_its_loop_is_dropped_in_silence(endpoint):
    endpoint.on_generate = endpoint.hold

    async def use(client):
        return client.stream("a")

    stream = with_client(endpoint, use)
    stream.close()
    del stream


def test_a_stream_that_says_nothing_is_left_after_the_timeout(endpoint):
    endpoint.on_generate = endpoint.begin

    async def use(client):
        stream = client.stream("a", timeout_s=0.2)
        with pytest.raises(EngineTimeoutError):
            [delta async for delta in stream]
        await asyncio.to_thread(endpoint.take, Generate)
        await asyncio.to_thread(endpoint.take, Abort)
        return stream.result()

    assert with_client(endpoint, use).token_ids == [97, 0]


def test_a_refusal_is_raised_where_the_stream_is_read(endpoint):
    endpoint.on_generate = endpoint.refuse(BAD)

    async def use(client):
        with pytest.raises(RequestError, match=r"No\."):
            await anext(client.stream("a"))
        with pytest.raises(RequestError, match="half a surrogate pair"):
            client.stream("\ud800")

    with_client(endpoint, use)


def test_it_tells_where_its_request_waits(endpoint):
    endpoint.on_generate = endpoint.hold

    async def use(client):
        told = []
        stream = client.stream("ab", on_position=told.append)
        await asyncio.to_thread(endpoint.take, Generate)
        for position in (2, 1):
            message = QueuePositions(requests=pack_int64([1]), positions=pack_int32([position]))
            endpoint.send_to_all(message)
        endpoint.release()
        deltas = [delta async for delta in stream]
        return told, stream.queue_position, len(deltas)

    assert with_client(endpoint, use) == ([2, 1, 0], 0, 4)
