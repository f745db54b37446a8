import os
import socket

import pytest

from frontend.http.listener import listener_url, open_listener
from protocol.errors import ConfigError


def test_any_free_port_is_named_in_the_address():
    with open_listener("127.0.0.1", 0, is_guarded=False) as listener:
        port = listener.getsockname()[1]
        assert port > 0
        assert listener_url(listener) == f"http://127.0.0.1:{port}"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_an_ipv6_address_is_written_in_brackets():
    with open_listener("::1", 0, is_guarded=False) as listener:
        assert listener_url(listener) == f"http://[::1]:{listener.getsockname()[1]}"


def test_an_inherited_socket_is_used():
    with socket.create_server(("127.0.0.1", 0)) as ours:
        inherited = open_listener("", 0, is_guarded=False, inherited_fd=os.dup(ours.fileno()))
        assert inherited.getsockname() == ours.getsockname()
        inherited.close()


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


@pytest.mark.parametrize(
    ("host", "sentence"),
    [
        ("no.such.host.invalid", "cannot be resolved: .*; give an address of this machine."),
        ("a" * 70 + ".x", "cannot be resolved: .*; give an address of this machine."),
        ("a..ü", "cannot be resolved: it is no host name; give an address of this machine."),
        ("192.0.2.1", "is not an address of this machine: give one that is."),
    ],
)
def test_a_host_that_is_none_is_blamed_and_not_the_port(host, sentence):
    with pytest.raises(ConfigError, match=f"^--host {host} {sentence}$"):
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
