"""Those who want a live server, or a client, to run out of something: memory, connections, file descriptors."""

import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sidechannel_cases import (
    LOCAL,
    SECRET,
    connect,
    query,
    question,
    rank,
    read_frame,
    resident_bytes,
    serving,
    still_answers,
    takes_at_most,
    until,
)

from kvpush.transfer.sidechannel import HandshakeError
from kvpush.transfer.sidechannel.envelope import MAGIC, VERSION, new_nonce, seal
from kvpush.transfer.sidechannel.responder import MAX_QUESTION_BYTES
from kvpush.transfer.sidechannel.service import MAX_SESSIONS

pytestmark = pytest.mark.unit

MIB = 1024 * 1024


@pytest.fixture
def many_files() -> Iterator[None]:
    """These tests hold both ends of their connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip(f"needs 4096 file descriptors, {hard} are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_a_thousand_connections_push_out_each_other_and_not_those_who_ask() -> None:
    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    with serving(ready=False) as server, contextlib.ExitStack() as stack:
        server.set_ranks([rank(metadata=bytes(4 * MIB - 100 * 1024)), rank(1, 0)])
        before, memory = files(), resident_bytes()
        reader = stack.enter_context(connect(server))
        reader.sendall(question())
        until(lambda: server.counters.answered == 1)
        half = question()[:-1]
        for number in range(1000):
            stranger = stack.enter_context(connect(server))
            if number % 2:
                stranger.sendall(half)
            if number % 100 == 99:
                still_answers(server)
        until(lambda: server.counters.evicted >= 1000 - MAX_SESSIONS)
        assert files() - before <= 1001 + MAX_SESSIONS + 1
        # Its answer was on its way all the time.
        answer = read_frame(reader)
        assert answer is not None
        assert len(answer) > 3 * MIB
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda _: query(server.port, 1, 0), range(64)))
        # Mostly what this side keeps of its connections, and the answer.
        assert resident_bytes() - memory < 24 * MIB
        assert server.counters.internal == 0


@pytest.mark.usefixtures("many_files")
def test_answers_that_nobody_reads_cost_nothing_and_nobody(monkeypatch) -> None:
    monkeypatch.setattr("kvpush.transfer.sidechannel.session.ANSWER_S", 1.0)
    readers = 2 * MAX_SESSIONS
    with serving(ready=False) as server, contextlib.ExitStack() as stack:
        server.set_ranks([rank(metadata=bytes(3 * MIB)), rank(1, 0)])
        still_answers(server)
        before = resident_bytes()
        greedy = [stack.enter_context(connect(server)) for _ in range(readers)]
        for stranger in greedy:
            with contextlib.suppress(ConnectionError):  # pushed out already
                stranger.sendall(question() * 16)
        with takes_at_most(3.0):
            still_answers(server)
        # Copies would be hundreds of MiB.
        assert resident_bytes() - before < 16 * MIB
        until(lambda: server.counters.unread + server.counters.silent >= readers)
        assert server.counters.unread > MAX_SESSIONS // 2
        still_answers(server)


STREAMS = {
    "rubbish": b"\xff" * MIB,
    "frames that are longer than allowed": MAGIC + bytes([VERSION]) + b"\xff" * 4 + bytes(MIB),
    "a frame that does not end": MAGIC + bytes([VERSION]) + (MAX_QUESTION_BYTES - 9).to_bytes(4, "big") + bytes(MIB),
    "questions": question() * (MIB // len(question())),
    "questions of another version": MAGIC + b"\x07" + bytes(MIB),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_a_hundred_megabytes_leave_nothing(kind) -> None:
    """Counted as sent: what the kernel has taken, which is more than the server reads."""
    with serving() as server:
        still_answers(server)
        before, most, sent = resident_bytes(), 0, 0
        while sent < 100 * MIB:
            with connect(server) as stranger, contextlib.suppress(ConnectionError):
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 128 * 1024)
                while sent < 100 * MIB:
                    sent += stranger.send(STREAMS[kind])
            most = max(most, resident_bytes())
        assert most - before < 8 * MIB
        still_answers(server)
        assert server.counters.internal == 0


def test_a_peer_without_the_secret_gets_no_memory_either() -> None:
    with serving(SECRET) as server:
        still_answers(server, SECRET)
        before = resident_bytes()
        forged = seal("query", new_nonce(), bytes(4096), b"not the secret")
        for _ in range(200):
            with connect(server) as stranger, contextlib.suppress(ConnectionError):
                stranger.sendall(forged * 16)
        assert resident_bytes() - before < 8 * MIB
        still_answers(server, SECRET)


def test_without_file_descriptors_it_waits_and_does_not_spin() -> None:
    """In a process of its own, whose limit can be low."""
    code = """
import os, resource, sys, time
from kvpush.transfer.sidechannel import EngineInfo, SideChannelServer
engine = EngineInfo(engine_id="few", incarnation="1", mode="push", tp_size=1, pp_size=1, protocol_version=1,
                    host_id="h", fingerprint={})
server = SideChannelServer("127.0.0.1", 0, engine, None)
server.start()
used = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 4, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
print(server.port, flush=True)
sys.stdin.readline()
start = time.process_time()
time.sleep(0.7)
print(time.process_time() - start, flush=True)
sys.stdin.readline()
server.stop()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with contextlib.ExitStack() as stack:
            for _ in range(40):
                stack.enter_context(socket.create_connection((LOCAL, port), timeout=10))
            process.stdin.write("\n")
            process.stdin.flush()
            assert float(process.stdout.readline()) < 0.3
        # The strangers are gone; those who come now are served, and the backlog was not lost.
        with socket.create_connection((LOCAL, port), timeout=20) as late:
            late.sendall(question())
            assert read_frame(late)
        _, errors = process.communicate("\n", timeout=20)
        assert process.returncode == 0
        assert "cannot accept a connection (logged once)" in errors
        assert errors.count("cannot accept") == 1
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.parametrize("size", [MIB, 4 * MIB + 1000])
def test_a_client_is_not_filled_either(size) -> None:
    """An endless stream of answers to another question, each of them allowed or one byte too long."""
    frame = seal("answer", bytes(16), bytes(size), None)
    listener = socket.create_server((LOCAL, 0))
    sent = [0]

    def flood() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client, contextlib.suppress(OSError):
                    while True:
                        client.sendall(frame)
                        sent[0] += len(frame)

    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    before = resident_bytes()
    try:
        for _ in range(2):
            with pytest.raises(HandshakeError, match="timeout" if size == MIB else "malformed"):
                query(listener.getsockname()[1], timeout_s=0.5)
        assert resident_bytes() - before < 24 * MIB
        assert size > MIB or sent[0] > 20 * MIB
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)
        assert not thread.is_alive()
