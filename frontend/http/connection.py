"""One client's connection: uvicorn's, with limits to a client's patience with us and ours with it.

A client that does not finish its request's head, or that reads nothing of its answer for long, is
hung up on, whatever it was doing: the route then sees that it has left. So is one that sends much
before its turn: what it sends has to be read, or its leaving would not be noticed.

A client that ends its sending direction has left. One that only does that and one that is gone look
the same until an answer is sent, and the blocks of one that is gone are wanted elsewhere.
"""

import asyncio
import logging
import time
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from frontend.http.errors import HttpError, error_body

HEAD_TIMEOUT_S = 10.0
"""From a connection's, or a later request's, first byte to the end of the request's head."""
SLOW_CLIENT_S = 60.0
"""How long a client may leave what is sent to it unread."""

REFUSED_BODY_S = 2.0
"""How long the rest of a body that was answered early is read, so that the answer arrives: a client
that is hung up on while it sends sees a reset instead."""
MAX_AHEAD_BYTES = 64 << 10
"""What a client may send of its next requests before its answer is out."""
FULL_LOG_INTERVAL_S = 10.0

log = logging.getLogger(__name__)


class Room:
    """How many connections there may be at once."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._last_told = -FULL_LOG_INTERVAL_S

    def has_place(self, num_connections: int) -> bool:
        """Return whether so many may stay; if not, say so in the log now and then."""
        if num_connections <= self.limit:
            return True
        now = time.monotonic()
        if now - self._last_told >= FULL_LOG_INTERVAL_S:
            self._last_told = now
            log.warning("hangs up on new clients: %d connections are open", self.limit)
        return False


class ClientConnection(H11Protocol):
    """A connection that is hung up on if its client is too slow."""

    _timers: dict[str, asyncio.TimerHandle]
    """What we are waiting for, while we are."""

    def __init__(self, room: Room, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 (uvicorn's)
        super().__init__(*args, **kwargs)
        self._room = room

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a request."""
        super().connection_made(transport)
        self._timers = {}
        if self._room.has_place(len(self.connections)):
            self._expect("to finish its request's head", HEAD_TIMEOUT_S)
        else:
            self._refuse(HttpError(503, "There are too many connections.", code="overloaded"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        for what in list(self._timers):
            self._met(what)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take in some of a request."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._expect("to finish its request's head", HEAD_TIMEOUT_S)
        else:
            self._met("to finish its request's head")
        if self.conn.their_state is not h11.SEND_BODY:
            self._met("to end a body that was answered")
        if self.conn.their_state is h11.DONE:
            self._look_ahead()

    def on_response_complete(self) -> None:
        """Go on to the next request, or bear with the rest of this one."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._expect("to end a body that was answered", REFUSED_BODY_S)

    def pause_writing(self) -> None:
        """Note that the client has stopped reading."""
        super().pause_writing()
        self._expect("to read its answer", SLOW_CLIENT_S)

    def resume_writing(self) -> None:
        """Note that the client reads again."""
        self._met("to read its answer")
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in the form of all our errors."""
        self._refuse(HttpError(400, msg, code="invalid_http"))

    def _refuse(self, error: HttpError) -> None:
        """Answer without an application, and hang up."""
        body = error_body(error)
        head = [("content-type", "application/json"), ("connection", "close")]
        head.append(("content-length", str(len(body))))
        reason = HTTPStatus(error.status).phrase.encode()
        for event in (
            h11.Response(status_code=error.status, headers=head, reason=reason),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _look_ahead(self) -> None:
        """Read on behind a request: that is how its client's leaving is noticed."""
        if len(self.conn.trailing_data[0]) > MAX_AHEAD_BYTES:
            log.warning("hung up on a client that sends more than %d bytes ahead", MAX_AHEAD_BYTES)
            self.transport.abort()
        else:
            self.flow.resume_reading()

    def _expect(self, what: str, seconds: float) -> None:
        if what not in self._timers:
            self._timers[what] = self.loop.call_later(seconds, self._hang_up, what)

    def _met(self, what: str) -> None:
        timer = self._timers.pop(what, None)
        if timer is not None:
            timer.cancel()

    def _hang_up(self, what: str) -> None:
        log.warning("hung up on a client that takes too long %s", what)
        # Not close(), which waits until the client has read what is still to be sent.
        self.transport.abort()
