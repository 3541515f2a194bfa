"""A writer of another machine: what its side channel may and may not prove."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from kvpush.transfer.proof import ProcessIdentity, WriterProof, current_process
from kvpush.transfer.sidechannel import EngineInfo, SideChannelServer, host_id

pytestmark = pytest.mark.unit

LOCAL = "127.0.0.1"
SECRET = b"one secret for both sides"
# The observer believes to be on another machine, so that it must ask.
ELSEWHERE = "another machine"


@contextlib.contextmanager
def engine_at(
    port: int, incarnation: str, secret: bytes | None = None, host: str | None = None
) -> Iterator[SideChannelServer]:
    info = EngineInfo(
        engine_id=f"engine of {incarnation}",
        incarnation=incarnation,
        mode="push",
        tp_size=1,
        pp_size=1,
        protocol_version=1,
        host_id=host_id() if host is None else host,
        fingerprint={},
    )
    server = SideChannelServer(LOCAL, port, info, secret)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def gone(writer: ProcessIdentity, port: int, secret: bytes | None = None, timeout_s: float = 20.0) -> bool:
    start = time.monotonic()
    result = WriterProof(secret, timeout_s, here=ELSEWHERE).gone(writer, (LOCAL, port))
    # That the deadline is kept closely is tested where the questions are asked; here, that it is passed on.
    assert time.monotonic() - start <= timeout_s + 5.0
    return result


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[str], ProcessIdentity]]:
    tell = "from kvpush.transfer.proof import current_process as c; p = c(); print(p.pid, p.pid_start, flush=True); "
    started = subprocess.Popen(
        [sys.executable, "-c", tell + "import time; time.sleep(120)"], stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    pid, start = started.stdout.readline().split()
    yield started, ProcessIdentity(host_id=host_id(), pid=int(pid), pid_start=int(start))
    started.kill()
    started.wait(10)
    started.stdout.close()


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_restarted_engine_proves_that_the_old_writer_is_gone(child, secret) -> None:
    process, writer = child
    with engine_at(0, "life-1", secret) as first:
        port = first.port
        assert not gone(writer, port, secret)
    process.kill()
    process.wait(10)
    assert not gone(writer, port, secret), "a refused connection is no proof"
    with engine_at(port, "life-2", secret):
        assert gone(writer, port, secret)


def test_a_restarted_engine_proves_nothing_about_a_writer_that_outlived_the_old_one(child) -> None:
    process, writer = child
    process.send_signal(signal.SIGSTOP)
    with engine_at(0, "life-2") as second:
        assert not gone(writer, second.port)
        process.send_signal(signal.SIGCONT)
        assert not gone(writer, second.port)
        process.kill()
        process.wait(10)
        assert gone(writer, second.port)


def test_a_living_engine_proves_that_its_own_worker_is_gone(child) -> None:
    process, writer = child
    with engine_at(0, "life-1") as same:
        assert not gone(writer, same.port)
        process.kill()
        process.wait(10)
        assert gone(writer, same.port)


def test_an_engine_that_came_back_on_another_machine_proves_nothing(child) -> None:
    process, writer = child
    process.kill()
    process.wait(10)
    with engine_at(0, "life-2", host="a third machine") as moved:
        assert not gone(writer, moved.port)


def test_an_engine_cannot_speak_for_a_machine_that_it_does_not_run_on(child) -> None:
    process, writer = child
    process.kill()
    process.wait(10)
    claimed = ProcessIdentity(host_id="a third machine", pid=writer.pid, pid_start=writer.pid_start)
    with engine_at(0, "life-2", host="a third machine") as liar:
        assert not gone(claimed, liar.port)


@pytest.mark.parametrize(("theirs", "mine"), [(SECRET, None), (None, SECRET), (SECRET, b"another secret")])
def test_an_answer_that_is_not_authentic_proves_nothing(child, theirs, mine) -> None:
    process, writer = child
    process.kill()
    process.wait(10)
    with engine_at(0, "life-2", theirs) as other:
        assert not gone(writer, other.port, mine)
        assert gone(writer, other.port, theirs)


def test_silence_proves_nothing(child) -> None:
    process, writer = child
    process.kill()
    process.wait(10)
    with socket.create_server((LOCAL, 0)) as silent:
        assert not gone(writer, silent.getsockname()[1], timeout_s=0.4)
    assert not WriterProof(None, here=ELSEWHERE).gone(writer, None)


@pytest.mark.parametrize("address", [(LOCAL, 0), (LOCAL, 70000), ("no-such-host.invalid", 5600), ("", 5600)])
def test_an_address_that_is_none_proves_nothing(address) -> None:
    assert not WriterProof(None, 3.0, here=ELSEWHERE).gone(current_process(), address)


def test_on_this_machine_nobody_is_asked(child) -> None:
    process, writer = child
    process.kill()
    process.wait(10)
    start = time.monotonic()
    assert WriterProof(None, timeout_s=30.0).gone(writer, (LOCAL, 1))
    assert time.monotonic() - start < 15.0
