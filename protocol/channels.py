"""Sockets: the only file that knows ZeroMQ. Frames in, frames out, nothing decoded here.

All sockets are non-blocking, linger for nothing and bound their queues; a full queue is an error,
not a wait. A synchronous process waits in one place, `Inbox.wait`, which also watches the
launcher's lifeline; the frontend uses the asyncio twins. Every frame can be recorded on its way
(`protocol.recording`).
"""

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Protocol, cast

import zmq
import zmq.asyncio

from protocol.errors import ConfigError, LauncherGoneError, ProcessError
from protocol.lifecycle import Lifeline
from protocol.messages import MAX_FRAME_BYTES
from protocol.recording import Recorder

HIGH_WATER_MARK = 10_000
PARTS_A_TURN = 256
"""Parts of a stranger's message dropped before the rest of the process has its turn."""


def _prepare(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)


def _attach(socket: zmq.Socket[bytes], address: str, *, bind: bool) -> None:
    try:
        if bind:
            socket.bind(address)
        else:
            socket.connect(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        verb = "listen on" if bind else "connect to"
        raise ConfigError(f"Cannot {verb} {address}: {_reason(error)}.") from error


def _reason(error: zmq.ZMQError) -> str:
    """Return what the code says; the error's own text may name the address once more."""
    return str(error) if error.errno is None else zmq.strerror(error.errno)


class Channel(Protocol):
    """What an inbox can wait for."""

    socket: zmq.Socket[bytes]


class Dealer:
    """A socket with one peer: frames in order, both ways."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        *,
        bind: bool,
        recorder: Recorder | None = None,
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.address = address
        self._recorder = recorder
        _prepare(self.socket)
        _attach(self.socket, address, bind=bind)

    def send(self, frame: bytes) -> None:
        """Send a frame. Raises ProcessError if the peer has stopped taking them."""
        if self._recorder:
            self._recorder.record("out", self.address, b"", frame)
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again as error:
            raise ProcessError(f"The process at {self.address} takes no messages.") from error

    def drain(self, limit: int = 256) -> list[bytes]:
        """Return the frames that have come, at most `limit`: no channel starves another."""
        frames: list[bytes] = []
        with contextlib.suppress(zmq.Again):
            while len(frames) < limit:
                frame = self.socket.recv(zmq.NOBLOCK)
                if self.socket.getsockopt(zmq.RCVMORE):
                    _discard_rest(self.socket)
                    continue
                if self._recorder:
                    self._recorder.record("in", self.address, b"", frame)
                frames.append(frame)
        return frames

    def close(self, *, flush_s: float = 0.0) -> None:
        """Close the socket; what is unsent `flush_s` seconds later is dropped."""
        self.socket.close(linger=int(flush_s * 1000))


class Router:
    """A socket with many peers, each known by its identity."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        *,
        recorder: Recorder | None = None,
    ) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.address = address
        self._recorder = recorder
        _prepare(self.socket)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        _attach(self.socket, address, bind=True)

    def send(self, identity: bytes, frame: bytes) -> bool:
        """Send a frame to one peer; False if that peer is gone or has stopped reading."""
        if self._recorder:
            self._recorder.record("out", self.address, identity, frame)
        try:
            self.socket.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def drain(self, limit: int = 256) -> list[tuple[bytes, bytes]]:
        """Return the (identity, frame) pairs that have come, at most `limit`."""
        frames: list[tuple[bytes, bytes]] = []
        with contextlib.suppress(zmq.Again):
            while len(frames) < limit:
                identity = self.socket.recv(zmq.NOBLOCK)
                if not self.socket.getsockopt(zmq.RCVMORE):
                    continue
                frame = self.socket.recv(zmq.NOBLOCK)
                if self.socket.getsockopt(zmq.RCVMORE):
                    _discard_rest(self.socket)
                    continue
                if self._recorder:
                    self._recorder.record("in", self.address, identity, frame)
                frames.append((identity, frame))
        return frames

    def close(self) -> None:
        """Close the socket; what is unsent is dropped."""
        self.socket.close(linger=0)


def _discard_rest(socket: zmq.Socket[bytes]) -> None:
    """Drop the rest of a message of several frames: ours have one, so this one is not ours."""
    while socket.getsockopt(zmq.RCVMORE):
        socket.recv(zmq.NOBLOCK)


