"""Where an engine's frontends listen: from what a user writes to an address a socket takes."""

import ipaddress
import json
import secrets
from pathlib import Path
from urllib.parse import urlsplit

from protocol.errors import ConfigError
from protocol.run_dir import RunDir


def resolve_address(address: str | Path) -> str:
    """Return the `ipc://` or `tcp://` address of one frontend.

    `address` is one already, or the path of a frontend's socket, or that of the run directory of an
    engine that is ready; of several frontends there, any one is taken. Raises ConfigError.
    """
    text = str(address)
    if text.startswith("ipc://"):
        return text
    if text.startswith("tcp://"):
        _refuse_other_hosts(text)
        return text
    if "://" in text:
        raise ConfigError(
            f"{text} is no client address; give ipc://PATH, tcp://127.0.0.1:PORT or the engine's "
            "run directory. (http:// is for OpenAI clients.)"
        )
    try:
        path = Path(text).expanduser()
        if path.is_socket():
            return f"ipc://{path.absolute()}"
        is_directory = bool(text) and path.is_dir()
    except (OSError, RuntimeError) as error:  # not ours to look into, or the home of no user
        raise ConfigError(f"{text} cannot be looked into: {error}.") from error
    if not is_directory:
        raise ConfigError(
            f"{text!r} is neither a run directory nor an address; give ipc://PATH, "
            "tcp://127.0.0.1:PORT or the engine's run directory."
        )
    return secrets.choice(_clients(path))


def _clients(directory: Path) -> list[str]:
    file = RunDir(str(directory)).run_file()
    try:
        facts = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ConfigError(
            f"{directory} holds no {file.name}: it is no run directory, or its engine is not ready."
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}.") from error
    clients = facts.get("clients") if isinstance(facts, dict) else None
    if not isinstance(clients, list) or not clients:
        raise ConfigError(f"{file} names no client address.")
    return [str(client) for client in clients]


def _refuse_other_hosts(address: str) -> None:
    """Refuse to send prompts over a network: the connection is neither encrypted nor proven."""
    parts = urlsplit(address)
    try:
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise ConfigError(f"{address} has no legal port: {error}.") from error
    if not port:
        raise ConfigError(f"{address} names no port; write tcp://127.0.0.1:PORT.")
    try:
        is_loopback = ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if not is_loopback:
        raise ConfigError(
            f"{address} is not on this machine; only 127.0.0.1 is possible, since the connection "
            "is not encrypted. Use a tunnel to reach another host."
        )
