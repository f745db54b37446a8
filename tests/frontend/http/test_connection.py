"""Connections by hand: what no HTTP library would send."""

import asyncio
import contextlib
import time

import pytest

from tests.frontend.conftest import until


async def exchange(port, *parts, pause=0.0):
    """Send parts with pauses; return all that comes back until the server hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause)
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "bytes_sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        HEAD + b"Content-Length: -5\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 40_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
    ],
    ids=lambda sent: repr(sent[-40:]),
)
def test_what_is_no_http_is_refused_and_hung_up_on(serve, bytes_sent):
    async def use(serving):
        answer = await exchange(serving.http.port, bytes_sent)
        return answer, await serving.http.request("GET", "/health")

    answer, health = serve(use)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert health[0] == 200


def test_the_refusal_is_an_error_object(serve):
    async def use(serving):
        return await exchange(serving.http.port, b"nonsense\r\n\r\n")

    head, _, body = serve(use).partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    assert body == (
        b'{"error":{"message":"Invalid HTTP request received.","type":"invalid_request_error",'
        b'"param":null,"code":"invalid_http"}}'
    )


@pytest.mark.parametrize("parts", [(), (b"GET /hea",), (b"GET /health HTTP/1.1\r\n", b"Host: ")])
def test_a_head_that_does_not_come_is_not_waited_for(serve, monkeypatch, parts):
    monkeypatch.setattr("frontend.http.connection.HEAD_TIMEOUT_S", 0.2)

    async def use(serving):
        started = time.monotonic()
        answer = await exchange(serving.http.port, *parts, pause=0.01)
        return answer, time.monotonic() - started

    answer, seconds = serve(use)
    assert answer == b""
    assert 0.1 < seconds < 9  # the time without the patch is 10


def test_a_later_head_on_the_same_connection_is_not_waited_for_either(serve, monkeypatch):
    monkeypatch.setattr("frontend.http.connection.HEAD_TIMEOUT_S", 0.2)

    async def use(serving):
        return await exchange(
            serving.http.port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /he", pause=0.1
        )

    answer = serve(use)
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.count(b"HTTP/1.1") == 1


def test_a_long_answer_outlives_the_wait_for_heads(serve, monkeypatch):
    monkeypatch.setattr("frontend.http.connection.HEAD_TIMEOUT_S", 0.1)

    async def use(serving):
        body = {"prompt": "x", "max_tokens": 1}
        answer = asyncio.create_task(serving.http.post("/v1/completions", body))
        sequence = await serving.scheduler.next_sequence()
        await asyncio.sleep(0.3)
        serving.scheduler.tokens(sequence, [5], reason=2)
        return await answer

    assert serve(use)[0] == 200


def test_two_requests_on_one_connection(serve):
    request = b"GET /version HTTP/1.1\r\nHost: x\r\n%b\r\n"

    async def use(serving):
        return await exchange(serving.http.port, request % b"" + request % b"Connection: close\r\n")

    assert serve(use).count(b"HTTP/1.1 200") == 2


COMPLETION = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: 30\r\n\r\n" + b'{"prompt":"x","max_tokens":10}'
)


@pytest.mark.parametrize("ahead", [0, 100, 60_000])
def test_a_client_that_leaves_is_noticed_behind_what_it_sent_ahead(serve, ahead):
    async def use(serving):
        _, writer = await asyncio.open_connection("127.0.0.1", serving.http.port)
        writer.write(COMPLETION)
        await serving.scheduler.next_sequence()
        for _ in range(2):
            writer.write(b"x" * (ahead // 2))
            await writer.drain()
            await asyncio.sleep(0.02)
        writer.close()
        await until(lambda: serving.scheduler.aborts)
        return serving.scheduler.aborts

    assert len(serve(use)) == 1


def test_a_client_that_sends_much_ahead_is_hung_up_on(serve):
    async def use(serving):
        reader, writer = await asyncio.open_connection("127.0.0.1", serving.http.port)
        writer.write(COMPLETION)
        await serving.scheduler.next_sequence()
        with contextlib.suppress(ConnectionError):
            writer.write(b"x" * (1 << 20))
            await reader.read()
        await until(lambda: serving.scheduler.aborts)
        writer.close()
        return len(serving.scheduler.aborts)

    assert serve(use) == 1


def test_a_client_that_ends_its_sending_direction_has_left(serve):
    async def use(serving):
        _, writer = await asyncio.open_connection("127.0.0.1", serving.http.port)
        writer.write(COMPLETION)
        await serving.scheduler.next_sequence()
        writer.write_eof()
        await until(lambda: serving.scheduler.aborts)
        writer.close()
        return len(serving.scheduler.aborts)

    assert serve(use) == 1
