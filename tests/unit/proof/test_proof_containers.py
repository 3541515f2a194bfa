"""Writers in other namespaces of this machine: what can be proven about them, and what cannot. Real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpush.transfer import sight as sight_module
from kvpush.transfer.proof import ProcessIdentity, WriterProof, current_process, process_gone
from kvpush.transfer.sidechannel import EngineInfo, SideChannelServer, host_id
from kvpush.transfer.sidechannel.process import MACHINE_VARIABLE, rebooted
from kvpush.transfer.sight import Sight

pytestmark = pytest.mark.unit

TELL_WHO = (
    "from kvpush.transfer.proof import current_process; p = current_process(); "
    "print(p.host_id, p.pid, p.pid_start, flush=True); import time; time.sleep(120)"
)
CONTAINER = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]


def until(what: Callable[[], bool], limit_s: float = 20.0) -> bool:
    limit = time.monotonic() + limit_s
    while not what():
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True


class Contained:
    """A writer that is the first process of a container: a pid namespace with a /proc of its own."""

    def __init__(self, *prefix: str, env: dict[str, str] | None = None) -> None:
        self.outer = subprocess.Popen(
            [*(prefix or CONTAINER), sys.executable, "-c", TELL_WHO],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})},
        )  # fmt: skip
        assert self.outer.stdout is not None
        line = self.outer.stdout.readline()
        if not line:
            assert self.outer.stderr is not None
            reason = self.outer.stderr.read().strip()
            self.end()
            pytest.skip(f"no such namespace can be made here: {reason}")
        host, pid, start = line.rsplit(maxsplit=2)
        self.identity = ProcessIdentity(host_id=host, pid=int(pid), pid_start=int(start))

    @property
    def pid(self) -> int:
        """Its number here, where it has a parent that has made the container."""
        children = Path(f"/proc/{self.outer.pid}/task/{self.outer.pid}/children").read_text().split()
        return int(children[0]) if children else self.outer.pid

    def kill(self) -> None:
        """The container is removed: its first process is killed, and all others in it by the kernel."""
        os.kill(self.pid, signal.SIGKILL)
        self.outer.wait(10)

    def end(self) -> None:
        self.outer.kill()
        self.outer.wait(10)
        for stream in (self.outer.stdout, self.outer.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def contained() -> Iterator[Contained]:
    made = Contained()
    yield made
    made.end()


def _ask_in_a_container(identity: ProcessIdentity) -> str:
    """What the container that replaces another one can tell of the old one's process."""
    ask = (
        "import sys; from kvpush.transfer.proof import ProcessIdentity, WriterProof; "
        "from kvpush.transfer.sight import Sight; s = Sight(); "
        "p = ProcessIdentity(host_id=sys.argv[1], pid=int(sys.argv[2]), pid_start=int(sys.argv[3])); "
        "print(s.see(p), s.gone(p), WriterProof(None, sight=s).gone(p, None))"
    )
    arguments = [identity.host_id, str(identity.pid), str(identity.pid_start)]
    done = subprocess.run(
        [*CONTAINER, sys.executable, "-c", ask, *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


# From outside


def test_a_writer_in_a_container_is_proven_gone_from_outside_if_it_was_seen_alive(contained: Contained) -> None:
    assert contained.identity.host_id != host_id()
    assert contained.identity.pid != contained.pid
    sight = Sight()
    proof = WriterProof(None, sight=sight)
    assert sight.see(contained.identity)
    assert sight.see(contained.identity)  # again: nothing new
    assert not proof.gone(contained.identity, None)
    os.kill(contained.pid, signal.SIGSTOP)
    for _ in range(20):
        assert not proof.gone(contained.identity, None)
        time.sleep(0.005)
    contained.kill()
    assert until(lambda: proof.gone(contained.identity, None))
    assert proof.gone(contained.identity, None)


def test_what_was_not_seen_alive_is_no_proof(contained: Contained) -> None:
    """Absence proves nothing: of a container beside ours nothing can be seen either."""
    sight = Sight()
    assert not sight.gone(contained.identity)
    contained.kill()
    assert not sight.see(contained.identity)
    assert not WriterProof(None, sight=sight).gone(contained.identity, None)


@pytest.mark.parametrize("field", ["pid", "pid_start", "boot", "pid namespace", "time namespace"])
def test_who_differs_in_anything_is_not_taken_for_the_writer(contained: Contained, field: str) -> None:
    me = contained.identity
    parts = dict(zip(("boot", "pid namespace", "time namespace", "machine"), me.host_id.split("/"), strict=True))
    numbers = {"pid": me.pid, "pid_start": me.pid_start}
    if field in parts:
        parts[field] = "7"
    else:
        numbers[field] += 1
    assert not Sight().see(ProcessIdentity(host_id="/".join(parts.values()), **numbers))


@pytest.mark.parametrize("host", ["", "unknown/1", "a/b/c/d/e", "elsewhere"])
def test_what_is_no_host_id_is_not_looked_for(host: str) -> None:
    assert not Sight().see(ProcessIdentity(host_id=host, pid=os.getpid(), pid_start=1))


def test_a_number_that_is_given_away_in_between_is_noticed(
    contained: Contained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between finding a process and holding on to it the number may have become another process's."""
    real, calls = sight_module._is, []

    def changed(entry: Path, process: ProcessIdentity, there: object) -> bool:
        found = real(entry, process, there)  # type: ignore[arg-type]
        calls.append(found)
        return found and calls.count(True) == 1

    monkeypatch.setattr(sight_module, "_is", changed)
    sight = Sight()
    assert not sight.see(contained.identity)
    assert calls.count(True) == 2
    contained.kill()
    assert not sight.gone(contained.identity)


def test_only_so_many_are_held_on_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sight_module, "MAX_SEEN", 2)
    sight, me = Sight(), current_process()
    monkeypatch.setattr(sight_module, "_pidfd_of", lambda process: os.open("/dev/null", os.O_RDONLY))
    before = len(os.listdir("/proc/self/fd"))
    for number in range(10):
        assert sight.see(ProcessIdentity(host_id=me.host_id, pid=number + 1, pid_start=1))
    assert len(os.listdir("/proc/self/fd")) == before + 2
    del sight
    assert len(os.listdir("/proc/self/fd")) == before


# From another container


def test_a_container_that_replaces_another_one_knows_nothing_of_it(contained: Contained) -> None:
    """Not while it lives. Afterwards nothing is promised: the kernel may give the number of its namespace to the new
    one, but only when nothing is left of it, so that what follows from equal numbers is true then."""
    assert _ask_in_a_container(contained.identity) == "False False False"
    os.kill(contained.pid, signal.SIGSTOP)
    assert _ask_in_a_container(contained.identity) == "False False False"
    contained.kill()
    assert _ask_in_a_container(contained.identity).startswith("False False ")


# With a name for the machine


def test_a_host_name_of_its_own_hides_a_process_unless_the_machine_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two containers that share the host's pid namespace, each with a host name of its own."""
    inside = ["unshare", "--user", "--map-root-user", "--uts", "sh", "-c", 'hostname replaced; exec "$@"', "sh"]
    for declared in (False, True):
        env = {MACHINE_VARIABLE: "node 7"} if declared else {}
        made = Contained(*inside, env=env)
        try:
            if declared:
                monkeypatch.setenv(MACHINE_VARIABLE, "node 7")
            assert (made.identity.host_id == host_id()) is declared
            assert not process_gone(made.identity)
            made.outer.kill()
            made.outer.wait(10)
            assert process_gone(made.identity) is declared
        finally:
            made.end()


@pytest.mark.parametrize("name", ["", "a/b", "x" * 129, "line\nbreak"])
def test_a_machine_name_that_is_none_is_refused_at_start_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MACHINE_VARIABLE, name)
    with pytest.raises(ValueError, match=MACHINE_VARIABLE):
        host_id()


def test_a_reboot_is_proof_only_for_a_machine_that_was_named() -> None:
    old = "boot-1/11/12/@node"
    assert rebooted(old, "boot-2/21/22/@node")
    assert not rebooted(old, "boot-1/21/22/@node")
    assert not rebooted(old, "boot-2/11/12/@other")
    assert not rebooted(old, "boot-2/11/12/node")
    assert not rebooted("boot-1/11/12/node", "boot-2/11/12/node")  # a container's name goes where the container goes
    assert not rebooted("unknown/1", "unknown/2")
    assert not rebooted("", old)


@contextlib.contextmanager
def _engine(monkeypatch: pytest.MonkeyPatch, machine: str) -> Iterator[int]:
    """The port of an engine that answers on a machine of this name."""
    monkeypatch.setenv(MACHINE_VARIABLE, machine)
    info = EngineInfo(
        engine_id="next", incarnation="i", mode="push", tp_size=1, pp_size=1, protocol_version=1, host_id=host_id(),
        fingerprint={},
    )  # fmt: skip
    server = SideChannelServer("127.0.0.1", 0, info, None)
    server.start()
    try:
        yield server.port
    finally:
        server.stop()


def test_the_engine_that_comes_back_after_a_reboot_proves_the_old_ones_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ProcessIdentity(host_id="an earlier boot/11/12/@node", pid=1, pid_start=1)
    proof = WriterProof(None, 20.0, here="another machine")
    with _engine(monkeypatch, "node") as port:
        assert proof.gone(writer, ("127.0.0.1", port))
        again = ProcessIdentity(host_id="an earlier boot/11/12/@elsewhere", pid=1, pid_start=1)
        assert not proof.gone(again, ("127.0.0.1", port))
    with _engine(monkeypatch, "elsewhere") as port:
        assert not proof.gone(writer, ("127.0.0.1", port))
