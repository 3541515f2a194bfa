"""What the side channel tests share: an engine, its ranks, and peers that do not play by the rules."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

from hypothesis import HealthCheck, settings

from kvpush.transfer.sidechannel import (
    EngineInfo,
    HandshakeError,
    PeerAnswer,
    RankInfo,
    SideChannelServer,
    current_process,
    query_peer,
)
from kvpush.transfer.sidechannel.envelope import frame_bytes, new_nonce, seal
from kvpush.transfer.sidechannel.messages import RankQuery, encode

LOCAL = "127.0.0.1"
SECRET = b"one secret for both sides"
OTHER_SECRET = b"another secret"
# What a call may take beyond its own deadline.
GRACE_S = 0.5
# On a busy machine a single example may be slow; that is not what these tests are about.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


def engine(**changes: object) -> EngineInfo:
    fields: dict[str, object] = {
        "engine_id": "engine-1",
        "incarnation": "life-1",
        "mode": "push",
        "tp_size": 2,
        "pp_size": 2,
        "protocol_version": 1,
        "host_id": current_process().host_id,
        "fingerprint": {"model": "some/model", "kv_dtype": "bfloat16", "block_size": "32"},
    }
    return EngineInfo(**{**fields, **changes})  # type: ignore[arg-type]


def rank(pp_rank: int = 0, tp_rank: int = 0, **changes: object) -> RankInfo:
    me = current_process()
    fields: dict[str, object] = {
        "pp_rank": pp_rank,
        "tp_rank": tp_rank,
        "agent": f"agent-{pp_rank}-{tp_rank}",
        "metadata": bytes([pp_rank, tp_rank]) * 1000,
        "geometry": b"geometry",
        "pid": me.pid,
        "pid_start": me.pid_start,
        "host_id": me.host_id,
    }
    return RankInfo(**{**fields, **changes})  # type: ignore[arg-type]


def ranks() -> list[RankInfo]:
    return [rank(pp, tp) for pp in range(2) for tp in range(2)]


@contextlib.contextmanager
def serving(secret: bytes | None = None, ready: bool = True, **changes: object) -> Iterator[SideChannelServer]:
    server = SideChannelServer(LOCAL, 0, engine(**changes), secret)
    server.start()
    try:
        if ready:
            server.set_ranks(ranks())
        yield server
    finally:
        server.stop()


def read_frame(connection: socket.socket, limit_bytes: int = 8 * 1024 * 1024) -> bytes | None:
    """The next frame; None if the connection ended before. Written for blocking sockets with a timeout."""
    frame = b""
    while (size := frame_bytes(frame, limit_bytes)) != len(frame):
        piece = connection.recv(size - len(frame))
        if not piece:
            return None
        frame += piece
    return frame


@contextlib.contextmanager
def scripted_peer(reply: Callable[[bytes], bytes | None]) -> Iterator[int]:
    """A peer that answers each frame with the bytes that `reply` returns, one client after another; yields its port."""
    listener = socket.create_server((LOCAL, 0))
    listener.settimeout(0.02)
    stop = threading.Event()

    def converse(client: socket.socket) -> None:
        client.settimeout(10)
        while (frame := read_frame(client)) is not None:
            answer = reply(frame)
            if answer is not None:
                client.sendall(answer)

    def serve() -> None:
        while not stop.is_set():
            try:
                client, _ = listener.accept()
            except TimeoutError:
                continue
            with client, contextlib.suppress(OSError):
                converse(client)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        stop.set()
        thread.join(15)
        listener.close()
        assert not thread.is_alive()


@contextlib.contextmanager
def tcp_peer(greeting: bytes, close: bool) -> Iterator[int]:
    """A TCP server that sends some bytes to whoever connects, and then closes the connection or stays silent."""
    listener = socket.create_server((LOCAL, 0))
    listener.settimeout(0.05)
    stop = threading.Event()
    kept: list[socket.socket] = []

    def serve() -> None:
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            with contextlib.suppress(OSError):
                connection.sendall(greeting)
            if close:
                connection.close()
            else:
                kept.append(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        stop.set()
        thread.join(5)
        assert not thread.is_alive()
        for connection in [*kept, listener]:
            connection.close()


@contextlib.contextmanager
def takes_at_most(limit_s: float) -> Iterator[None]:
    """The block must not take longer, apart from the time for which the machine did not let this process run.

    That is measured by a thread that wants to wake every few milliseconds: on a busy machine both are late together.
    """
    end, late_s = threading.Event(), [0.0]

    def measure() -> None:
        interval_s = 0.01
        last = time.monotonic()
        while not end.wait(interval_s):
            now = time.monotonic()
            late_s[0] += max(0.0, now - last - interval_s - 0.002)
            last = now

    meter = threading.Thread(target=measure, daemon=True)
    meter.start()
    start = time.monotonic()
    try:
        yield
    finally:
        taken_s = time.monotonic() - start
        end.set()
        meter.join(10)
        assert taken_s <= limit_s + late_s[0], f"took {taken_s:.2f} s; the machine was late by {late_s[0]:.2f} s"


def query(
    port: int,
    pp_rank: int = 0,
    tp_rank: int = 0,
    expected: str | None = None,
    secret: bytes | None = None,
    timeout_s: float = 20.0,
    host: str = LOCAL,
) -> PeerAnswer:
    """`query_peer`, which must keep its deadline whatever happens."""
    with takes_at_most(timeout_s + GRACE_S):
        return query_peer(host, port, pp_rank, tp_rank, expected, secret, timeout_s)


def failure(port: int, **how: object) -> HandshakeError:
    """The error with which a query must end."""
    error: HandshakeError | None = None
    try:
        query(port, **how)  # type: ignore[arg-type]
    except HandshakeError as caught:
        error = caught
    assert error is not None, "there was an answer"
    return error


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    """Waits until it holds; fails if it does not by the limit."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def still_answers(server: SideChannelServer, secret: bytes | None = None) -> None:
    assert query_peer(LOCAL, server.port, 1, 0, "engine-1", secret, 30.0).rank == rank(1, 0)


def connect(server: SideChannelServer) -> socket.socket:
    """A stranger's connection."""
    return socket.create_connection((LOCAL, server.port), timeout=10)


def question(nonce: bytes | None = None) -> bytes:
    """The frame that asks for the first rank."""
    return seal("query", nonce or new_nonce(), encode(RankQuery(pp_rank=0, tp_rank=0)), None)


def ended(connection: socket.socket) -> bool:
    """True if the server has closed it; whatever it has sent before is read away."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass
    return True
