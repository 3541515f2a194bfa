"""The server: starting, stopping, and whose port it is."""

import contextlib
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sidechannel_cases import (
    LOCAL,
    SECRET,
    connect,
    ended,
    engine,
    question,
    rank,
    ranks,
    read_frame,
    serving,
    still_answers,
    takes_at_most,
    until,
)

from kvpush.transfer.sidechannel import SideChannelError, SideChannelServer, query_peer

pytestmark = pytest.mark.unit


def test_a_taken_port_is_named_with_the_option_that_changes_it() -> None:
    with serving() as first:
        second = SideChannelServer(LOCAL, first.port, engine(engine_id="engine-2"), None)
        with pytest.raises(SideChannelError) as caught:
            second.start()
        for text in (f"{LOCAL}:{first.port}", "taken", "side_channel_port", "KVPUSH_SIDE_CHANNEL_PORT"):
            assert text in str(caught.value)
        second.stop()
        still_answers(first)


def test_a_port_taken_by_a_stranger_is_named_too() -> None:
    with socket.create_server((LOCAL, 0)) as stranger:
        port = stranger.getsockname()[1]
        with pytest.raises(SideChannelError, match=f"{LOCAL}:{port}: the port is taken"):
            SideChannelServer(LOCAL, port, engine(), None).start()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
def test_a_host_that_is_not_ours_is_named(host) -> None:
    with pytest.raises(SideChannelError, match=host):
        SideChannelServer(host, 0, engine(), None).start()


@pytest.mark.parametrize("port", [-1, 65536, True, "5600", None, 1.5])
def test_a_port_that_is_none_is_refused(port) -> None:
    with pytest.raises(ValueError, match="side_channel_port"):
        SideChannelServer(LOCAL, port, engine(), None)


def test_a_name_can_be_bound() -> None:
    server = SideChannelServer("localhost", 0, engine(), None)
    server.start()
    try:
        server.set_ranks(ranks())
        assert query_peer("localhost", server.port, 0, 0, None, None, 10.0).rank == rank()
    finally:
        server.stop()


@pytest.mark.parametrize(
    "host", ["0.0.0.0", pytest.param("::", marks=pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6"))]
)
def test_all_interfaces_can_be_bound(host) -> None:
    """Also those with IPv4 addresses, if it is asked for as IPv6."""
    server = SideChannelServer(host, 0, engine(), None)
    server.start()
    try:
        server.set_ranks(ranks())
        still_answers(server)
    finally:
        server.stop()


def test_start_stop_and_again_on_the_same_port() -> None:
    server = SideChannelServer(LOCAL, 0, engine(), None)
    server.stop()
    server.start()
    port = server.port
    assert port > 0
    with pytest.raises(SideChannelError, match="twice"):
        server.start()
    server.set_ranks(ranks())
    for life in range(3):
        if life:
            server.start()
        assert server.port == port
        still_answers(server)
        with takes_at_most(3.0):
            server.stop()
            server.stop()
    assert not any(thread.name == "kvpush-side-channel" for thread in threading.enumerate())


def test_a_failed_start_leaves_nothing_behind() -> None:
    with serving() as first:
        files = len(os.listdir("/proc/self/fd"))
        for _ in range(10):
            with pytest.raises(SideChannelError):
                SideChannelServer(LOCAL, first.port, engine(), None).start()
        assert len(os.listdir("/proc/self/fd")) <= files + 1


def test_the_missing_secret_is_logged_once(caplog) -> None:
    for secret, lines in ((None, 1), (SECRET, 0)):
        caplog.clear()
        with serving(secret) as server:
            for _ in range(3):
                still_answers(server, secret)
        assert sum("KVPUSH_SECRET is not set" in record.getMessage() for record in caplog.records) == lines


def time_wait_at(port: int) -> int:
    """Connections at this local port, on our side, that have ended and that TCP still remembers."""
    with open("/proc/net/tcp") as file:
        rows = [line.split() for line in file.readlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "06" for row in rows)


def test_a_restarted_engine_gets_its_port_although_tcp_remembers_connections() -> None:
    server = SideChannelServer(LOCAL, 0, engine(), None)
    server.start()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(server)) for _ in range(5)]
        for client in clients:
            client.sendall(question())
            assert read_frame(client)
        server.stop()
        # The side that closes first remembers: here the server.
        assert all(ended(client) for client in clients)
    until(lambda: time_wait_at(server.port) > 0)
    again = SideChannelServer(LOCAL, server.port, engine(incarnation="life-2"), None)
    again.start()
    try:
        again.set_ranks(ranks())
        still_answers(again)
    finally:
        again.stop()


def test_of_many_that_start_at_one_port_at_once_one_gets_it() -> None:
    with socket.create_server((LOCAL, 0)) as taken:
        port = taken.getsockname()[1]
    servers = [SideChannelServer(LOCAL, port, engine(), None) for _ in range(8)]
    together = threading.Barrier(len(servers))

    def start(server: SideChannelServer) -> str:
        together.wait(20)
        try:
            server.start()
        except SideChannelError as error:
            return str(error)
        return ""

    try:
        with ThreadPoolExecutor(len(servers)) as pool:
            results = sorted(pool.map(start, servers, timeout=30))
        assert results[0] == ""
        assert all("the port is taken" in result for result in results[1:])
    finally:
        for server in servers:
            server.stop()
