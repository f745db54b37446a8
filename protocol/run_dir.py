"""The run directory: where the processes of one run find each other.

scheduler           ROUTER; every frontend connects
rank-0, rank-1 …    DEALER of the scheduler; that rank connects
text-0, text-1 …    DEALER of frontend i; its text process connects
clients-0 …         ROUTER of frontend i; clients connect
store               the ranks' torch.distributed FileStore
run.json            addresses, pids and versions, written when the run is ready
lock                held by the launcher for as long as it lives
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from protocol.errors import ConfigError

MAX_IPC_PATH = 107
"""Bytes that a Unix socket's path can have on Linux."""


@dataclass(frozen=True, slots=True)
class RunDir:
    """The names inside a run directory. Creates nothing."""

    path: str

    def scheduler_address(self) -> str:
        """Where the scheduler listens for frontends."""
        return self._ipc("scheduler")

    def rank_address(self, rank: int) -> str:
        """Where the scheduler listens for one rank."""
        return self._ipc(f"rank-{rank}")

    def text_address(self, frontend: int) -> str:
        """Where a frontend listens for its text process."""
        return self._ipc(f"text-{frontend}")

    def clients_address(self, frontend: int) -> str:
        """Where a frontend listens for clients, unless told another address."""
        return self._ipc(f"clients-{frontend}")

    def store(self) -> Path:
        """The file by which the ranks find each other."""
        return Path(self.path) / "store"

    def run_file(self) -> Path:
        """The run's addresses, pids and versions."""
        return Path(self.path) / "run.json"

    def lock_file(self) -> Path:
        """The file the launcher locks."""
        return Path(self.path) / "lock"

    def _ipc(self, name: str) -> str:
        path = str(Path(self.path).absolute() / name)
        length = len(path.encode())
        if length > MAX_IPC_PATH:
            raise ConfigError(
                f"--run-dir is too long: the socket path {path} has {length} bytes and the system "
                f"allows {MAX_IPC_PATH}; choose a shorter directory."
            )
        return f"ipc://{path}"


class ClaimedRunDir:
    """A run directory that this process owns: private, locked, and empty of an earlier run's files.

    The lock is the test of life, not the presence of files: whoever can take it may clean up.
    Raises ConfigError if the directory is not ours, not private, or another run's.
    """

    def __init__(self, path: str | None) -> None:
        self._made = path is None
        if path is None:
            parent = _private_parent()
            _sweep(parent)
            path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        self.names = RunDir(str(Path(path).absolute()))
        self.names.scheduler_address()  # before anything is made: is the path short enough?
        _make_private(Path(path))
        try:
            self._lock = _lock(self.names.lock_file())
            if self._lock is None:
                raise ConfigError(f"--run-dir {path} belongs to a run that is still alive.")
            _empty(Path(path))
        except OSError as error:
            raise ConfigError(
                f"--run-dir {path} cannot be used: {error.filename}: {error.strerror}; remove it, "
                "or name another directory."
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        path = Path(self.names.path)
        if self._made:
            shutil.rmtree(path, ignore_errors=True)
        else:
            # What has come instead of our files, or a directory that has gone, is left as it is.
            with contextlib.suppress(OSError):
                _empty(path)
                self.names.lock_file().unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)


_PREFIX = "tokenwire-"


def _private_parent() -> str:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return runtime if runtime and os.access(runtime, os.W_OK) else tempfile.gettempdir()


def _sweep(parent: str) -> None:
    """Remove what launchers that were killed have left behind."""
    for path in Path(parent).glob(_PREFIX + "*"):
        # Another user's, or gone meanwhile: not ours to look into.
        with contextlib.suppress(OSError):
            lock_file = RunDir(str(path)).lock_file()
            if path.stat().st_uid != os.getuid() or not lock_file.exists():
                continue
            lock = _lock(lock_file)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _make_private(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = path.lstat()
    except OSError as error:
        raise ConfigError(f"--run-dir {path} cannot be made: {error.strerror}.") from error
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise ConfigError(f"--run-dir {path} must be a directory of this user.")
    if facts.st_mode & 0o077:
        raise ConfigError(f"--run-dir {path} is open to others: chmod 700 it, or name a new one.")


def _lock(path: Path) -> int | None:
    """Lock a file for as long as this process lives; None if another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _empty(path: Path) -> None:
    """Remove the files a run makes, and nothing else."""
    for pattern in ("scheduler", "rank-*", "text-*", "clients-*", "store", "run.json"):
        for file in path.glob(pattern):
            file.unlink(missing_ok=True)
