"""API keys: who may ask."""

import hashlib
import hmac
import stat
from collections.abc import Iterable
from pathlib import Path

from protocol.errors import ConfigError

MIN_KEY_LENGTH = 8
OPEN_TO_OTHERS = 0o027
"""Mode bits that a file of keys must not have; its group may read it."""


class ApiKeys:
    """The keys that are accepted, as digests."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def domain_of(self, authorization: bytes) -> bytes | None:
        """Return what tells the holder of a key from others, or None if the key is not accepted.

        `authorization` is the header's value. Every key is compared, in constant time.
        """
        scheme, _, key = authorization.partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return digest[:16] if any(matches) and scheme.lower() == b"bearer" else None


def read_keys(path: Path) -> ApiKeys:
    """Read a file with one key a line; empty lines and lines that start with # do not count.

    Raises ConfigError if there is no usable key, or if other users can get at them.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"--api-key-file {path} cannot be read: {reason}.") from error
    if mode & OPEN_TO_OTHERS:
        raise ConfigError(
            f"--api-key-file {path} is open to other users (mode {mode:04o}): chmod 600 it."
        )
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {path} holds no key: give one a line.")
    for key in keys:
        if len(key) < MIN_KEY_LENGTH or not key.isascii() or " " in key:
            raise ConfigError(
                f"--api-key-file {path} holds a key that is shorter than {MIN_KEY_LENGTH} "
                "characters, or has spaces or letters beyond ASCII."
            )
    return ApiKeys(keys)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
