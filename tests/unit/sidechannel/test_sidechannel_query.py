"""The client against real servers, and against addresses where none is."""

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sidechannel_cases import (
    LOCAL,
    OTHER_SECRET,
    SECRET,
    engine,
    failure,
    query,
    rank,
    ranks,
    scripted_peer,
    serving,
    takes_at_most,
    tcp_peer,
    until,
)

from kvpush.transfer.sidechannel import HandshakeError, PeerAnswer, SideChannelServer, query_peer
from kvpush.transfer.sidechannel.envelope import seal, unseal
from kvpush.transfer.sidechannel.messages import Refusal, encode

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("secret", [None, SECRET])
def test_every_rank_can_be_asked_for(secret) -> None:
    with serving(secret) as server:
        for expected in (None, "engine-1"):
            for one in ranks():
                answer = query(server.port, one.pp_rank, one.tp_rank, expected, secret)
                assert answer == PeerAnswer(engine=engine(), rank=one)
        assert server.counters.answered == 8
        assert server.counters.challenged == (8 if secret else 0)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_metadata_of_megabytes_arrives_whole(secret) -> None:
    large = rank(metadata=bytes(range(256)) * 15_000)
    with serving(secret, ready=False) as server:
        server.set_ranks([large])
        assert query(server.port, secret=secret).rank == large


@pytest.mark.parametrize(
    ("theirs", "mine", "text"),
    [
        (SECRET, OTHER_SECRET, "different values of KVPUSH_SECRET"),
        (SECRET, None, "the other side has KVPUSH_SECRET, this side has none"),
        (None, SECRET, "this side has KVPUSH_SECRET, the other side has none"),
    ],
)
def test_secrets_that_differ_end_in_bad_mac_at_once(theirs, mine, text) -> None:
    with serving(theirs) as server, takes_at_most(2.0):
        error = failure(server.port, secret=mine, timeout_s=30.0)
        assert error.code == "bad_mac"
        assert text in str(error)
        assert f"{LOCAL}:{server.port} rank pp0tp0" in str(error)
        assert server.counters.bad_mac == server.counters.total() == 1


def test_the_wrong_engine_and_an_unknown_rank_are_final() -> None:
    with serving() as server, takes_at_most(3.0):
        error = failure(server.port, expected="engine-2", timeout_s=30.0)
        assert error.code == "wrong_engine"
        assert "engine-1" in str(error)
        assert "engine-2" in str(error)
        assert failure(server.port, pp_rank=2, timeout_s=30.0).code == "unknown_rank"


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_peer_that_is_not_ready_is_asked_again(secret) -> None:
    with serving(secret, ready=False) as server:
        timer = threading.Timer(0.4, server.set_ranks, [ranks()])
        timer.start()
        with takes_at_most(3.0):
            assert query(server.port, 1, 1, secret=secret, timeout_s=10.0).rank == rank(1, 1)
        timer.join()
        assert server.counters.not_ready >= 2


def test_a_peer_that_never_gets_ready_is_reported_as_that() -> None:
    with serving(ready=False) as server:
        start = time.monotonic()
        assert failure(server.port, timeout_s=1.2).code == "not_ready"
        assert time.monotonic() - start > 0.6
        # A growing pause: the peer is busy starting, and must not be kept from it.
        assert server.counters.not_ready < 15


def test_a_peer_that_was_not_ready_and_falls_silent_is_reported_as_not_ready() -> None:
    asked: list[bytes] = []

    def once(frame: bytes) -> bytes | None:
        asked.append(frame)
        if len(asked) > 1:
            return None
        nonce, _ = unseal("query", frame, None)
        return seal("answer", nonce, encode(Refusal(code="not_ready", message="starting")), None)

    with scripted_peer(once) as port:
        error = failure(port, timeout_s=0.7)
    assert error.code == "not_ready"
    assert "starting" in str(error)


def test_nobody_there_is_refused_at_once() -> None:
    with socket.create_server((LOCAL, 0)) as taken:
        port = taken.getsockname()[1]
    with takes_at_most(2.0):
        assert failure(port, timeout_s=30.0).code == "refused"


def test_an_unknown_name_is_refused() -> None:
    error = failure(5600, host="no-such-host.invalid", timeout_s=10.0)
    assert error.code == "refused"
    assert "no-such-host.invalid" in str(error)


def test_a_resolver_that_hangs_does_not_hold_up_the_deadline(monkeypatch) -> None:
    release = threading.Event()

    def hang(*args: object, **more: object) -> list[object]:
        release.wait(20)
        return []

    monkeypatch.setattr("kvpush.transfer.addresses.socket.getaddrinfo", hang)
    try:
        error = failure(5600, host="slow-name.example", timeout_s=0.4)
    finally:
        release.set()
    assert error.code == "timeout"
    assert "slow-name.example" in str(error)


def test_all_addresses_of_a_name_are_tried(monkeypatch) -> None:
    def two(host: str, timeout_s: float) -> tuple[str, ...]:
        return ("127.0.0.77", LOCAL)  # nobody listens at the first

    monkeypatch.setattr("kvpush.transfer.sidechannel.client.numeric_addresses", two)
    with serving() as server:
        assert query(server.port, host="two-addresses").rank == rank()


