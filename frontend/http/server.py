"""uvicorn as one coroutine of this process, without its own ideas about signals."""

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from frontend.http.connection import ClientConnection
from frontend.http.edge import MAX_HEADER_BYTES

MAX_CONNECTIONS = 2048
KEEP_ALIVE_S = 5
"""How long an idle connection is kept."""


class HttpServer:
    """Serves an application on a listening socket."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            http=ClientConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._server = _Server(config)
        self._listener = listener

    async def run(self) -> None:
        """Serve until told to stop; then until the answers under way are out."""
        logging.getLogger("uvicorn.error").addFilter(_is_worth_logging)
        await self._server.serve(sockets=[self._listener])

    def stop(self) -> None:
        """Take no new connections, let the answers under way end, then end `run`."""
        self._server.should_exit = True


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: they are the process's."""
        yield


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Leave out that answers are cut off when the process ends at once: that is nobody's error."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def allow_many_descriptors() -> None:
    """Raise this process's limit of open descriptors to what it may be: each client needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MAX_CONNECTIONS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
