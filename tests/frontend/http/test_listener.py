import socket

import pytest

from frontend.http.listener import open_listener
from protocol.errors import ConfigError


def test_port_0_takes_a_free_port():
    with open_listener("127.0.0.1", 0, is_guarded=False) as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1"
        socket.create_connection((host, port), timeout=5).close()


def test_an_address_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} cannot be used: .*another port"):
            open_listener("127.0.0.1", port, is_guarded=False)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 70 + ".x", "a..b"])
def test_a_host_that_is_none_is_refused(host):
    with pytest.raises(ConfigError, match="cannot be used"):
        open_listener(host, 0, is_guarded=False)


EVERYWHERE = "0.0.0.0"  # noqa: S104 - refused


@pytest.mark.parametrize(("host", "shown"), [(EVERYWHERE, EVERYWHERE), ("", "''"), ("::", "::")])
def test_other_machines_are_let_in_only_with_keys_or_on_purpose(host, shown):
    with pytest.raises(ConfigError) as caught:
        open_listener(host, 0, is_guarded=False)
    assert str(caught.value) == (
        f"--host {shown} lets other machines in without a key: give --api-key-file, or "
        "--allow-unauthenticated if that is meant, or a loopback address such as 127.0.0.1."
    )
    open_listener(host, 0, is_guarded=True).close()
