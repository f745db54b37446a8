"""The HTTP endpoint's listening socket: how it is opened, and what its address is.

The launcher opens it before anything loads, and its frontends inherit it; a frontend that is
started by hand opens one itself.
"""

import errno
import ipaddress
import socket

from protocol.errors import ConfigError

BACKLOG = 2048
"""Connections that may wait to be accepted."""


def open_listener(
    host: str, port: int, *, is_guarded: bool, inherited_fd: int = -1
) -> socket.socket:
    """Return a listening socket: the inherited one, or one of our own where the fd is negative.

    Port 0 takes any free one. `is_guarded`: requests need a key, or the operator has said that they
    need none. Without it only this machine may reach the port. Raises ConfigError if the address
    cannot be used.
    """
    if inherited_fd >= 0:
        return socket.socket(fileno=inherited_fd)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and socket.has_dualstack_ipv6():
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host, port))
        bound = listener.getsockname()[0]
        if not is_guarded and not ipaddress.ip_address(bound).is_loopback:
            raise ConfigError(
                f"--host {host or repr(host)} lets other machines in without a key: give "
                "--api-key-file, or --allow-unauthenticated if that is meant, or a loopback "
                "address such as 127.0.0.1."
            )
        listener.listen(BACKLOG)
    except (OSError, UnicodeError, TypeError) as error:  # the latter two of a name's encoding
        listener.close()
        raise ConfigError(_refusal(host, port, error)) from error
    except ConfigError:
        listener.close()
        raise
    return listener


def _refusal(host: str, port: int, error: OSError | UnicodeError | TypeError) -> str:
    """Return a sentence that blames the host or the port, whichever it is."""
    if not isinstance(error, OSError) or isinstance(error, socket.gaierror):
        reason = error.strerror if isinstance(error, OSError) else "it is no host name"
        return f"--host {host} cannot be resolved: {reason}; give an address of this machine."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is not an address of this machine: give one that is."
    return (
        f"--host {host} --port {port} cannot be used: {error.strerror}; choose another port, or 0 "
        "for any free one."
    )


def listener_url(listener: socket.socket) -> str:
    """Return where clients find a listening socket, as http://HOST:PORT."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
