import asyncio
import logging
import resource
import signal

import pytest

from frontend.http.listener import open_listener
from frontend.http.server import HttpServer, allow_many_connections
from tests.frontend.conftest import Http


def with_server(app, use, **settings):
    async def main():
        listener = open_listener("127.0.0.1", 0, is_guarded=False)
        server = HttpServer(app, listener, **settings)
        running = asyncio.create_task(server.run())
        http = Http(listener.getsockname()[1])
        try:
            async with asyncio.timeout(10):
                return await use(server, http, running)
        finally:
            http.close()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            listener.close()

    return asyncio.run(main())


def answering_after(wait):
    async def app(scope, receive, send):
        await wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    return app


def test_it_serves_until_told_to_stop_and_finishes_its_answers():
    gate = asyncio.Event()

    async def use(server, http, running):
        answer = asyncio.create_task(http.request("GET", "/"))
        await asyncio.sleep(0.05)
        server.stop()
        await asyncio.sleep(0.3)
        still = not running.done()
        gate.set()
        status, _, content = await answer
        await running
        with pytest.raises(OSError, match="Connect call failed"):
            await http.request("GET", "/")
        return still, status, content

    assert with_server(answering_after(gate.wait), use) == (True, 200, b"done")


def test_signals_are_left_alone():
    async def use(server, http, running):
        await asyncio.sleep(0.02)
        return signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    before = signal.getsignal(signal.SIGTERM)
    term, _ = with_server(answering_after(asyncio.sleep), use)
    assert term is before


def test_what_is_cut_off_at_the_end_is_not_logged_as_an_error(caplog):
    async def use(server, http, running):
        await http.open("GET", "/")
        await asyncio.sleep(0.05)

    with_server(answering_after(asyncio.Event().wait), use)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_connections_beyond_the_limit_are_told_so_with_one_line_in_the_log(caplog):
    async def use(server, http, running):
        held = [await asyncio.open_connection("127.0.0.1", http.port) for _ in range(3)]
        answers = []
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
            answers.append(await reader.read())
            writer.close()
        for _, writer in held:
            writer.close()
            await writer.wait_closed()
        await asyncio.sleep(0.05)
        return answers, (await http.request("GET", "/"))[0]

    async def at_once():
        pass

    answers, status = with_server(answering_after(at_once), use, max_connections=3)
    assert all(answer.startswith(b"HTTP/1.1 503") for answer in answers)
    assert b"There are too many connections." in answers[0]
    assert status == 200
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == "hangs up on new clients: 3 connections are open"


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "connections"),
    [
        (256, 1 << 20, 8192, 2048),
        (256, 1024, 1024, 256),
        (1 << 16, 1 << 20, 1 << 16, 2048),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY, 2048),
    ],
)
def test_the_limit_of_descriptors_rises_and_bounds_the_connections(
    monkeypatch, soft, hard, raised, connections
):
    limits = [soft, hard]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(slice(2), new))
    assert allow_many_connections() == connections
    assert limits == [raised, hard]
