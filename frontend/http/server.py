"""uvicorn as one coroutine of this process, without its own ideas about signals."""

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from frontend.http.connection import ClientConnection, Room
from frontend.http.edge import MAX_HEADER_BYTES

MAX_CONNECTIONS = 2048
SHARES = 4
"""Connections may take one share of this process's descriptors, those being accepted another; the
rest is for everything else."""
KEEP_ALIVE_S = 5
"""How long an idle connection is kept."""


class HttpServer:
    """Serves an application on a listening socket."""

    def __init__(
        self, app: ASGIApp, listener: socket.socket, *, max_connections: int = MAX_CONNECTIONS
    ) -> None:
        """Answer no more than `max_connections` at once; others are told so and hung up on."""
        config = uvicorn.Config(
            app,
            http=partial(ClientConnection, Room(max_connections)),  # type: ignore[arg-type]
            # As many are accepted before the first is looked at.
            backlog=max_connections,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
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


def allow_many_connections() -> int:
    """Raise this process's limit of open descriptors as far as need be and return how many
    connections it allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = SHARES * MAX_CONNECTIONS
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = limit
    available = wanted if soft == resource.RLIM_INFINITY else soft
    return min(MAX_CONNECTIONS, available // SHARES)
