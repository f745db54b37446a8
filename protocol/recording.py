"""Recordings: every frame that passes a process's sockets, in a file that any msgpack reader opens.

The file is a msgpack *stream* of arrays `[seconds, direction, address, identity, message]`:
seconds on the monotonic clock, direction "in" or "out", identity empty where a socket has one
peer, and the message as the frame's own array, not as bytes, so that

    python -c "import msgpack; [print(r) for r in msgpack.Unpacker(open('worker-0.tap', 'rb'))]"

shows a conversation. Frames that are not msgpack are kept as bytes. What users wrote and were
answered is in there: directory and files are made for this user alone.
"""

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgpack

from protocol.errors import ConfigError
from protocol.messages import MAX_FRAME_BYTES

log = logging.getLogger(__name__)


class Recorded(NamedTuple):
    """One frame of a recording."""

    seconds: float
    direction: str
    address: str
    identity: bytes
    frame: bytes


class Recorder:
    """Appends frames to NAME.tap, unbuffered, so that a crash loses nothing."""

    def __init__(self, directory: str, name: str) -> None:
        """Raises ConfigError if the file cannot be written."""
        path = Path(directory)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(path / f"{name}.tap", flags, 0o600)
        except OSError as error:
            raise ConfigError(
                f"--record {directory} cannot be written: {error.strerror}."
            ) from error
        self._file = os.fdopen(descriptor, "ab", buffering=0)

    def record(self, direction: str, address: str, identity: bytes, frame: bytes) -> None:
        """Append one frame. The first that cannot be written is the end of the recording."""
        if self._file.closed:
            return
        head = msgpack.packb([time.monotonic(), direction, address, identity])
        # The frame is msgpack already: put it into the array as it is instead of packing it again.
        body = frame if _is_msgpack(frame) else msgpack.packb(frame)
        try:
            self._file.write(b"\x95" + head[1:] + body)
        except OSError as error:
            log.error("recording ends file=%s: %s", self._file.name, error.strerror)
            self._file.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def recorder(directory: str, name: str) -> Recorder | None:
    """Return a recorder for a process, or None where no directory is named."""
    return Recorder(directory, name) if directory else None


def read_recording(path: Path) -> Iterator[Recorded]:
    """Yield the frames of a recording; a last entry cut short by a crash is left out."""
    with path.open("rb") as file:
        unpacker = msgpack.Unpacker(file, max_buffer_size=2 * MAX_FRAME_BYTES)
        for seconds, direction, address, identity, message in unpacker:
            frame = message if isinstance(message, bytes) else msgpack.packb(message)
            yield Recorded(seconds, direction, address, identity, frame)


def _is_msgpack(frame: bytes) -> bool:
    try:
        msgpack.unpackb(frame)
    except ValueError:
        return False
    return True
