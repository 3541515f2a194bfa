"""The dialer against real side channels, and the prover against real processes."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvpush.plan.geometry import CacheGeometry
from kvpush.protocol.ids import AgentName, PeerAddress
from kvpush.transfer.addresses import AllowList
from kvpush.transfer.dialer import Dialed, SideChannelDialer
from kvpush.transfer.proof import WriterProof
from kvpush.transfer.prover import ProcessProver
from kvpush.transfer.sidechannel import (
    EngineInfo,
    HandshakeError,
    ProcessIdentity,
    RankInfo,
    SideChannelServer,
    current_process,
)

pytestmark = pytest.mark.unit

LOCAL = "127.0.0.1"
GEOMETRY = CacheGeometry((4096, 8192), 64, 64, 16, 16, 8, 1, 4)
HERE = AllowList(["127.0.0.1"])


def _engine(engine_id: str = "theirs", **changes: object) -> EngineInfo:
    fields: dict[str, object] = {
        "engine_id": engine_id,
        "incarnation": f"life of {engine_id}",
        "mode": "push",
        "tp_size": 1,
        "pp_size": 1,
        "protocol_version": 1,
        "host_id": current_process().host_id,
        "fingerprint": {"model": "m", "kv cache dtype": "bfloat16"},
    }
    return EngineInfo(**{**fields, **changes})  # type: ignore[arg-type]


def _rank(**changes: object) -> RankInfo:
    me = current_process()
    fields: dict[str, object] = {
        "pp_rank": 0,
        "tp_rank": 0,
        "agent": "their-agent",
        "metadata": b"metadata",
        "geometry": msgspec.msgpack.encode(GEOMETRY),
        "pid": me.pid,
        "pid_start": me.pid_start,
        "host_id": me.host_id,
    }
    return RankInfo(**{**fields, **changes})  # type: ignore[arg-type]


@contextlib.contextmanager
def _peer(engine: EngineInfo, rank: RankInfo | None = None, secret: bytes | None = None) -> Iterator[PeerAddress]:
    server = SideChannelServer(LOCAL, 0, engine, secret)
    server.start()
    try:
        tp, pp = engine.tp_size, engine.pp_size
        server.set_ranks(
            [
                msgspec.structs.replace(rank or _rank(), pp_rank=p, tp_rank=t, agent=f"their-agent-{p}-{t}")
                for p in range(pp)
                for t in range(tp)
            ]
        )
        yield PeerAddress(LOCAL, server.port)
    finally:
        server.stop()


@contextlib.contextmanager
def _dialer(mine: EngineInfo | None = None, **options: object) -> Iterator[SideChannelDialer]:
    settings: dict[str, object] = {"allowed": HERE, "secret": None, "timeout_s": 2.0, **options}
    dialer = SideChannelDialer(mine or _engine("mine"), **settings)  # type: ignore[arg-type]
    try:
        yield dialer
    finally:
        dialer.close()


def _ended(dialer: SideChannelDialer, count: int = 1, limit_s: float = 15.0) -> list[Dialed]:
    ended: list[Dialed] = []
    deadline_s = time.monotonic() + limit_s
    while len(ended) < count:
        assert time.monotonic() < deadline_s, f"{len(ended)} of {count} handshakes have ended"
        ended += dialer.take()
        time.sleep(0.005)
    return ended


def test_an_answer_holds_all_that_a_connection_needs() -> None:
    with _peer(_engine()) as address, _dialer() as dialer:
        start_s = time.monotonic()
        dialer.dial(address)
        assert time.monotonic() - start_s < 1
        [dialed] = _ended(dialer)
        assert (dialed.address, dialed.error) == (address, "")
        answer = dialed.answer
        assert answer is not None
        assert (answer.engine_id, answer.agent, answer.metadata) == ("theirs", "their-agent-0-0", b"metadata")
        assert answer.geometry == GEOMETRY
        assert answer.process == current_process()
        assert dialer.take() == []


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"fingerprint": {"model": "other", "kv cache dtype": "bfloat16"}}, "model: 'm' here, 'other' there"),
        ({"fingerprint": {"model": "m"}}, "kv cache dtype: 'bfloat16' here, missing there"),
        ({"mode": "pull"}, "mode: push here, pull there"),
        ({"protocol_version": 2}, "protocol version: 1 here, 2 there"),
        ({"tp_size": 2}, "tp_size: 1 here, 2 there"),
        ({"pp_size": 2}, "pp_size: 1 here, 2 there"),
        ({"engine_id": "mine", "incarnation": "other life"}, "both engines have the engine id mine"),
        ({"engine_id": "mine"}, "engine mine was pointed at itself"),
    ],
)
def test_an_engine_that_does_not_fit_is_refused_by_name(changes: dict[str, object], difference: str) -> None:
    with _peer(_engine(**changes)) as address, _dialer() as dialer:  # type: ignore[arg-type]
        dialer.dial(address)
        [dialed] = _ended(dialer)
        assert dialed.answer is None
        assert dialed.error.startswith(f"handshake refused: {address} does not fit:")
        assert difference in dialed.error


def test_a_size_that_fits_in_no_way_is_named_once() -> None:
    with _peer(_engine(tp_size=3)) as address, _dialer(_engine("mine", tp_size=2)) as dialer:
        dialer.dial(address)
        [dialed] = _ended(dialer)
        assert dialed.error.count("tp_size") == 2  # the rule, and what this version asks for


@pytest.mark.parametrize("geometry", [b"", b"\xc1", msgspec.msgpack.encode({"bases": []}), b"x" * 100])
def test_a_geometry_that_is_none_is_refused(geometry: bytes) -> None:
    with _peer(_engine(), _rank(geometry=geometry)) as address, _dialer() as dialer:
        dialer.dial(address)
        [dialed] = _ended(dialer)
        assert dialed.answer is None
        assert dialed.error.startswith("handshake malformed: ")


def test_an_address_that_is_not_allowed_is_not_even_asked() -> None:
    with socket.create_server((LOCAL, 0)) as listener, _dialer(allowed=AllowList(["10.0.0.0/8"])) as dialer:
        listener.settimeout(0.2)
        address = PeerAddress(LOCAL, listener.getsockname()[1])
        dialer.dial(address)
        [dialed] = _ended(dialer)
        assert dialed.answer is None
        assert dialed.error.startswith("handshake refused: ")
        assert LOCAL in dialed.error
        with pytest.raises(TimeoutError):
            listener.accept()


@pytest.mark.parametrize("host", ["", "\x00", "no such host.invalid", "x" * 300, "\udc80", "1.2.3.4.5"])
def test_a_host_that_is_none_is_an_answer_and_no_crash(host: str) -> None:
    with _dialer(allowed=AllowList(["10.0.0.0/8", "127.0.0.1"])) as dialer:
        dialer.dial(PeerAddress(host, 80))
        [dialed] = _ended(dialer)
        assert dialed.answer is None
        assert dialed.error.startswith("handshake ")


def test_nobody_at_the_address_is_said_so() -> None:
    with socket.create_server((LOCAL, 0)) as listener:
        port = listener.getsockname()[1]
    with _dialer(timeout_s=1.0) as dialer:
        dialer.dial(PeerAddress(LOCAL, port))
        [dialed] = _ended(dialer)
        assert dialed.error.split(":")[0] in ("handshake refused", "handshake timeout")


def test_a_secret_that_differs_is_refused() -> None:
    with _peer(_engine(), secret=b"their secret") as address, _dialer(secret=b"another one") as dialer:
        dialer.dial(address)
        [dialed] = _ended(dialer)
        assert dialed.error.startswith("handshake bad_mac")


def test_a_rank_that_is_not_there_is_said_so() -> None:
    with _peer(_engine()) as address, _dialer() as dialer:
        dialer.dial(PeerAddress(address.host, address.port, 0, 7))
        [dialed] = _ended(dialer)
        assert dialed.error.startswith("handshake unknown_rank")


def test_slow_peers_do_not_delay_another() -> None:
    """Eight addresses that accept and say nothing, and one that answers."""
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server((LOCAL, 0))) for _ in range(8)]
        address = stack.enter_context(_peer(_engine()))
        dialer = stack.enter_context(_dialer(timeout_s=3.0))
        for listener in silent:
            dialer.dial(PeerAddress(LOCAL, listener.getsockname()[1]))
        start_s = time.monotonic()
        dialer.dial(address)
        [first] = _ended(dialer)
        assert first.address == address
        assert time.monotonic() - start_s < 2.5


def test_the_address_that_was_checked_is_the_one_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that resolves to an allowed address first and to another one later must not lead there."""
    from kvpush.transfer import dialer as module

    answers = iter([(LOCAL,), ("169.254.169.254",)])
    allowed = AllowList(["127.0.0.0/8"], resolve=lambda host, timeout_s: next(answers))
    asked: list[object] = []

    def query(host: object, *args: object) -> None:
        asked.append(host)
        raise HandshakeError("refused", "nobody is there")

    monkeypatch.setattr(module, "query_peer", query)
    with _dialer(allowed=allowed) as dialer:
        dialer.dial(PeerAddress("peer.example", 80))
        _ended(dialer)
    assert asked == [LOCAL]


