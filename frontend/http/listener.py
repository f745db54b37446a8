"""The HTTP endpoint's listening socket: how it is opened, and what its address is.

The launcher opens it before anything loads, and its frontends inherit it; a frontend that is
started by hand opens one itself.
"""

import socket

from protocol.errors import ConfigError

BACKLOG = 2048
"""Connections that may wait to be accepted."""


def open_listener(host: str, port: int, inherited_fd: int = -1) -> socket.socket:
    """Return a listening socket: the inherited one, or one of our own where the fd is negative.

    Raises ConfigError if the address cannot be used.
    """
    if inherited_fd >= 0:
        return socket.socket(fileno=inherited_fd)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(
            (host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both
        )
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port} cannot be used: {error.strerror}; "
            "choose another port, or 0 for any free one."
        ) from error


def listener_url(listener: socket.socket) -> str:
    """Return where clients find a listening socket, as http://HOST:PORT."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
