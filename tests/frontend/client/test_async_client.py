"""The asyncio client against a scripted endpoint, over real sockets."""

import asyncio
import itertools
import time

import pytest

from frontend.client.async_client import AsyncClient
from frontend.client.errors import ClientUseError, EngineGoneError, EngineTimeoutError
from protocol.errors import ConfigError, ErrorCode, RequestError
from protocol.messages import (
    Abort,
    ErrorInfo,
    FinishReason,
    Generate,
    Reset,
    SamplingParams,
)

BAD = ErrorInfo(code=ErrorCode.CONTEXT_LENGTH_EXCEEDED, message="Too long.", param="prompt")


def tokens(prompt, sample=0):
    return [*(prompt.encode() if isinstance(prompt, str) else prompt), sample, 7]


def with_client(endpoint, use, **settings):
    """Connect a client, and return what `use` returns."""

    async def main():
        async with asyncio.timeout(30), AsyncClient(endpoint.address, **settings) as client:
            return await use(client)

    return asyncio.run(main())


async def in_thread(call, *arguments):
    """Let the event loop go on while a test waits for the endpoint."""
    return await asyncio.to_thread(call, *arguments)


def test_results_come_in_the_order_of_the_prompts(endpoint):
    endpoint.on_generate = endpoint.hold
    prompts = ["one", [4, 5], "three"]

    async def use(client):
        generating = asyncio.create_task(client.generate(prompts, SamplingParams(n=2)))
        await in_thread(endpoint.take, Generate, 3)
        endpoint.release(newest_first=True)
        return await generating

    for prompt, result in zip(prompts, with_client(endpoint, use), strict=True):
        assert result.prompt == prompt
        assert [sample.token_ids for sample in result.samples] == [
            tokens(prompt, 0),
            tokens(prompt, 1),
        ]


def test_many_tasks_each_get_their_own_results(endpoint):
    async def use(client):
        async def stream(prompt):
            return [token async for delta in client.stream(prompt) for token in delta.token_ids]

        prompts = [str(number) for number in range(40)]
        batches = [client.generate([prompt, prompt * 2]) for prompt in prompts]
        return await asyncio.gather(*batches, *map(stream, prompts))

    results = with_client(endpoint, use)
    for number in range(40):
        prompt = str(number)
        both = [result.token_ids for result in results[number]]
        assert both == [tokens(prompt), tokens(prompt * 2)]
        assert results[40 + number] == tokens(prompt)


def test_no_more_than_the_window_is_at_the_engine(endpoint):
    endpoint.on_generate = endpoint.hold

    async def use(client):
        asyncio.get_running_loop().call_later(0.2, endpoint.release)
        batches = await asyncio.gather(*(client.generate(["x"] * 5) for _ in range(5)))
        return sum(map(len, batches))

    assert with_client(endpoint, use, window=3) == 25
    assert endpoint.most_open == 3


def test_a_refusal_is_raised_or_returned(endpoint):
    refuse = endpoint.refuse(BAD)
    endpoint.on_generate = lambda source, g: (
        refuse if g.prompt == "bad" else endpoint.answer_at_once
    )(source, g)

    async def use(client):
        with pytest.raises(RequestError, match=r"Too long\."):
            await client.generate(["bad", "a"])
        return await client.generate(["bad", "a"], return_errors=True)

    bad, fine = with_client(endpoint, use)
    assert (bad.error.code, fine.token_ids) == (BAD.code, tokens("a"))


def test_cancelling_a_call_aborts_its_requests(endpoint):
    endpoint.on_generate = endpoint.hold

    async def use(client):
        generating = asyncio.create_task(client.generate(["a", "b"]))
        await in_thread(endpoint.take, Generate, 2)
        generating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await generating
        return await in_thread(endpoint.take, Abort, 2)

    assert [abort.request_id for abort in with_client(endpoint, use)] == [1, 2]


def test_a_slow_engine_is_left_after_the_timeout(endpoint):
    endpoint.on_generate = endpoint.hold

    async def use(client):
        with pytest.raises(EngineTimeoutError, match=r"timeout_s, 0\.2 s"):
            await client.generate("a", timeout_s=0.2)
        await in_thread(endpoint.take, Generate)
        await in_thread(endpoint.take, Abort)
        endpoint.answers_status = False
        with pytest.raises(EngineTimeoutError):
            await client.status(timeout_s=0.1)

    with_client(endpoint, use)


def test_the_prefix_cache_can_be_reset(endpoint):
    async def use(client):
        forgotten = await client.reset_prefix_cache()
        endpoint.reset_error = ErrorInfo(code=ErrorCode.NOT_READY, message="Starting.")
        with pytest.raises(RequestError, match=r"Starting\."):
            await client.reset_prefix_cache()
        return forgotten

    assert with_client(endpoint, use) == 2