def test_a_silent_address_leaves_time_for_the_next(monkeypatch) -> None:
    with tcp_peer(b"", close=False) as silent:
        server = SideChannelServer("127.0.0.2", silent, engine(), None)
        server.start()
        try:
            server.set_ranks(ranks())
            monkeypatch.setattr(
                "kvpush.transfer.sidechannel.client.numeric_addresses", lambda host, timeout_s: (LOCAL, "127.0.0.2")
            )
            assert query(silent, host="two-addresses", timeout_s=2.0).rank == rank()
        finally:
            server.stop()


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6(host) -> None:
    server = SideChannelServer(host, 0, engine(), SECRET)
    server.start()
    try:
        server.set_ranks(ranks())
        assert query(server.port, host=host, secret=SECRET).rank == rank()
        error = failure(server.port, host="::1", secret=SECRET, expected="other")
        assert f"[::1]:{server.port}" in str(error)
    finally:
        server.stop()


@pytest.mark.parametrize("secret", [None, SECRET])
def test_64_at_once(secret) -> None:
    with serving(secret) as server, ThreadPoolExecutor(64) as pool:
        start = threading.Barrier(64)

        def one(number: int) -> bool:
            start.wait(20)
            return query(server.port, number % 2, number // 2 % 2, secret=secret, timeout_s=20.0).rank == rank(
                number % 2, number // 2 % 2
            )

        assert list(pool.map(one, range(64), timeout=40)) == [True] * 64
        assert server.counters.answered == 64


def test_a_server_that_stops_ends_the_questions_at_once() -> None:
    with serving(ready=False) as server, ThreadPoolExecutor(16) as pool:
        waiting = [pool.submit(failure, server.port, timeout_s=20.0) for _ in range(16)]
        limit = time.monotonic() + 10
        while server.counters.not_ready < 16 and time.monotonic() < limit:
            time.sleep(0.01)
        with takes_at_most(5.0):
            server.stop()
            assert {future.result(10).code for future in waiting} == {"refused"}


def test_a_server_that_stops_under_load_leaves_no_question_open() -> None:
    server = SideChannelServer(LOCAL, 0, engine(), SECRET)
    server.start()
    server.set_ranks(ranks())
    stopped = threading.Event()

    def ask_until_stopped() -> tuple[int, str]:
        answered = 0
        while True:
            late = stopped.is_set()
            try:
                query(server.port, secret=SECRET, timeout_s=2.0)
            except HandshakeError as error:
                return answered, error.code
            assert not late, "answered after stop"
            answered += 1

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask_until_stopped) for _ in range(8)]
        time.sleep(0.5)
        server.stop()
        stopped.set()
        results = [future.result(15) for future in asking]
    assert sum(answered for answered, _ in results) > 0
    assert {code for _, code in results} <= {"refused", "timeout"}


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf")])
def test_a_deadline_must_be_one(timeout_s) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        query_peer(LOCAL, 5600, 0, 0, None, None, timeout_s)


@pytest.mark.parametrize(
    ("port", "pp_rank", "expected", "name"),
    [
        (0, 0, None, "port"),
        (65536, 0, None, "port"),
        (True, 0, None, "port"),
        (5600, -1, None, "pp_rank"),
        (5600, 0, "x" * 513, "expected_engine_id"),
    ],
)
def test_an_argument_out_of_bounds_is_named(port, pp_rank, expected, name) -> None:
    with pytest.raises(ValueError, match=name):
        query_peer(LOCAL, port, pp_rank, 0, expected, None, 1.0)


def test_no_socket_or_thread_is_left_behind() -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    with serving(SECRET) as server:
        query(server.port, secret=SECRET)
        files, threads = open_files(), threading.active_count()
        for _ in range(30):
            query(server.port, secret=SECRET)
            failure(server.port, secret=OTHER_SECRET)
        limit = time.monotonic() + 5
        while open_files() > files + 2 and time.monotonic() < limit:
            time.sleep(0.05)
        assert open_files() <= files + 2
        assert threading.active_count() <= threads


def test_no_socket_is_left_when_the_address_cannot_be_used(monkeypatch) -> None:
    monkeypatch.setattr(
        "kvpush.transfer.sidechannel.client.numeric_addresses",
        lambda host, timeout_s: ("not an address", "::1%nowhere"),
    )
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        assert failure(5600, timeout_s=1.0).code == "refused"
    assert len(os.listdir("/proc/self/fd")) <= files + 1


def test_a_connection_to_itself_is_nobody(monkeypatch) -> None:
    """What the kernel makes, now and then, of a free port of the range from which it chooses our own end's port."""

    class SamePort(socket.socket):
        def connect(self, address: tuple[str, int]) -> None:
            self.bind(address)
            super().connect(address)

    with socket.create_server((LOCAL, 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setattr("kvpush.transfer.sidechannel.connection.socket.socket", SamePort)
    error = failure(port, timeout_s=20.0)
    assert error.code == "refused"
    assert "itself" in str(error)


def test_who_waits_for_ranks_keeps_no_connection() -> None:
    with serving(ready=False) as server, ThreadPoolExecutor(4) as pool:
        files = len(os.listdir("/proc/self/fd"))
        waiting = [pool.submit(failure, server.port, timeout_s=1.2) for _ in range(4)]
        until(lambda: server.counters.not_ready >= 8)
        # Pauses are long by now: at some moment nobody asks.
        until(lambda: len(os.listdir("/proc/self/fd")) <= files + 1)
        assert {future.result(10).code for future in waiting} == {"not_ready"}
