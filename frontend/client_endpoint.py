"""The endpoint for ZeroMQ clients: the engine client, without HTTP.

    Generate  →  Output …, one last for each sample
    Abort     →  AbortAck; nothing more comes of what it names
    Status    →  StatusReply
    ResetCache  →  CacheReset

Each client is known by its socket's identity and has a numbered connection of its own. One that is
gone, breaks the protocol, says Reset or says Hello again has left: its requests are aborted, and
whatever it says next begins with Hello. A client owes nothing, so silence is no sign of its end; a
Ping that no longer reaches it is. No client sees or touches another's; request ids are each
client's own.
"""

import asyncio
import logging
import os
from functools import partial
from typing import assert_never

from frontend.client_session import ClientSession
from frontend.engine_client import EngineClient
from protocol.channels import AsyncRouter
from protocol.connection import Codec, Connection, Outgoing
from protocol.errors import ProtocolError
from protocol.messages import (
    Abort,
    ClientToFrontend,
    Drain,
    Generate,
    Hello,
    Ping,
    Resend,
    Reset,
    ResetCache,
    Role,
    Status,
)

MAX_CLIENTS = 1024
MAX_TOLD = 1024
"""Strangers remembered as told; beyond it all may be told once more."""
PING_INTERVAL_S = 2.0
"""How long one that is gone may keep its requests and its place."""

log = logging.getLogger(__name__)


class ClientEndpoint:
    """Serves ZeroMQ clients on one socket."""

    def __init__(
        self, router: AsyncRouter, engine: EngineClient, model: str, *, epoch: int
    ) -> None:
        """`model`: the name it is served by."""
        self._router = router
        self._engine = engine
        self._model = model
        self._epoch = epoch
        self._identity = os.urandom(16)
        self._codec: Codec[ClientToFrontend] = Codec(ClientToFrontend)
        self._sessions: dict[bytes, ClientSession] = {}
        # Who has been told to say Hello; until they do, what they say is ignored.
        self._told: set[bytes] = set()

    async def run(self) -> None:
        """Serve clients; never returns."""
        while True:
            client, frame = await self._router.receive()
            self._take(client, frame)
            # The next message may be there already, and taking it would let nobody in between.
            await asyncio.sleep(0)

    async def watch(self) -> None:
        """Leave clients that are gone; never returns."""
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            self.leave_gone()

    def leave_gone(self) -> None:
        """Leave every client that a Ping does not reach."""
        # Not of their connections, and so of no gap: a client that is only idle has its queue full
        # of these after some hours, and must then be able to do without the next.
        ping = Outgoing(self._epoch).frame(Ping())
        for client in list(self._sessions):
            if not self._router.reaches(client, ping):
                self._leave(client, "is gone")

    def close(self) -> None:
        """Abort every client's requests and close the socket."""
        for client in list(self._sessions):
            self._leave(client, "is served no longer: the server stops")
        self._router.close()

    def _take(self, client: bytes, frame: bytes) -> None:
        session = self._sessions.get(client)
        connection = session.connection if session else self._connection(client)
        try:
            message = connection.receive(frame)
            match message:
                case Hello():
                    self._greet(client, message)
                case Generate() | Abort() | Status() | ResetCache():
                    if session is not None:
                        session.handle(message)
                case Reset():
                    self._leave(client, "forgets the connection")
                case None | Ping() | Drain() | Resend():
                    pass  # the connection has done what there is to do
                case _:
                    assert_never(message)
        except ProtocolError as error:
            self._refuse(client, str(error))

    def _greet(self, client: bytes, hello: Hello) -> None:
        if hello.role is not Role.CLIENT:
            raise ProtocolError(f"A {hello.role.name.lower()} connects where clients do.")
        # Its numbering starts anew, so nothing of an older connection can be continued.
        self._leave(client, "says Hello again")
        if len(self._sessions) >= MAX_CLIENTS:
            raise ProtocolError(f"There are {MAX_CLIENTS} clients already.")
        self._told.discard(client)
        connection = self._connection(client)
        connection.peer = hello
        self._sessions[client] = ClientSession(connection, self._engine, self._model)
        connection.hello(self._hello())

    def _refuse(self, client: bytes, why: str) -> None:
        self._leave(client, "breaks the protocol")
        if client in self._told:
            return
        log.warning("refused a message of client=%s: %s", client.hex(), why)
        if len(self._told) >= MAX_TOLD:
            self._told.clear()
        self._told.add(client)
        # The Hello first: it says which version we speak and which epoch the Reset is of.
        connection = self._connection(client)
        connection.hello(self._hello())
        connection.send(Reset())

    def _hello(self) -> Hello:
        return Hello(
            role=Role.FRONTEND,
            identity=self._identity,
            epoch=self._epoch,
            facts=self._engine.facts,
        )

    def _connection(self, client: bytes) -> Connection[ClientToFrontend]:
        return Connection(partial(self._send, client), self._codec, Outgoing(self._epoch))

    def _send(self, client: bytes, frame: bytes) -> None:
        if not self._router.send(client, frame):
            self._told.discard(client)
            self._leave(client, "is gone or does not read")

    def _leave(self, client: bytes, how: str) -> None:
        session = self._sessions.pop(client, None)
        if session is not None:
            log.info("left client=%s because it %s", client.hex(), how)
            session.close()
