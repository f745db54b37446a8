"""The launcher's end of a child: starts the process, holds the other ends of its pipes.

What the child holds is in `protocol.lifecycle`. Two more things pass here: the child's log, which
goes on to the launcher's stderr and whose last lines are kept, and the pidfd, by which the
launcher waits for the child's end and signals it without ever meeting a stranger with its pid.
"""

import collections
import contextlib
import os
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Mapping

import msgpack
import msgspec

from protocol.messages import ChildToLauncher, Failure, Heartbeat, Ready
from protocol.plain_line import plain_line

LOG_TAIL_LINES = 20


class Child:
    """One process of the run: its pipes, its last words, its state."""

    def __init__(
        self,
        name: str,
        command: list[str],
        *,
        directory: str,
        environment: Mapping[str, str],
        pass_fds: tuple[int, ...] = (),
    ) -> None:
        lifeline_read, self._lifeline = os.pipe()
        self.reports, report_write = os.pipe()
        os.set_blocking(report_write, False)  # a child must not wait for a launcher that is stopped
        self.name = name
        self.ready: Ready | None = None
        self.failure: Failure | None = None
        self.heartbeats = 0
        """How many have come."""
        self.log_tail: collections.deque[str] = collections.deque(maxlen=LOG_TAIL_LINES)
        self._unpacker = msgpack.Unpacker()
        self._partial_line = b""
        flags = ["--lifeline-fd", str(lifeline_read), "--report-fd", str(report_write)]
        # Its own session: Ctrl-C in the terminal reaches the launcher alone, which then decides.
        self.process = subprocess.Popen(
            [*command, *flags],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(lifeline_read, report_write, *pass_fds),
            start_new_session=True,
        )
        os.close(lifeline_read)
        os.close(report_write)
        os.set_blocking(self.reports, False)
        assert self.process.stdout is not None  # noqa: S101 (it is a pipe, see above)
        self.log_fd = self.process.stdout.fileno()
        os.set_blocking(self.log_fd, False)
        self.pidfd = os.pidfd_open(self.process.pid)

    def read_reports(self) -> bool:
        """Take in what the child reports; False when the pipe holds no more for now or for good."""
        data = read_available(self.reports)
        self._unpacker.feed(data)
        for item in self._unpacker:
            message: ChildToLauncher = msgspec.convert(item, ChildToLauncher)
            match message:
                case Ready() as ready:
                    self.ready = ready
                case Heartbeat():
                    self.heartbeats += 1
                case Failure() as failure:
                    self.failure = failure
        return bool(data)

    def read_log(self) -> bool:
        """Pass on what the child logs and keep its last lines; False as for `read_reports`."""
        data = read_available(self.log_fd)
        pass_on(data)
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        self.log_tail.extend(line.decode(errors="replace") for line in lines)
        return bool(data)

    def read_to_end(self) -> None:
        """Take in what a child that has ended left in its pipes."""
        while self.read_log():
            pass
        while self.read_reports():
            pass

    def cut_lifeline(self) -> None:
        """Tell the child to end; it may already have."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def signal(self, number: int) -> None:
        """Signal the child by its pidfd: never a stranger with a reused pid."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def close(self) -> None:
        """Close our ends of a child that has ended."""
        self.cut_lifeline()
        os.close(self.reports)
        os.close(self.pidfd)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def describe_end(self) -> str:
        """Say how the child ended."""
        code = self.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        cause = f": {plain_line(self.failure.sentence, 4096)}" if self.failure else ""
        return f"{self.name} (pid {self.process.pid}) {how}{cause}"


def pass_on(data: bytes) -> None:
    """Write to our stderr as much as it takes now; a log that nobody reads must not stop us."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = sys.stderr.fileno()
        for start in range(0, len(data), select.PIPE_BUF):
            # A pipe that is ready takes this many bytes without waiting.
            if not select.select([], [descriptor], [], 0)[1]:
                return
            os.write(descriptor, data[start : start + select.PIPE_BUF])


def read_available(descriptor: int) -> bytes:
    """Return what a non-blocking pipe holds; nothing if it is empty or at its end."""
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return b""


def is_pipe(descriptor: int) -> bool:
    """Return whether this process has inherited a pipe or socket of this number."""
    try:
        mode = os.fstat(descriptor).st_mode
    except (OSError, OverflowError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