def test_a_defect_on_the_pool_comes_back_as_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpush.transfer import dialer as module

    def broken(*args: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(module, "query_peer", broken)
    with _dialer() as dialer:
        dialer.dial(PeerAddress(LOCAL, 1))
        [dialed] = _ended(dialer)
        assert dialed.error.startswith("handshake failed: KeyError")


def test_closing_does_not_wait_for_handshakes() -> None:
    with socket.create_server((LOCAL, 0)) as listener:
        dialer = SideChannelDialer(_engine("mine"), HERE, None, 1.0)
        dialer.dial(PeerAddress(LOCAL, listener.getsockname()[1]))
        start_s = time.monotonic()
        dialer.close()
        assert time.monotonic() - start_s < 0.5


# The prover


def _proven(prover: ProcessProver, limit_s: float = 10.0) -> list[AgentName]:
    """What a question that is open brings."""
    deadline_s = time.monotonic() + limit_s
    gone: list[AgentName] = []
    while prover._asked:
        assert time.monotonic() < deadline_s
        gone += prover.take()
        time.sleep(0.005)
    return gone


@contextlib.contextmanager
def _prover(allowed: AllowList = HERE, proof: WriterProof | None = None) -> Iterator[ProcessProver]:
    prover = ProcessProver(proof or WriterProof(None, 0.5), allowed)
    try:
        yield prover
    finally:
        prover.close()


def _process(pid: int) -> ProcessIdentity:
    start = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return ProcessIdentity(host_id=current_process().host_id, pid=pid, pid_start=start)


def test_only_a_process_that_has_ended_is_proven_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        writer = _process(child.pid)
        nowhere = PeerAddress(LOCAL, 1)
        with _prover() as prover:
            prover.ask(AgentName("a"), writer, nowhere)
            assert _proven(prover) == []
            child.kill()
            child.wait(5)
            prover.ask(AgentName("a"), writer, nowhere)
            assert _proven(prover) == ["a"]
    finally:
        child.kill()
        child.wait(5)


def test_a_local_proof_needs_no_address() -> None:
    """The address may be refused by now, or its name unknown: this machine's process table knows all the same."""
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    writer = _process(child.pid)
    child.wait(10)
    with _prover(AllowList(["10.0.0.0/8"])) as prover:
        prover.ask(AgentName("a"), writer, PeerAddress("no-such-host", 1))
        assert _proven(prover) == ["a"]


def test_a_writer_elsewhere_is_asked_for_at_its_address_if_that_is_allowed() -> None:
    asked: list[object] = []

    class Proof(WriterProof):
        def gone(self, writer: ProcessIdentity, side_channel: tuple[str, int] | None) -> bool:
            asked.append(side_channel)
            return side_channel is not None

    writer = ProcessIdentity(host_id="elsewhere", pid=1, pid_start=1)
    with _prover(proof=Proof(None)) as prover:
        prover.ask(AgentName("a"), writer, PeerAddress(LOCAL, 80))
        assert _proven(prover) == ["a"]
        prover.ask(AgentName("b"), writer, PeerAddress("10.0.0.1", 80))
        assert _proven(prover) == []
    assert asked == [None, (LOCAL, 80), None]


def test_one_question_at_a_time_and_a_defect_is_no_proof() -> None:
    class Proof(WriterProof):
        count = 0

        def gone(self, writer: ProcessIdentity, side_channel: tuple[str, int] | None) -> bool:
            Proof.count += 1
            time.sleep(0.1)
            raise KeyError("a defect")

    writer = ProcessIdentity(host_id="elsewhere", pid=1, pid_start=1)
    with _prover(proof=Proof(None)) as prover:
        for _ in range(5):
            prover.ask(AgentName("a"), writer, PeerAddress(LOCAL, 80))
        assert _proven(prover) == []
        assert Proof.count == 1
        prover.ask(AgentName("a"), writer, PeerAddress(LOCAL, 80))
        assert _proven(prover) == []
        assert Proof.count == 2
