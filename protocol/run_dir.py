"""The run directory: where the processes of one run find each other.

scheduler           ROUTER; every frontend connects
rank-0, rank-1 …    DEALER of the scheduler; that rank connects
text-0, text-1 …    DEALER of frontend i; its text process connects
clients-0 …         ROUTER of frontend i; clients connect
store               the ranks' torch.distributed FileStore
run.json            addresses, pids and versions, written when the run is ready
lock                held by the launcher for as long as it lives
"""

from dataclasses import dataclass
from pathlib import Path

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
