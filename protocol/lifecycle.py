"""The life of a child process: what it inherits, what it reports, how it ends.

A child of the launcher inherits two pipes. The *lifeline* is only ever held open by the launcher:
it reads end-of-file when the launcher is gone, however it went. The *report pipe* takes `Ready`,
`Heartbeat` and `Failure` as a stream of msgpack messages. A process started by hand has neither:
it runs until its terminal's Ctrl-C.

A process stuck inside a library cannot look at a pipe, so a child also asks the kernel to be killed
when its parent ends.
"""

import contextlib
import ctypes
import faulthandler
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from protocol.errors import ConfigError, EngineError, LauncherGoneError, ModelFileError
from protocol.logs import set_up_logging
from protocol.messages import Failure, Heartbeat, Message, Ready
from protocol.standard_streams import open_standard_streams

HEARTBEAT_INTERVAL_S = 0.5
"""Longest time a main loop waits before it reports that it came round."""

EXIT_STOPPED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2

_PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """What every process of a run is told."""

    run_dir: str = field(
        metadata={"help": "directory of the run's sockets, shared by its processes"}
    )
    epoch: int = field(
        default=0, metadata={"help": "incarnation of the engine; 0: the scheduler's choice"}
    )
    record: str = field(
        default="", metadata={"help": "directory that gets a recording of every frame"}
    )
    log_level: str = field(
        default="info",
        metadata={"help": "least level logged", "choices": ("debug", "info", "warning", "error")},
    )
    lifeline_fd: int = field(default=-1, metadata={"help": "inherited pipe; the launcher sets it"})
    report_fd: int = field(default=-1, metadata={"help": "inherited pipe; the launcher sets it"})


class Lifeline:
    """A child's tie to its launcher: notices that it is gone, tells it how things are."""

    def __init__(self, config: ProcessConfig) -> None:
        self._lifeline_fd = config.lifeline_fd
        self._report_fd = config.report_fd
        self._last_beat = 0.0

    def fileno(self) -> int | None:
        """Return the descriptor to watch for reading, or None for a process started by hand."""
        return self._lifeline_fd if self._lifeline_fd >= 0 else None

    def is_cut(self) -> bool:
        """Return whether the launcher has ended. Call it when `fileno` is readable."""
        return self._lifeline_fd >= 0 and os.read(self._lifeline_fd, 1) == b""

    def ready(self, detail: str = "") -> None:
        """Report that the process can serve."""
        self._report(Ready(detail=detail))

    def heartbeat(self, step_id: int = 0) -> None:
        """Report that the main loop came round; at most once an interval reaches the launcher."""
        now = time.monotonic()
        if now - self._last_beat >= HEARTBEAT_INTERVAL_S * 0.9:
            self._last_beat = now
            self._report(Heartbeat(step_id=step_id))

    def failure(self, exit_code: int, sentence: str) -> None:
        """Report why the process is about to end."""
        self._report(Failure(exit_code=exit_code, sentence=sentence[:4096]))

    def _report(self, message: Message) -> None:
        if self._report_fd >= 0:
            # A full or closed pipe means a launcher that is stuck or gone: the lifeline decides.
            with contextlib.suppress(OSError):
                os.write(self._report_fd, msgspec.msgpack.encode(message))


def run_process(name: str, config: ProcessConfig, run: Callable[[Lifeline], None]) -> int:
    """Run a process from its first line to its last and return its exit code.

    The one place where a process catches everything: to say why it ends, and to end.
    """
    open_standard_streams()
    set_up_logging(name, config.log_level)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    lifeline = Lifeline(config)
    if config.lifeline_fd >= 0:
        _tie_to_parent(config.lifeline_fd)
    try:
        run(lifeline)
    except LauncherGoneError:
        return EXIT_STOPPED
    except KeyboardInterrupt:
        return EXIT_STOPPED
    except (ConfigError, ModelFileError) as error:
        return _end(lifeline, EXIT_USAGE, str(error))
    except EngineError as error:
        return _end(lifeline, EXIT_FAILED, str(error))
    except Exception as error:
        log.exception("internal error; please report this with the lines above")
        return _end(lifeline, EXIT_FAILED, f"internal error: {type(error).__name__}: {error}")
    return EXIT_STOPPED


def _end(lifeline: Lifeline, exit_code: int, sentence: str) -> int:
    log.error("ends: %s", sentence)
    lifeline.failure(exit_code, sentence)
    return exit_code


def _tie_to_parent(lifeline_fd: int) -> None:
    """Leave Ctrl-C to the launcher, and die with it even while stuck in a library call."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The signal is only sent from now on: the launcher may have ended before. It never writes, so
    # a lifeline with something to read is one that has ended.
    if select.select([lifeline_fd], [], [], 0)[0]:
        raise SystemExit(EXIT_STOPPED)
