"""Where the ranks of a group meet before they connect: a file in the run directory.

Ranks may start in any order, minutes apart, and the file may hold entries of ranks that have died:
a group started by hand again finds the old one's. So each rank draws a nonce, and an entry counts
only if it names the nonce of the rank that reads it:

    rank 0        hello   = nonce 0
    rank r        ack/r   = nonce 0 · nonce r      once it sees hello, and whenever that changes
    rank 0        go      = nonce 0 · nonce 1 · …  once every ack names nonce 0
    rank r        leaves  once go names its nonce in its place

The group then connects under keys that begin with a digest of all nonces, which nobody has used.
"""

import hashlib
import logging
import os
import time
from pathlib import Path

from torch._C._distributed_c10d import FileStore, PrefixStore, Store

_NONCE_BYTES = 16
_POLL_S = 0.02
_FIRST_WORD_S = 1.0
_REMIND_S = 30.0

log = logging.getLogger(__name__)


def meet(path: Path, *, rank: int, size: int) -> Store:
    """Wait, for as long as it takes, for all ranks; return a store that only they share.

    `path` is the group's file, made if it is not there.
    """
    # Without a number of workers the file is not removed by whoever thinks it is the last.
    store = FileStore(str(path))
    nonces = _gather(store, size) if rank == 0 else _follow(store, rank, size)
    return PrefixStore(hashlib.sha256(nonces).hexdigest(), store)


def share(store: Store, key: str, text: str | None) -> str:
    """Return, on every rank, the text of the one rank that has one."""
    if text is not None:
        store.set(key, text)
    return store.get(key).decode()


def _gather(store: Store, size: int) -> bytes:
    """Wait for every rank's answer to this rank 0; return all nonces in rank order."""
    nonce = os.urandom(_NONCE_BYTES)
    store.set("hello", nonce.hex())
    patience = _Patience()
    while True:
        # Read anew each time: a rank may have been started again since it answered.
        acks = {rank: _read(store, f"ack/{rank}") for rank in range(1, size)}
        missing = [str(rank) for rank, ack in acks.items() if ack[:_NONCE_BYTES] != nonce]
        if not missing:
            break
        patience.wait(f"rank {', '.join(missing)}")
    nonces = nonce + b"".join(ack[_NONCE_BYTES:] for ack in acks.values())
    store.set("go", nonces.hex())
    return nonces


def _follow(store: Store, rank: int, size: int) -> bytes:
    """Answer rank 0 until it says go to this rank; return all nonces in rank order."""
    nonce = os.urandom(_NONCE_BYTES)
    place = slice(rank * _NONCE_BYTES, (rank + 1) * _NONCE_BYTES)
    answered = b""
    patience = _Patience()
    while True:
        go = _read(store, "go")
        if go[place] == nonce and len(go) == size * _NONCE_BYTES:
            return go
        first = _read(store, "hello")
        if first != answered:
            store.set(f"ack/{rank}", (first + nonce).hex())
            answered = first
        patience.wait("rank 0 and the others")


def _read(store: Store, key: str) -> bytes:
    """Return a key's value, empty if it is not set."""
    return bytes.fromhex(store.get(key).decode()) if store.check([key]) else b""


class _Patience:
    """Waits a little, and says now and then for what."""

    def __init__(self) -> None:
        self._remind_at = time.monotonic() + _FIRST_WORD_S

    def wait(self, awaited: str) -> None:
        if time.monotonic() >= self._remind_at:
            log.info("waits for %s", awaited)
            self._remind_at = time.monotonic() + _REMIND_S
        time.sleep(_POLL_S)
