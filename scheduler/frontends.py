"""The frontends' end of the scheduler process: one socket, a connection for each frontend.

A frontend that is gone, breaks the protocol or says Hello again has *left*: its sequences are to
be ended, and whatever it says next begins with Hello. No frontend can harm more than itself.
"""

import logging
import math
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, assert_never

from protocol.channels import Router
from protocol.connection import Codec, Connection, Outgoing
from protocol.errors import ProtocolError
from protocol.messages import (
    Abort,
    AddSequence,
    Drain,
    FrontendToScheduler,
    Hello,
    Numbered,
    Ping,
    QueuePositions,
    Resend,
    Reset,
    ResetCache,
    Role,
)

log = logging.getLogger(__name__)

MAX_TOLD = 1024
"""Strangers remembered as told; beyond it all may be told once more."""

PING_INTERVAL_S = 0.1
"""Shortest time between two Pings to a frontend, but for the next."""

PING_ROOM_S = 0.02
"""Shortest time where the last has told of a full queue, and there is room: frontends refuse
requests because of it."""

PING_LATEST_S = 1.0
"""Longest time: by this a frontend knows that the scheduler is there."""


@dataclass(frozen=True, slots=True)
class Left:
    """A frontend's connection has ended."""

    how: str


Event: TypeAlias = AddSequence | Abort | ResetCache | Left
"""What a frontend asks for, or that it asks for nothing more."""


class Frontends:
    """Every frontend that has said Hello, by the identity of its socket."""

    def __init__(self, router: Router, hello: Hello) -> None:
        """Serve frontends that say Hello with our own `hello`."""
        self._router = router
        self._hello = hello
        self._codec: Codec[FrontendToScheduler] = Codec(FrontendToScheduler)
        self._connections: dict[bytes, Connection[FrontendToScheduler]] = {}
        # Who has been told to say Hello; until they do, what they say is ignored.
        self._told: set[bytes] = set()
        self._events: list[tuple[bytes, Event]] = []
        self._last_ping = (0.0, Ping())
        self._has_news = False

    def receive(self) -> list[tuple[bytes, Event]]:
        """Return what has come since the last call, in order, each with a frontend's identity."""
        for source, frame in self._router.drain():
            connection = self._connections.get(source) or self._new_connection(source)
            try:
                message = connection.receive(frame)
            except ProtocolError as error:
                self._refuse(source, connection, str(error))
                continue
            match message:
                case AddSequence() | Abort() | ResetCache():
                    self._events.append((source, message))
                case Hello():
                    self._greet(source, message)
                case Reset():
                    self._leave(source, "forgets the connection")
                case None | Ping() | Drain() | Resend():
                    pass  # the connection has done what there is to do
                case _:
                    assert_never(message)
        events, self._events = self._events, []
        return events

    def send(self, source: bytes, message: Numbered) -> None:
        """Send to a frontend; nothing happens if it has left."""
        connection = self._connections.get(source)
        if connection is not None:
            connection.send(message)
            self._has_news = True

    def send_positions(self, source: bytes, positions: QueuePositions) -> None:
        """Send what a Ping follows at once, and so needs none of its own."""
        connection = self._connections.get(source)
        if connection is not None:
            connection.send(positions)

    def is_ping_due(self, now: float, waiting_requests: int, waiting_tokens: int) -> bool:
        """Return whether it is time to tell that we are there, given how long the queue is now."""
        last, told = self._last_ping
        interval_s = PING_LATEST_S
        if (told.waiting_requests, told.waiting_tokens) != (waiting_requests, waiting_tokens):
            has_room = _has_room(told, waiting_requests, waiting_tokens)
            gains_room = has_room and not _has_room(
                told, told.waiting_requests, told.waiting_tokens
            )
            interval_s = PING_ROOM_S if gains_room else PING_INTERVAL_S
        elif self._has_news:
            interval_s = PING_INTERVAL_S
        return now - last >= interval_s

    def ping(self, now: float, ping: Ping) -> None:
        """Tell that we are there, how the queue is, and which message was the last."""
        self._last_ping = (now, ping)
        self._has_news = False
        for connection in list(self._connections.values()):
            connection.send(ping)

    def _new_connection(self, source: bytes) -> Connection[FrontendToScheduler]:
        outgoing = Outgoing(self._hello.epoch)
        return Connection(partial(self._send_frame, source), self._codec, outgoing)

    def _greet(self, source: bytes, hello: Hello) -> None:
        if hello.role is not Role.FRONTEND:
            log.warning("ignored a %s that connected as a frontend", hello.role.name.lower())
            return
        if source in self._connections:
            # Its numbering starts anew, so nothing of the old connection can be continued.
            self._leave(source, "says Hello again")
        self._told.discard(source)
        connection = self._new_connection(source)
        connection.peer = hello
        self._connections[source] = connection
        connection.hello(self._hello)
        # So that the next is due at once: this one has heard none.
        self._last_ping = (-math.inf, self._last_ping[1])
        log.info("met frontend=%s", source.hex())

    def _refuse(self, source: bytes, connection: Connection[FrontendToScheduler], why: str) -> None:
        self._leave(source, "breaks the protocol")
        if source in self._told:
            return
        log.warning("refused a message of frontend=%s: %s", source.hex(), why)
        if len(self._told) >= MAX_TOLD:
            self._told.clear()
        self._told.add(source)
        # The Hello first: it says which version we speak and which epoch the Reset is of.
        connection.hello(self._hello)
        connection.send(Reset())

    def _send_frame(self, source: bytes, frame: bytes) -> None:
        if not self._router.send(source, frame):
            # If it was being told to say Hello it has not heard: it is told again when it speaks.
            self._told.discard(source)
            self._leave(source, "is gone or does not read")

    def _leave(self, source: bytes, how: str) -> None:
        if self._connections.pop(source, None) is not None:
            self._events.append((source, Left(how)))


def _has_room(limits: Ping, waiting_requests: int, waiting_tokens: int) -> bool:
    """Return whether a queue of this length takes a sequence, under the limits of a Ping."""
    return (
        waiting_requests < limits.max_waiting_requests
        and waiting_tokens < limits.max_waiting_tokens
    )
