"""A process of this machine is gone, or it is not: real processes, real signals."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpush.transfer.proof import ProcessIdentity, WriterProof, current_process, process_gone
from kvpush.transfer.sidechannel import host_id, process

pytestmark = pytest.mark.unit

TELL_WHO = (
    "from kvpush.transfer.proof import current_process; p = current_process(); "
    "print(p.host_id, p.pid, p.pid_start, flush=True); "
)


def until(what: Callable[[], bool], limit_s: float = 10.0) -> bool:
    limit = time.monotonic() + limit_s
    while not what():
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True


class Writer:
    """A child process that says who it is and then runs until it is killed."""

    def __init__(self, then: str = "import time; time.sleep(120)") -> None:
        self.child = subprocess.Popen([sys.executable, "-c", TELL_WHO + then], stdout=subprocess.PIPE, text=True)
        assert self.child.stdout is not None
        host, pid, start = self.child.stdout.readline().split()
        self.identity = ProcessIdentity(host_id=host, pid=int(pid), pid_start=int(start))

    @property
    def state(self) -> str:
        return Path(f"/proc/{self.child.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def gone(self) -> bool:
        return WriterProof(None).gone(self.identity, None)

    def end(self) -> None:
        self.child.kill()
        self.child.wait(10)
        assert self.child.stdout is not None
        self.child.stdout.close()


@pytest.fixture
def writer() -> Iterator[Writer]:
    made = Writer()
    yield made
    made.end()


def test_this_process_is_itself_and_not_gone() -> None:
    me = current_process()
    assert me.pid == os.getpid()
    assert me == current_process()
    assert not process_gone(me)
    # Start times are in clock ticks since boot: this process started before now, and not long ago.
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    assert 0 <= uptime_s - me.pid_start / os.sysconf("SC_CLK_TCK") < 3600


def test_a_child_tells_the_same_host_and_another_process(writer) -> None:
    assert writer.identity.host_id == host_id()
    assert writer.identity.pid == writer.child.pid
    assert writer.identity.pid != os.getpid()


def test_killed_is_gone_reaped_or_not(writer) -> None:
    assert not writer.gone()
    writer.child.send_signal(signal.SIGKILL)
    assert until(lambda: writer.state == "Z")
    assert until(writer.gone)
    writer.child.wait(10)
    assert writer.gone()


def test_ended_by_itself_is_gone() -> None:
    made = Writer(then="pass")
    try:
        assert until(made.gone)
    finally:
        made.end()


def test_stopped_is_not_gone_and_continued_neither(writer) -> None:
    writer.child.send_signal(signal.SIGSTOP)
    assert until(lambda: writer.state == "T")
    for _ in range(20):
        assert not writer.gone()
        time.sleep(0.01)
    writer.child.send_signal(signal.SIGCONT)
    assert until(lambda: writer.state != "T")
    assert not writer.gone()
    # A stopped process that is killed ends without being continued.
    writer.child.send_signal(signal.SIGSTOP)
    assert until(lambda: writer.state == "T")
    writer.child.kill()
    assert until(writer.gone)


def test_a_reused_pid_is_another_process(writer) -> None:
    for other_start in (writer.identity.pid_start - 1, writer.identity.pid_start + 1):
        earlier = ProcessIdentity(host_id=host_id(), pid=writer.identity.pid, pid_start=other_start)
        assert WriterProof(None).gone(earlier, None)
    assert not writer.gone()


def test_a_process_whose_first_thread_has_ended_is_not_gone() -> None:
    # The first thread ends alone (pthread_exit): /proc then shows a zombie, while another thread still runs.
    made = Writer(
        then="import threading, time, ctypes; threading.Thread(target=time.sleep, args=(120,)).start(); "
        "time.sleep(0.2); ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[__import__('os').uname().machine], 0)"
    )
    try:
        assert until(lambda: made.state == "Z")
        assert len(os.listdir(f"/proc/{made.child.pid}/task")) == 2
        assert not made.gone()
        made.child.kill()
        assert until(made.gone)
    finally:
        made.end()


def test_another_name_in_proc_does_not_confuse(tmp_path) -> None:
    # comm may hold anything, also what looks like the fields behind it.
    made = Writer(
        then="open('/proc/self/comm', 'w').write('a) Z 1 (b'); import time; print(1, flush=True); time.sleep(120)"
    )
    try:
        assert made.child.stdout is not None
        made.child.stdout.readline()
        assert "a) Z 1 (b" in Path(f"/proc/{made.child.pid}/comm").read_text()
        assert not made.gone()
    finally:
        made.end()
    assert made.gone()


@pytest.mark.parametrize(
    "changes", [{"host_id": "elsewhere"}, {"host_id": ""}, {"pid_start": 0}, {"pid": 0}, {"pid": -1}]
)
def test_what_does_not_name_a_process_of_this_machine_is_no_proof(writer, changes) -> None:
    writer.end()
    me = writer.identity
    fields = {"host_id": me.host_id, "pid": me.pid, "pid_start": me.pid_start}
    assert process_gone(ProcessIdentity(**fields))
    assert not process_gone(ProcessIdentity(**{**fields, **changes}))


def test_a_process_that_is_hidden_is_not_gone(writer, monkeypatch) -> None:
    # As with hidepid: the kernel knows the pid, /proc does not show it.
    real = process._stat_fields

    def hidden(path: Path) -> list[str]:
        if str(writer.child.pid) in path.parts:
            raise FileNotFoundError(path)
        return real(path)

    monkeypatch.setattr(process, "_stat_fields", hidden)
    assert not writer.gone()
    writer.end()
    assert writer.gone()


def test_a_process_of_somebody_else_is_not_gone(monkeypatch) -> None:
    first = ProcessIdentity(host_id=host_id(), pid=1, pid_start=int(process._stat_fields(Path("/proc/1/stat"))[19]))

    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(process.os, "kill", refuse)
    assert not process_gone(first)


def test_where_proc_cannot_be_trusted_nothing_can_be_proven(writer, monkeypatch) -> None:
    writer.end()
    assert writer.gone()
    monkeypatch.setattr(process.os, "readlink", lambda path: "999999")  # a /proc of another pid namespace
    assert host_id() != host_id()
    assert not process_gone(writer.identity)
    assert not process_gone(current_process())


def test_the_host_id_differs_between_pid_namespaces() -> None:
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", sys.executable, "-c"]
    child = subprocess.run(
        [*command, "from kvpush.transfer.sidechannel import host_id; print(host_id())"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    if child.returncode:
        pytest.skip(f"no new pid namespace here: {child.stderr.strip()}")
    there = child.stdout.strip()
    assert there.split("/")[0] == host_id().split("/")[0]
    assert there != host_id()
    assert not there.startswith("unknown/")
