"""An engine of one's own: `launch.py` as a subprocess, from its start to its end.

It holds one end of a pipe, the lifeline, whose other end the launcher watches: when this program
ends, however it does, the launcher ends its run. The launcher is in a session of its own, so that
Ctrl-C interrupts the program's call and not the engine.
"""

import collections
import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from frontend.client.errors import EngineTimeoutError
from protocol.errors import ConfigError, ProcessError
from protocol.lifecycle import EXIT_USAGE

LAUNCHER = Path(__file__).parents[2] / "launch.py"
END_TIMEOUT_S = 5.0
"""How long the launcher may take to end, beyond the time it gives open requests."""
LOG_TAIL_LINES = 40

_SENTENCE = "launch.py: "


class EngineProcess:
    """A launcher and all it starts."""

    def __init__(self, flags: Sequence[str]) -> None:
        """Start `launch.py` with these flags."""
        self.client_address = ""
        """Where its frontend listens, once it is ready."""
        self._log_tail: collections.deque[str] = collections.deque(maxlen=LOG_TAIL_LINES)
        lifeline, ours = os.pipe()
        # A file, so that it is closed with the last reference to it.
        self._lifeline = os.fdopen(ours, "wb", buffering=0)
        try:
            self._process = subprocess.Popen(
                [sys.executable, str(LAUNCHER), *flags, "--lifeline-fd", str(lifeline)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(lifeline,),
                start_new_session=True,
            )
        finally:
            os.close(lifeline)
        # A thread, because a log that nobody reads stops the engine once its pipe is full. It holds
        # no reference to this object, which would keep the lifeline open.
        self._log_reader = threading.Thread(
            target=_pass_on, args=(self._process.stderr, self._log_tail), daemon=True
        )
        self._log_reader.start()

    @property
    def pid(self) -> int:
        """The launcher's process id."""
        return self._process.pid

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait for the ready line.

        Raises ConfigError or ProcessError with the launcher's own sentence if it ends first,
        EngineTimeoutError after timeout_s seconds.
        """
        line = self._first_line(time.monotonic() + timeout_s)
        if line is None:
            raise EngineTimeoutError(
                f"The engine was not ready after start_timeout_s, {timeout_s:g} s."
            )
        if not line.startswith("ready "):
            sentence = self.last_sentence() or "The launcher ended before the engine was ready."
            is_usage = self._process.poll() == EXIT_USAGE
            raise ConfigError(sentence) if is_usage else ProcessError(sentence)
        fields = dict(field.split("=", 1) for field in line.split()[1:])
        self.client_address = fields["client"]

    def last_sentence(self) -> str | None:
        """Return why the launcher has ended, as it said; None if it has not ended or not said."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
            self._log_reader.join(END_TIMEOUT_S)
        said = [line for line in self._log_tail if line.startswith(_SENTENCE)]
        return said[-1].removeprefix(_SENTENCE) if said else None

    def close(self, drain_timeout_s: float) -> None:
        """Stop the engine and wait for its end; a launcher that does not end is killed.

        `drain_timeout_s`: what the launcher has been told that open requests may take.
        """
        self._lifeline.close()
        try:
            self._process.wait(drain_timeout_s + END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log_reader.join(END_TIMEOUT_S)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _first_line(self, deadline: float) -> str | None:
        """Return the launcher's first line, cut short if it ended; None at the deadline."""
        assert self._process.stdout is not None  # noqa: S101 (it is a pipe, see above)
        pipe = self._process.stdout.fileno()
        said = b""
        while b"\n" not in said:
            readable, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                return None
            piece = os.read(pipe, 4096)
            if not piece:
                break
            said += piece
        return said.decode(errors="replace").split("\n", 1)[0]


def _pass_on(log: IO[bytes], tail: collections.deque[str]) -> None:
    """Pass a log on to our stderr, and keep its last lines."""
    for line in log:
        text = line.decode(errors="replace")
        tail.append(text.rstrip("\n"))
        with contextlib.suppress(OSError, ValueError):  # our stderr may be closed
            sys.stderr.write(text)
