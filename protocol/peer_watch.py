"""Notices that the peer of a connecting socket has gone.

ZeroMQ reconnects in silence, so a socket whose peer has died looks like one whose peer is busy.
The socket's own monitor tells: it says "disconnected" as soon as the kernel does, which is within
milliseconds of a local process's end, however it ended. A process that is only stuck stays
connected; that takes a question and a time limit.
"""

import contextlib

import zmq
import zmq.asyncio

from protocol.channels import AsyncDealer, Dealer


class PeerWatch:
    """Watches the peer of a `Dealer` that connects. An `Inbox` can wait for it."""

    def __init__(self, dealer: Dealer) -> None:
        self.socket = dealer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._dealer = dealer

    def has_left(self) -> bool:
        """Return whether the connection has been lost since the last call."""
        lost = False
        with contextlib.suppress(zmq.Again):
            while self.socket.recv_multipart(zmq.NOBLOCK):
                lost = True
        return lost

    def close(self) -> None:
        """Stop watching. To be called before the dealer is closed."""
        self._dealer.socket.disable_monitor()
        self.socket.close(linger=0)


class AsyncPeerWatch:
    """Watches the peer of an `AsyncDealer` that connects."""

    def __init__(self, dealer: AsyncDealer) -> None:
        self._dealer = dealer
        self._socket = dealer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    async def left(self) -> None:
        """Wait until the connection is lost."""
        await self._socket.recv_multipart()

    def close(self) -> None:
        """Stop watching. To be called before the dealer is closed."""
        self._dealer.socket.disable_monitor()
        self._socket.close(linger=0)