class Inbox:
    """The one place where a synchronous process waits."""

    def __init__(self, lifeline: Lifeline, *channels: Channel) -> None:
        self._lifeline = lifeline
        self._poller = zmq.Poller()
        self._fd = lifeline.fileno()
        if self._fd is not None:
            self._poller.register(self._fd, zmq.POLLIN)
        for channel in channels:
            self._poller.register(channel.socket, zmq.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Return when a channel has frames or the time is up.

        Raises LauncherGoneError when the launcher has ended.
        """
        events = dict(self._poller.poll(max(0, int(timeout_s * 1000))))
        if self._fd is not None and self._fd in events and self._lifeline.is_cut():
            raise LauncherGoneError("The launcher has ended.")


def _was_sent(sent: Awaitable[object]) -> bool:
    """Return whether a non-blocking send on an asyncio socket went out."""
    return _why_unsent(sent) is None


def _why_unsent(sent: Awaitable[object]) -> int | None:
    """Return EAGAIN or EHOSTUNREACH if a non-blocking send on an asyncio socket did not go out.

    It is tried at once, so its future is done by now. It must go through the asyncio socket all the
    same: only a socket that sees every call keeps its edge-triggered descriptor right.
    """
    future = cast("asyncio.Future[object]", sent)
    if not future.done():
        raise ProcessError("A non-blocking send did not end at once.")
    error = future.exception()
    if error is None:
        return None
    if isinstance(error, zmq.ZMQError) and error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
        return error.errno
    raise error


class AsyncDealer:
    """`Dealer` for an asyncio process."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        *,
        bind: bool,
        recorder: Recorder | None = None,
    ) -> None:
        self.socket: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        self.address = address
        self._recorder = recorder
        _prepare(self.socket)  # type: ignore[arg-type]
        _attach(self.socket, address, bind=bind)  # type: ignore[arg-type]

    def send(self, frame: bytes) -> None:
        """Send a frame. Raises ProcessError if the peer has stopped taking them."""
        if self._recorder:
            self._recorder.record("out", self.address, b"", frame)
        if self.socket.closed:
            raise ProcessError(f"The connection to {self.address} is closed.")
        if not _was_sent(self.socket.send(frame, zmq.NOBLOCK)):
            raise ProcessError(f"The process at {self.address} takes no messages.")

    async def receive(self) -> bytes:
        """Wait for the next frame."""
        while True:
            parts: list[bytes] = await self.socket.recv_multipart()
            if len(parts) == 1:
                if self._recorder:
                    self._recorder.record("in", self.address, b"", parts[0])
                return parts[0]

    def close(self, *, flush_s: float = 0.0) -> None:
        """Close the socket; what is unsent `flush_s` seconds later is dropped."""
        self.socket.close(linger=int(flush_s * 1000))


class AsyncRouter:
    """`Router` for an asyncio process."""

    def __init__(
        self, context: zmq.asyncio.Context, address: str, *, recorder: Recorder | None = None
    ) -> None:
        self.socket: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
        self._recorder = recorder
        _prepare(self.socket)  # type: ignore[arg-type]
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        _attach(self.socket, address, bind=True)  # type: ignore[arg-type]
        # A TCP port 0 was chosen by the system: this is where the socket really listens.
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, identity: bytes, frame: bytes) -> bool:
        """Send a frame to one peer; False if that peer is gone or has stopped reading."""
        if self._recorder:
            self._recorder.record("out", self.address, identity, frame)
        return _was_sent(self.socket.send_multipart([identity, frame], zmq.NOBLOCK))

    def reaches(self, identity: bytes, frame: bytes) -> bool:
        """Send a frame that may be lost on the way; return whether the peer is connected.

        One that is connected and does not read gets no more than fits its queue.
        """
        if self._recorder:
            self._recorder.record("out", self.address, identity, frame)
        sent = self.socket.send_multipart([identity, frame], zmq.NOBLOCK)
        return _why_unsent(sent) != zmq.EHOSTUNREACH

    async def receive(self) -> tuple[bytes, bytes]:
        """Wait for the next (identity, frame)."""
        while True:
            identity: bytes = await self.socket.recv()
            frame: bytes | None = await self.socket.recv() if self._has_more() else None
            num_dropped = 0
            while self._has_more():
                # Not ours. It is all there, however large: dropped part by part, it is not copied
                # as a whole, and lets others have their turn.
                await self.socket.recv()
                frame = None
                num_dropped += 1
                if num_dropped % PARTS_A_TURN == 0:
                    await asyncio.sleep(0)
            if frame is not None:
                if self._recorder:
                    self._recorder.record("in", self.address, identity, frame)
                return identity, frame

    def _has_more(self) -> bool:
        return bool(self.socket.getsockopt(zmq.RCVMORE))

    def close(self) -> None:
        """Close the socket; what is unsent is dropped."""
        self.socket.close(linger=0)
