"""Ports: free, apart from each other, and said to be taken when they are."""

import socket
import subprocess
import sys

import pytest

from kvpush.launch import LaunchError, free_port, require_free
from kvpush.launch.ports import is_free

pytestmark = pytest.mark.unit


def test_free_ports_differ_and_can_be_bound() -> None:
    ports = [free_port() for _ in range(20)]
    assert len(set(ports)) == 20
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            assert not is_free(port)
        assert is_free(port)


def test_free_ports_are_not_those_of_outgoing_connections() -> None:
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first, last = map(int, file.read().split())
    if first >= 21000:
        assert not first <= free_port() <= last


def test_another_process_does_not_get_a_port_that_is_held_here(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    script = (
        "import sys\n"
        "from kvpush.launch import LaunchError, ports\n"
        f"ports._outside_the_ephemeral_range = lambda: ({port}, {port})\n"
        "try: ports.free_port()\n"
        "except LaunchError: sys.exit(3)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=30, check=False).returncode == 3


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("listens", [True, False])
def test_a_taken_port_is_seen_even_if_its_holder_would_share_it(address: str, listens: bool) -> None:
    port = free_port()
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((address, port))
        if listens:
            holder.listen()
        with pytest.raises(
            LaunchError, match=rf"port {port} is in use on this machine; choose another with --router-port"
        ):
            require_free(port, "--router-port")
    require_free(port, "--router-port")


def test_a_port_with_lingering_connections_is_free() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as server:
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # the server's side closes first, so TIME_WAIT is on its port
        assert client.recv(1) == b""
        client.close()
    with pytest.raises(OSError), socket.socket() as plain:
        plain.bind(("127.0.0.1", port))
    assert is_free(port)


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_impossible_ports_are_named(port: int) -> None:
    with pytest.raises(LaunchError, match=rf"--port is {port}"):
        require_free(port, "--port")


def test_an_address_of_another_machine_is_not_called_taken() -> None:
    with pytest.raises(LaunchError, match=r"cannot listen on 192\.0\.2\.77:"):
        require_free(free_port(), "--port", "192.0.2.77")
