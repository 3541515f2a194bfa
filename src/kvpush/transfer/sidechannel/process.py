"""Which process this is, and whether a process of this machine is gone for good.

A process is named by the machine and namespaces it lives in, its pid and its start time: pids are reused, the pair is
not. Everything here reads /proc and never blocks.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvpush.transfer.sidechannel.fields import Pid, Text, Ticks

# Of /proc/<pid>/stat, counted from the state (the third field) on: proc(5).
_STATE = 0
_START_TIME = 19
_DEAD_STATES = frozenset("ZXx")

MACHINE_VARIABLE = "KVPUSH_MACHINE_ID"
"""Names the machine, not the container; no two machines may have the same name at one time."""

_DECLARED = "@"  # stands before a name that was given by MACHINE_VARIABLE
_MAX_MACHINE_CHARACTERS = 128


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """One life of one process.

    host_id: see `host_id()`. pid: as seen inside that host_id. pid_start: start time in clock ticks since boot, 0 if
    it could not be read.
    """

    host_id: Text
    pid: Pid
    pid_start: Ticks


def host_id() -> str:
    """Names the space in which a pid means something: "boot id/pid namespace/time namespace/machine".

    The time namespace is part of it because it shifts start times; the machine because machines that were cloned from
    one running snapshot share their boot id. The machine is what MACHINE_VARIABLE says, else the host name. Two equal
    host ids mean that pids can be compared (the number of a namespace is given away again only when nothing is left of
    it); two different ones mean nothing (but see `rebooted`). Where /proc cannot be trusted (absent, or of another pid
    namespace) every call returns a new id, which equals no other: then nothing can be proven by pid. Raises ValueError
    if MACHINE_VARIABLE holds no name.
    """
    machine = _machine()
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            raise OSError("/proc belongs to another pid namespace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pid_namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return f"unknown/{uuid.uuid4()}"
    try:
        time_namespace = os.stat("/proc/self/ns/time").st_ino
    except OSError:  # kernels before 5.6 have none
        time_namespace = 0
    return f"{boot}/{pid_namespace}/{time_namespace}/{machine}"


def _machine() -> str:
    declared = os.environ.get(MACHINE_VARIABLE)
    if declared is None:
        return os.uname().nodename
    if not declared or len(declared) > _MAX_MACHINE_CHARACTERS or not declared.isprintable() or "/" in declared:
        raise ValueError(
            f"{MACHINE_VARIABLE} must be a name of 1 to {_MAX_MACHINE_CHARACTERS} letters without /, not {declared!r}"
        )
    return _DECLARED + declared


class Space(NamedTuple):
    """The parts of a host id."""

    boot: str
    pid_namespace: str
    time_namespace: str
    machine: str

    @classmethod
    def of(cls, host: str) -> Space | None:
        """None for the host id of a process that could not trust its /proc, and for what is none."""
        parts = host.split("/")
        return cls(*parts) if len(parts) == len(cls._fields) else None


def rebooted(host: str, now: str) -> bool:
    """Whether the machine of a host id has started anew since: then every process of that time is gone.

    now: a present host id, of whoever says so. True only if both name the machine by MACHINE_VARIABLE, with one name: a
    host name may be that of a container, which comes back on another machine.
    """
    before, after = Space.of(host), Space.of(now)
    if before is None or after is None or not before.machine.startswith(_DECLARED):
        return False
    return before.machine == after.machine and before.boot != after.boot


def current_process() -> ProcessIdentity:
    """The calling process. Not cached: a forked child is another process."""
    pid = os.getpid()
    try:
        start = start_of(pid)
    except (OSError, ValueError):
        start = 0  # never a proof, see process_gone
    return ProcessIdentity(host_id=host_id(), pid=pid, pid_start=start)


def process_gone(process: ProcessIdentity) -> bool:
    """True if this process certainly runs no more, so that no thread of it can write anywhere.

    False is no statement: it lives, is stopped (it would go on writing when continued), or cannot be seen from here.
    A process that is a zombie counts as gone once all its threads are: the first one may end before the others.
    """
    here = host_id()
    if process.host_id != here:
        return rebooted(process.host_id, here)
    if process.pid <= 0 or process.pid_start <= 0:
        return False
    try:
        # Asked first, because /proc hides other users' processes when mounted with hidepid; the kernel does not.
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    root = Path(f"/proc/{process.pid}")
    try:
        fields = _stat_fields(root / "stat")
        if int(fields[_START_TIME]) != process.pid_start:
            return True
        if fields[_STATE] not in _DEAD_STATES:
            return False
        return all(_stat_fields(task / "stat")[_STATE] in _DEAD_STATES for task in (root / "task").iterdir())
    except (OSError, ValueError, IndexError):
        # Ended between two reads, or hidden. The next call will tell.
        return False


def start_of(pid: int) -> int:
    """When a process that is seen here has started, in clock ticks since boot. Raises OSError or ValueError."""
    try:
        return int(_stat_fields(Path(f"/proc/{pid}/stat"))[_START_TIME])
    except IndexError:
        raise ValueError(f"/proc/{pid}/stat is malformed") from None


def _stat_fields(path: Path) -> list[str]:
    """The fields of a stat file from the state on. The name before it may contain blanks and brackets."""
    return path.read_text(errors="replace").rpartition(")")[2].split()
