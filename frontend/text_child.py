"""One incarnation of the text process: its pipes, its socket, its end.

The frontend is to its text process what the launcher is to the frontend.
"""

import asyncio
import dataclasses
import os
import signal
import sys
from pathlib import Path

import zmq.asyncio

from frontend.text.config import TextConfig
from protocol.channels import AsyncDealer
from protocol.child import Child
from protocol.connection import Codec, Connection
from protocol.flags import to_flags
from protocol.messages import Failure, Hello, Role, TextDone, TextJob, TextToFrontend
from protocol.recording import Recorder

_ROOT = Path(__file__).parents[1]


class TextChild:
    """A running text process. `close` it, whatever has happened to it."""

    def __init__(
        self, context: zmq.asyncio.Context, config: TextConfig, recorder: Recorder | None
    ) -> None:
        """Start it. It listens for nobody else: `config.address` is its own."""
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done when the process has ended."""
        self._epoch = config.process.epoch
        self._channel = AsyncDealer(context, config.address, bind=True, recorder=recorder)
        self._connection: Connection[TextToFrontend] = Connection(
            self._channel.send, Codec(TextToFrontend)
        )
        self._connection.adopt_epoch(self._epoch)
        self._child = Child(
            "text",
            _command(config),
            directory=str(_ROOT),
            environment=_environment(),
        )
        loop.add_reader(self._child.log_fd, self._read_log)
        loop.add_reader(self._child.reports, self._read_reports)
        loop.add_reader(self._child.pidfd, self._end)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._child.process.pid

    @property
    def failure(self) -> Failure | None:
        """Why it ended, if it said so. Known once `close` has returned."""
        return self._child.failure

    @property
    def has_looped(self) -> bool:
        """Whether it ended because its rehearsal took too long. Known once `close` has returned."""
        return self._child.process.returncode == -signal.SIGPROF

    def send(self, job: TextJob) -> None:
        """Give it a job. Raises ProcessError if it takes none."""
        self._connection.send(job)

    async def receive(self) -> Hello | TextDone:
        """Wait for its Hello or its next answer. Raises ProtocolError for anything else."""
        while True:
            message = self._connection.receive(await self._channel.receive())
            if isinstance(message, Hello):
                self._connection.hello(
                    Hello(role=Role.FRONTEND, identity=os.urandom(16), epoch=self._epoch)
                )
                return message
            if isinstance(message, TextDone):
                return message

    def kill(self) -> None:
        """End the process now; `ended` follows."""
        self._child.signal(signal.SIGKILL)

    def close(self) -> str:
        """Release everything and say how the process ended; it is gone when this returns."""
        loop = asyncio.get_running_loop()
        for descriptor in (self._child.log_fd, self._child.reports, self._child.pidfd):
            loop.remove_reader(descriptor)
        self.kill()
        how = self._child.describe_end()
        self._child.read_to_end()
        self._child.close()
        self._channel.close()
        # ZeroMQ leaves the file of a closed socket behind.
        Path(self._channel.address.removeprefix("ipc://")).unlink(missing_ok=True)
        return how

    def _read_log(self) -> None:
        if not self._child.read_log():
            asyncio.get_running_loop().remove_reader(self._child.log_fd)

    def _read_reports(self) -> None:
        if not self._child.read_reports():
            asyncio.get_running_loop().remove_reader(self._child.reports)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._child.pidfd)
        self.ended.set_result(None)


def _command(config: TextConfig) -> list[str]:
    # The pipes in this config are the frontend's own; the child gets others.
    process = dataclasses.replace(config.process, lifeline_fd=-1, report_fd=-1)
    flags = to_flags(dataclasses.replace(config, process=process))
    return [sys.executable, "-m", "frontend.text", *flags]


def _environment() -> dict[str, str]:
    """Return this process's environment, with what keeps libraries from threads and the network."""
    return os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
