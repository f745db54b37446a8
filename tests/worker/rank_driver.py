"""A real worker process and, at the other end of its socket, a test in the scheduler's place."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import zmq

from protocol.channels import Dealer
from protocol.connection import Codec, Connection, Outgoing
from protocol.messages import (
    ChildToLauncher,
    Failure,
    Hello,
    Message,
    Ready,
    Role,
    StepPlan,
    StepResult,
    WorkerToScheduler,
)
from protocol.run_dir import RunDir

ROOT = Path(__file__).parents[2]
PATIENCE_S = 20.0
EPOCH = 7

Incoming = TypeVar("Incoming", bound=Message)


class RankDriver:
    """Starts `python -m worker --fake-workers`; on leaving it, the process is gone."""

    def __init__(self, run_dir: Path, *flags: str, rank: int = 0, listens: bool = True) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._address = RunDir(str(run_dir)).rank_address(rank)
        self.outgoing = Outgoing(EPOCH)
        if listens:
            self.listen()
        self.messages: list[Message] = []
        lifeline_read, self._lifeline = os.pipe()
        self._report, report_write = os.pipe()
        os.set_blocking(self._report, False)
        command = [sys.executable, "-m", "worker", "--fake-workers", "--run-dir", str(run_dir)]
        command += ["--rank", str(rank), "--lifeline-fd", str(lifeline_read)]
        command += ["--report-fd", str(report_write), *flags]
        self.stderr_path = run_dir / f"stderr-{rank}"
        with self.stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stderr=stderr, pass_fds=[lifeline_read, report_write]
            )
        os.close(lifeline_read)
        os.close(report_write)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cut_lifeline()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)
        os.close(self._report)
        self._context.destroy(linger=0)

    # The launcher's part

    def cut_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE_S)

    def reports(self) -> list[Message]:
        """Return what the process has reported since the last call."""
        try:
            data = os.read(self._report, 1 << 16)
        except BlockingIOError:
            return []
        decoder: msgspec.msgpack.Decoder[ChildToLauncher] = msgspec.msgpack.Decoder(ChildToLauncher)
        reports: list[Message] = []
        while data:  # each report is one array, written whole
            for end in range(1, len(data) + 1):
                try:
                    reports.append(decoder.decode(data[:end]))
                except msgspec.DecodeError:
                    continue
                data = data[end:]
                break
        return reports

    def failure(self) -> str:
        """Return the sentence with which the process ended."""
        assert self.exit_code() == 1
        (sentence,) = (report.sentence for report in self.reports() if isinstance(report, Failure))
        assert self.log().splitlines()[-1].endswith(f"ends: {sentence}")
        return sentence

    def log(self) -> str:
        return self.stderr_path.read_text()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.01)

    def dump_stacks(self) -> None:
        self.process.send_signal(signal.SIGUSR1)

    # The scheduler's part

    def listen(self) -> None:
        self.dealer = Dealer(self._context, self._address, bind=True)
        codec: Codec[WorkerToScheduler] = Codec(WorkerToScheduler)
        self.connection = Connection(self.dealer.send, codec, self.outgoing)

    def receive(self, kind: type[Incoming]) -> Incoming:
        """Return the next message of this kind; others before it are dropped."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            while self.messages:
                message = self.messages.pop(0)
                if isinstance(message, kind):
                    return message
            assert time.monotonic() < deadline, self.log()
            self.dealer.socket.poll(100)
            for frame in self.dealer.drain():
                received = self.connection.receive(frame)
                if received is not None:
                    self.messages.append(received)

    def greet(self, *, epoch: int = EPOCH, fingerprint: str = "") -> Hello:
        """Exchange Hellos and wait until the rank is ready; return the rank's."""
        theirs = self.receive(Hello)
        self.connection.hello(
            Hello(role=Role.SCHEDULER, identity=b"test", epoch=epoch, fingerprint=fingerprint)
        )
        return theirs

    def wait_ready(self) -> None:
        self.wait_for(lambda: any(isinstance(report, Ready) for report in self.reports()))

    def send(self, plan: StepPlan) -> bytes:
        """Send a plan as the next numbered message; return its frame."""
        frame = self.outgoing.frame(plan)
        self.dealer.send(frame)
        return frame

    def result(self) -> StepResult:
        return self.receive(StepResult)
