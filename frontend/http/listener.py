"""The HTTP port. Opened by the launcher before anything loads, or by a frontend started by hand."""

import ipaddress
import socket

from protocol.errors import ConfigError

BACKLOG = 2048


def open_listener(host: str, port: int, *, is_guarded: bool) -> socket.socket:
    """Return a listening socket; port 0 takes any free one.

    `is_guarded`: requests need a key, or the operator has said that they need none. Without it
    only this machine may reach the port. Raises ConfigError if the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        bound = listener.getsockname()[0]
        if not is_guarded and not ipaddress.ip_address(bound).is_loopback:
            raise ConfigError(
                f"--host {host or repr(host)} lets other machines in without a key: give "
                "--api-key-file, or --allow-unauthenticated if that is meant, or a loopback "
                "address such as 127.0.0.1."
            )
        listener.listen(BACKLOG)
    except (OSError, UnicodeError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else "it is no host name"
        raise ConfigError(
            f"--host {host} --port {port} cannot be used: {reason}; "
            "choose another port, or 0 for any free one."
        ) from error
    except ConfigError:
        listener.close()
        raise
    return listener
