import pytest

from frontend.client_address import client_address
from protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("listen", "index", "address"),
    [
        ("", 3, "ipc:///r/clients-3"),
        ("tcp://127.0.0.1:5555", 2, "tcp://127.0.0.1:5557"),
        ("tcp://localhost:5555", 0, "tcp://localhost:5555"),
        ("tcp://127.0.0.1:0", 0, "tcp://127.0.0.1:0"),
    ],
)
def test_where_a_frontend_listens_for_clients(listen, index, address):
    assert client_address(listen, "ipc:///r/clients-3", index) == address


@pytest.mark.parametrize(
    ("listen", "sentence"),
    [
        ("tcp://0.0.0.0:5555", "only loopback is possible"),
        ("tcp://10.0.0.1:5555", "only loopback is possible"),
        ("tcp://*:5555", "only loopback is possible"),
        ("127.0.0.1:5555", "must be tcp://HOST:PORT"),
        ("tcp://127.0.0.1", "must be tcp://HOST:PORT"),
        ("ipc:///tmp/x", "must be tcp://HOST:PORT"),
        ("tcp://127.0.0.1.example.org:5555", "only loopback is possible"),
        ("tcp://127.0.0.1:0", "port 0 is for one frontend alone"),
        ("tcp://127.0.0.1:65535", "leaves no port for frontend 1"),
    ],
)
def test_where_it_does_not(listen, sentence):
    with pytest.raises(ConfigError, match=sentence):
        client_address(listen, "ipc:///r/clients-1", 1)
