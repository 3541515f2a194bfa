"""The server thread: starting, stopping, and what strangers send it."""

import contextlib
import os
import random
import socket
import struct
import threading
import time

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from sidechannel_cases import LOCAL, SECRET, engine, patient, rank, ranks, serving, takes_at_most
from test_sidechannel_responder import sealed_garbage, sealed_queries

from kvpush.transfer.sidechannel import SideChannelError, SideChannelServer, query_peer
from kvpush.transfer.sidechannel.envelope import new_nonce, seal
from kvpush.transfer.sidechannel.messages import RankQuery, encode

pytestmark = pytest.mark.unit


def still_answers(server: SideChannelServer, secret: bytes | None = None) -> None:
    assert query_peer(LOCAL, server.port, 1, 0, "engine-1", secret, 30.0).rank == rank(1, 0)


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


def test_all_interfaces_can_be_bound() -> None:
    server = SideChannelServer("0.0.0.0", 0, engine(), None)
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


@contextlib.contextmanager
def dealer(port: int, kind: int = zmq.DEALER):
    context = zmq.Context()
    try:
        made = context.socket(kind)
        made.setsockopt(zmq.LINGER, 1000)
        made.connect(f"tcp://{LOCAL}:{port}")
        yield made
        made.close()
        context.term()
    finally:
        context.destroy(linger=0)


def until_counted(server: SideChannelServer, total: int) -> None:
    limit = time.monotonic() + 60
    while server.counters.total() < total and time.monotonic() < limit:
        time.sleep(0.005)
    assert server.counters.total() == total


@pytest.fixture(params=[None, SECRET], ids=["open", "secret"])
def live(request):
    with serving(request.param) as server:
        yield server, request.param


parts = st.one_of(st.binary(max_size=300), sealed_garbage, sealed_queries)


@settings(patient, max_examples=40)
@given(st.lists(st.lists(parts, min_size=1, max_size=6), min_size=1, max_size=10))
def test_a_live_server_counts_each_message_once_and_goes_on(live, messages) -> None:
    server, secret = live
    before = server.counters.total()
    with dealer(server.port) as stranger:
        for message in messages:
            stranger.send_multipart(message)
        until_counted(server, before + len(messages))
    assert server.counters.internal == 0
    still_answers(server, secret)


def test_raw_bytes_do_not_stop_a_live_server(live) -> None:
    server, secret = live
    generator = random.Random(1)
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    # What a connection may have got to before it sends rubbish: nothing, the signature, the greeting, the handshake.
    prefixes = [b"", greeting[:10], greeting, greeting + b"\x04" + bytes([len(ready)]) + ready]
    for round_ in range(80):
        with socket.create_connection((LOCAL, server.port), timeout=5) as stranger, contextlib.suppress(OSError):
            stranger.sendall(prefixes[round_ % len(prefixes)] + generator.randbytes(generator.randint(0, 3000)))
            if round_ % 3 == 0:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends in a reset
    still_answers(server, secret)
    assert server.counters.internal == 0


def test_messages_far_above_the_limit_cost_their_sender_the_connection(live) -> None:
    server, secret = live
    before = server.counters.total()
    with dealer(server.port) as stranger:
        watch = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        stranger.send(bytes(10 * 1024 * 1024))
        assert watch.poll(10_000)
        stranger.disable_monitor()
        watch.close()
        stranger.setsockopt(zmq.LINGER, 0)
    still_answers(server, secret)
    assert server.counters.total() - before == (2 if secret else 1)  # our own question only


def test_other_socket_kinds_do_not_disturb(live) -> None:
    server, secret = live
    for kind in (zmq.REQ, zmq.PUSH, zmq.SUB, zmq.ROUTER):
        context = zmq.Context()
        stranger = context.socket(kind)
        stranger.connect(f"tcp://{LOCAL}:{server.port}")
        if kind == zmq.REQ:
            stranger.send(seal("query", new_nonce(), encode(RankQuery(pp_rank=0, tp_rank=0)), secret))
            assert not stranger.poll(300)
        context.destroy(linger=0)
    still_answers(server, secret)


def test_a_client_that_never_reads_cannot_fill_our_memory() -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    questions = 200
    with serving(ready=False) as server:
        server.set_ranks([rank(metadata=bytes(2 * 1024 * 1024)), rank(1, 0)])
        still_answers(server)
        before = resident_bytes()
        context = zmq.Context()
        try:
            greedy = context.socket(zmq.DEALER)
            greedy.setsockopt(zmq.LINGER, 0)
            greedy.setsockopt(zmq.RCVHWM, 1)
            greedy.setsockopt(zmq.RCVBUF, 65536)
            greedy.connect(f"tcp://{LOCAL}:{server.port}")
            for _ in range(questions):
                greedy.send(seal("query", new_nonce(), encode(RankQuery(pp_rank=0, tp_rank=0)), None))
            until_counted(server, 1 + questions)
            # Unread answers would be 400 MiB; some are in flight on both sides.
            assert resident_bytes() - before < 100 * 1024 * 1024
            still_answers(server)
        finally:
            context.destroy(linger=0)
