"""Numbered delivery over one connection: what makes a socket's silence or repetition harmless.

A connection has two directions. Each counts its messages from 1 after `Hello`; the receiver drops
what it has seen, notices what it has not, and asks for it again by number. The sender keeps its
last frames for that. Nothing here touches a socket: a connection is given a function that sends a
frame, so a test or a simulator can lose, repeat and reorder frames at will.

Control messages (`Ping`, `Resend`, `Reset`, `Drain`) are not counted. They carry the number of the
last counted message, so a lost *last* message is found by the next `Ping`.
"""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from protocol.errors import BadFrameError, ProtocolError
from protocol.messages import (
    PROTOCOL_VERSION,
    Drain,
    Hello,
    Message,
    Numbered,
    Ping,
    Resend,
    Reset,
)
from protocol.plain_line import plain_line

Incoming = TypeVar("Incoming", bound=Message)

KEPT_FRAMES = 1024
KEPT_BYTES = 32 << 20

_encode = msgspec.msgpack.Encoder().encode


class Codec(Generic[Incoming]):
    """Decodes the frames of one direction of one kind of connection."""

    def __init__(self, union: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(union)

    def decode(self, frame: bytes) -> Incoming:
        """Return the message in a frame. Raises BadFrameError for anything else."""
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            reason = plain_line(str(error), 200)
            raise BadFrameError(
                f"A frame of {len(frame)} bytes is no message: {reason}."
            ) from error


class Outgoing:
    """Numbers one direction and keeps its last frames.

    The ranks of a group get identical frames, so they share one `Outgoing`.
    """

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self.sent = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0

    def frame(self, message: Numbered) -> bytes:
        """Stamp a message with epoch and number, and return its frame."""
        is_counted = not isinstance(message, Ping | Resend | Reset | Drain)
        if is_counted:
            self.sent += 1
        # Set in place: a message is made to be sent, and a copy would check its columns again,
        # which is a fifth of a step's cost at 256 sequences.
        msgspec.structs.force_setattr(message, "epoch", self.epoch)
        msgspec.structs.force_setattr(message, "seq", self.sent)
        frame = _encode(message)
        if is_counted:
            self._keep(frame)
        return frame

    def _keep(self, frame: bytes) -> None:
        self._kept.append((self.sent, frame))
        self._kept_bytes += len(frame)
        while len(self._kept) > KEPT_FRAMES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def kept_since(self, seq: int) -> list[bytes] | None:
        """Return the frames numbered `seq` and later, or None if some are no longer kept."""
        if seq > self.sent:
            return []
        if not self._kept or self._kept[0][0] > seq:
            return None
        return [frame for number, frame in self._kept if number >= seq]


class Connection(Generic[Incoming]):
    """One peer: says Hello, numbers what goes out, checks what comes in.

    `send_frame` sends one frame to the peer and does not block. `codec` knows what the peer may
    say. `outgoing` is given where several connections send the same frames.
    """

    def __init__(
        self,
        send_frame: Callable[[bytes], object],
        codec: Codec[Incoming],
        outgoing: Outgoing | None = None,
    ) -> None:
        self.peer: Hello | None = None
        """The peer's Hello, once it has come."""
        self.dropped = 0
        """Messages ignored as repeated, early, or of another epoch."""
        self._send_frame = send_frame
        self._codec = codec
        self._outgoing = outgoing or Outgoing()
        self._received = 0
        self._asked_for = 0

    @property
    def epoch(self) -> int:
        """The epoch both ends agree on; 0 until known."""
        return self._outgoing.epoch

    def adopt_epoch(self, epoch: int) -> None:
        """Take the engine's epoch, learned from the launcher or the peer's Hello."""
        self._outgoing.epoch = epoch

    def hello(self, hello: Hello) -> None:
        """Send our Hello."""
        self._send_frame(_encode(hello))

    def send(self, message: Numbered) -> None:
        """Number a message and send it."""
        self._send_frame(self._outgoing.frame(message))

    def send_frame(self, frame: bytes) -> None:
        """Send a frame that the shared `Outgoing` has made."""
        self._send_frame(frame)

    def receive(self, frame: bytes) -> Incoming | None:
        """Return the message in a frame, or None if the caller has nothing to do.

        Raises BadFrameError for bytes that are no message, ProtocolError for a peer that does not
        start with Hello or speaks another version.
        """
        message = self._codec.decode(frame)
        if isinstance(message, Hello):
            self._greet(message)
            return message
        if self.peer is None:
            raise ProtocolError(
                f"The first message of a connection is Hello, not {type(message).__name__}."
            )
        if not isinstance(message, Numbered):
            raise ProtocolError(f"{type(message).__name__} does not belong on this connection.")
        if message.epoch != self.epoch:
            self.dropped += 1
            return None
        if isinstance(message, Ping | Resend | Reset | Drain):
            # A Reset ends this connection: what is missing of it is not to be had any more.
            if message.seq > self._received and not isinstance(message, Reset):
                self._ask(again=True)
            if not isinstance(message, Resend):
                return message
            self._send_again(message.from_seq)
            return None
        if message.seq == self._received + 1:
            self._received += 1
            return message
        self.dropped += 1
        if message.seq > self._received:
            self._ask(again=False)
        return None

    def _greet(self, hello: Hello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"The {hello.role.name.lower()} speaks protocol version {hello.protocol_version}, "
                f"this process {PROTOCOL_VERSION}: start all processes from one installation."
            )
        self.peer = hello
        self._received = 0
        self._asked_for = 0

    def _send_again(self, from_seq: int) -> None:
        kept = self._outgoing.kept_since(from_seq)
        if kept is None:
            self.send(Reset())
        else:
            for frame in kept:
                self._send_frame(frame)

    def _ask(self, *, again: bool) -> None:
        """Ask for what is missing, once per gap unless a later Ping shows that it is still open."""
        missing = self._received + 1
        if again or self._asked_for != missing:
            self._asked_for = missing
            self.send(Resend(from_seq=missing))
