"""One client's connection: uvicorn's, with limits to a client's patience with us and ours with it.

A client that does not finish its request's head, or that reads nothing of its answer for long, is
hung up on, whatever it was doing: the route then sees that it has left.
"""

import asyncio
import logging

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from frontend.http.errors import HttpError, error_body

HEAD_TIMEOUT_S = 10.0
"""From a connection's, or a later request's, first byte to the end of the request's head."""
SLOW_CLIENT_S = 60.0
"""How long a client may leave what is sent to it unread."""

log = logging.getLogger(__name__)


class ClientConnection(H11Protocol):
    """A connection that is hung up on if its client is too slow."""

    _timers: dict[str, asyncio.TimerHandle]
    """What we are waiting for, while we are."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a request."""
        super().connection_made(transport)
        self._timers = {}
        self._expect("to finish its request's head", HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._met("to finish its request's head")
        self._met("to read its answer")
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take in some of a request."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._expect("to finish its request's head", HEAD_TIMEOUT_S)
        else:
            self._met("to finish its request's head")

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
        body = error_body(HttpError(400, msg, code="invalid_http"))
        head = [("content-type", "application/json"), ("connection", "close")]
        head.append(("content-length", str(len(body))))
        for event in (
            h11.Response(status_code=400, headers=head, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

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
