"""One incarnation of the text process: its pipes, its socket, its death.

The frontend is to its text process what the launcher is to the frontend: it holds the lifeline,
reads the reports, and knows of the process's end when the kernel closes the report pipe.
"""

import asyncio
import contextlib
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import msgpack
import msgspec
import zmq.asyncio

from frontend.text.config import TextConfig
from protocol.channels import AsyncDealer
from protocol.connection import Codec, Connection
from protocol.flags import to_flags
from protocol.messages import (
    ChildToLauncher,
    Failure,
    Hello,
    Role,
    TextDone,
    TextJob,
    TextToFrontend,
)
from protocol.recording import Recorder

_REPORT_BYTES = 1 << 16


class TextChild:
    """A running text process. `close` it, whatever has happened to it."""

    def __init__(
        self, context: zmq.asyncio.Context, config: TextConfig, recorder: Recorder | None
    ) -> None:
        """Start it, with pipes of its own."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the process has ended."""
        self.failure: Failure | None = None
        """Why it ended, if it said so."""
        self._config = config
        self._channel = AsyncDealer(context, config.address, bind=True, recorder=recorder)
        self._connection: Connection[TextToFrontend] = Connection(
            self._channel.send, Codec(TextToFrontend)
        )
        self._connection.adopt_epoch(config.process.epoch)
        lifeline_read, self._lifeline = os.pipe()
        self._reports, reports_write = os.pipe()
        os.set_blocking(self._reports, False)
        self._unpacker = msgpack.Unpacker(max_buffer_size=_REPORT_BYTES)
        try:
            self._process = subprocess.Popen(
                _command(config, lifeline_read, reports_write),
                pass_fds=(lifeline_read, reports_write),
                stdin=subprocess.DEVNULL,
                env=_environment(),
            )
        finally:
            os.close(lifeline_read)
            os.close(reports_write)
        asyncio.get_running_loop().add_reader(self._reports, self._read_reports)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How the process ended; None while it runs."""
        return self._process.poll()

    def send(self, job: TextJob) -> None:
        """Give it a job. Raises ProcessError if it takes none."""
        self._connection.send(job)

    async def receive(self) -> Hello | TextDone:
        """Wait for its Hello or its next answer. Raises ProtocolError for anything else."""
        while True:
            message = self._connection.receive(await self._channel.receive())
            if isinstance(message, Hello):
                epoch = self._config.process.epoch
                self._connection.hello(
                    Hello(role=Role.FRONTEND, identity=os.urandom(16), epoch=epoch)
                )
                return message
            if isinstance(message, TextDone):
                return message

    def kill(self) -> None:
        """End the process now; `ended` follows."""
        self._process.kill()

    def close(self) -> None:
        """Release everything; the process is gone when this returns."""
        asyncio.get_running_loop().remove_reader(self._reports)
        os.close(self._reports)
        os.close(self._lifeline)
        self._process.kill()
        self._process.wait()
        self._channel.close()

    def _read_reports(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._reports, _REPORT_BYTES):
                self._unpacker.feed(chunk)
                for report in self._unpacker:
                    message = msgspec.convert(report, ChildToLauncher)
                    if isinstance(message, Failure):
                        self.failure = message
            asyncio.get_running_loop().remove_reader(self._reports)
            self.ended.set_result(None)


def _command(config: TextConfig, lifeline_fd: int, report_fd: int) -> list[str]:
    process = dataclasses.replace(config.process, lifeline_fd=lifeline_fd, report_fd=report_fd)
    flags = to_flags(dataclasses.replace(config, process=process))
    return [sys.executable, "-m", "frontend.text", *flags]


def _environment() -> dict[str, str]:
    """Return this process's environment, with what keeps libraries from threads and the network."""
    import_path = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, import_path)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
