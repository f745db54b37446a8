import os
import socket

import pytest

from frontend.http.listener import listener_url, open_listener
from protocol.errors import ConfigError


def test_any_free_port_is_named_in_the_address():
    with open_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert port > 0
        assert listener_url(listener) == f"http://127.0.0.1:{port}"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_an_ipv6_address_is_written_in_brackets():
    with open_listener("::1", 0) as listener:
        assert listener_url(listener) == f"http://[::1]:{listener.getsockname()[1]}"


def test_an_inherited_socket_is_used():
    with socket.create_server(("127.0.0.1", 0)) as ours:
        inherited = open_listener("", 0, os.dup(ours.fileno()))
        assert inherited.getsockname() == ours.getsockname()
        inherited.close()


def test_an_address_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} cannot be used: .*another port"):
            open_listener("127.0.0.1", port)
