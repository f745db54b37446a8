"""From what a user writes to where a frontend listens."""

import json
import re
import socket

import pytest

from frontend.client.address import resolve_address
from protocol.errors import ConfigError


@pytest.mark.parametrize(
    "address",
    ["ipc:///tmp/x", "tcp://127.0.0.1:5555", "tcp://localhost:5555", "tcp://127.3.0.9:1"],
)
def test_an_address_stays_as_it_is(address):
    assert resolve_address(address) == address


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("http://127.0.0.1:8000", "is no client address; give ipc://PATH, tcp://127.0.0.1:PORT"),
        ("tcp://10.0.0.1:5555", "is not on this machine"),
        ("tcp://0.0.0.0:5555", "is not on this machine"),
        ("tcp://example.org:5555", "is not on this machine"),
        ("tcp://127.0.0.1", "names no port"),
        ("tcp://127.0.0.1:0", "names no port"),
        ("tcp://127.0.0.1:70000", "has no legal port"),
        ("/no/such/directory", "'/no/such/directory' is neither a run directory nor an address"),
        ("127.0.0.1:5555", "give ipc://PATH, tcp://127.0.0.1:PORT or the engine's run directory"),
        ("", "'' is neither a run directory nor an address"),
        ("~no-such-user/run", "~no-such-user/run cannot be looked into"),
    ],
)
def test_what_cannot_be_an_address_is_refused(address, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        resolve_address(address)


def test_a_run_directory_gives_one_of_its_frontends(tmp_path):
    clients = ["ipc:///a", "ipc:///b"]
    (tmp_path / "run.json").write_text(json.dumps({"clients": clients}))
    assert {resolve_address(tmp_path) for _ in range(64)} == set(clients)
    assert resolve_address(str(tmp_path)) in clients


def test_a_directory_without_run_file_may_be_that_of_an_engine_not_yet_ready(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no run\.json: it is no run directory, or its"):
        resolve_address(tmp_path)


def test_the_path_of_a_socket_is_an_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a short relative path: pytest's own are near the limit
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("clients-0")
        assert resolve_address("clients-0") == f"ipc://{tmp_path}/clients-0"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"clients": []}', '{"clients": "x"}'])
def test_a_spoiled_run_file_is_named(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "run.json"))):
        resolve_address(tmp_path)
