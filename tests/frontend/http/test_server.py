import asyncio
import logging
import signal

import pytest

from frontend.http.listener import open_listener
from frontend.http.server import HttpServer, allow_many_descriptors
from tests.frontend.conftest import Http


def with_server(app, use):
    async def main():
        listener = open_listener("127.0.0.1", 0, is_guarded=False)
        server = HttpServer(app, listener)
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


def test_the_limit_of_descriptors_only_rises():
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_many_descriptors()
    after = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert after[0] >= before[0]
    assert after[1] == before[1]
