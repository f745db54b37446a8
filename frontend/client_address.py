"""Where a frontend listens for ZeroMQ clients: what `--listen` says, and what it may say."""

import ipaddress

from protocol.errors import ConfigError

EXAMPLE = "tcp://127.0.0.1:5555"


def client_address(listen: str, default: str, index: int) -> str:
    """Return where frontend `index` listens for clients: `default`, or the flag's port plus index.

    Port 0 is any free one. Raises ConfigError for an address that is not tcp on loopback, or that
    leaves this frontend no port that clients could know.
    """
    if not listen:
        return default
    scheme, _, rest = listen.partition("://")
    host, _, digits = rest.rpartition(":")
    if scheme != "tcp" or not host or not digits.isdecimal():
        raise ConfigError(
            f"--listen is {listen}; it must be tcp://HOST:PORT on loopback, for example {EXAMPLE}."
        )
    if not _is_loopback(host):
        raise ConfigError(
            f"--listen is {listen}: clients are not authenticated, so only loopback is possible, "
            f"for example {EXAMPLE}."
        )
    port = int(digits)
    if port == 0 and index > 0:
        raise ConfigError(
            f"--listen is {listen}, and port 0 is for one frontend alone: of several, frontend i "
            "listens at PORT + i."
        )
    if port + index > 65535:
        raise ConfigError(f"--listen is {listen}, which leaves no port for frontend {index}.")
    return f"tcp://{host}:{port + index}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return host == "localhost"