def test_abort_ends_one_stream_or_all(endpoint):
    endpoint.on_generate = endpoint.hold

    async def use(client):
        streams = [client.stream(text) for text in "abc"]
        await client.abort(streams[1].request_id)
        assert [delta.finish_reason async for delta in streams[1]] == [FinishReason.ABORT]
        await client.abort()
        for stream in streams:
            assert [delta async for delta in stream] or stream is streams[1]
            assert stream.result().finish_reason is FinishReason.ABORT
        return (await client.status()).live_requests

    assert with_client(endpoint, use) == 0


def test_closing_aborts_what_runs_and_ends_the_client(endpoint):
    endpoint.on_generate = endpoint.hold

    async def main():
        client = await AsyncClient(endpoint.address).connect()
        generating = asyncio.create_task(client.generate("a"))
        await in_thread(endpoint.take, Generate)
        await client.close()
        await client.close()
        (result,) = await generating
        assert result.finish_reason is FinishReason.ABORT
        for call in (client.status, client.abort):
            with pytest.raises(ClientUseError, match="This client is closed"):
                await call()
        with pytest.raises(ClientUseError, match="has been connected before"):
            await client.connect()

    asyncio.run(main())
    endpoint.take(Abort)


def test_a_client_is_connected_before_use_and_used_in_its_own_loop(endpoint):
    client = AsyncClient(endpoint.address)
    with pytest.raises(ClientUseError, match="use `async with`"):
        client.stream("a")

    async def use(client):
        def elsewhere():
            with pytest.raises(ClientUseError, match="belongs to another event loop"):
                asyncio.run(client.status())

        await in_thread(elsewhere)

    with_client(endpoint, use)


# ------------------------------------------------------------------------------
# An engine that is not there, or not any more


def test_an_address_without_engine(address, tmp_path):
    async def main():
        with pytest.raises(EngineGoneError, match=r"did not answer within 0\.2 s"):
            await AsyncClient(address, connect_timeout_s=0.2).connect()
        with pytest.raises(ConfigError, match="Cannot connect to ipc://"):
            await AsyncClient("ipc://" + "x" * 200).connect()

    asyncio.run(main())
    with pytest.raises(ConfigError, match=r"holds no run\.json"):
        AsyncClient(tmp_path)


@pytest.mark.parametrize("streams", [False, True])
def test_an_engine_that_is_killed_is_noticed_at_once(endpoint, streams):
    endpoint.on_generate = endpoint.begin if streams else endpoint.hold

    async def use(client):
        async def stream():
            return [delta async for delta in client.stream("x")]

        call = asyncio.create_task(stream() if streams else client.generate(["x", "y"]))
        await in_thread(endpoint.take, Generate)
        await in_thread(endpoint.stop)
        started = time.monotonic()
        with pytest.raises(EngineGoneError, match="has ended"):
            await call
        assert time.monotonic() - started < 15
        with pytest.raises(EngineGoneError, match="has ended"):
            await client.status()

    with_client(endpoint, use)


def test_an_engine_that_hangs_is_left_after_the_silence_limit(endpoint):
    endpoint.on_generate = endpoint.hold

    async def use(client):
        endpoint.answers_status = False
        with pytest.raises(EngineGoneError, match=r"has answered nothing for 0\.3 s"):
            await client.generate("x")

    with_client(endpoint, use, silence_limit_s=0.3)


def test_a_program_that_blocks_its_loop_does_not_blame_the_engine(endpoint):
    async def use(client):
        await asyncio.sleep(0.05)
        time.sleep(0.7)  # noqa: ASYNC251 - that is the mistake
        return await client.generate("x")

    assert with_client(endpoint, use, silence_limit_s=0.3)[0].token_ids == tokens("x")


def test_the_frontend_is_told_to_forget_a_client_that_is_closed(endpoint):
    async def use(client):
        await client.generate("x")

    with_client(endpoint, use)
    endpoint.resets.get(timeout=10)


def test_an_engine_that_has_dropped_the_client_takes_it_again(endpoint):
    async def use(client):
        await client.generate("x")
        endpoint.forget_all()
        return await client.generate("y")

    assert with_client(endpoint, use)[0].token_ids == tokens("y")


def test_an_engine_that_forgets_the_client(endpoint):
    endpoint.on_generate = lambda source, _: endpoint.send(source, Reset())

    async def use(client):
        with pytest.raises(EngineGoneError, match="does not serve this client"):
            await client.generate("x")

    with_client(endpoint, use)


def test_a_busy_connection_leaves_other_tasks_their_turn(endpoint):
    async def use(client):
        ticks = []

        async def tick():
            while True:
                ticks.append(time.monotonic())
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        await client.generate(["x"] * 2000)
        ticking.cancel()
        most = max(b - a for a, b in itertools.pairwise(ticks))
        return most, len(ticks)

    most, count = with_client(endpoint, use)
    assert count > 30
    assert most < 1
