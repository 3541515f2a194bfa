"""Which process this is, and whether a process of this machine is gone for good.

A process is named by the machine and namespaces it lives in, its pid and its start time: pids are reused, the pair is
not. Everything here reads /proc and never blocks.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import msgspec

from kvpush.transfer.sidechannel.fields import Pid, Text, Ticks

# Of /proc/<pid>/stat, counted from the state (the third field) on: proc(5).
_STATE = 0
_START_TIME = 19
_DEAD_STATES = frozenset("ZXx")


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """One life of one process.

    host_id: see `host_id()`. pid: as seen inside that host_id. pid_start: start time in clock ticks since boot, 0 if
    it could not be read.
    """

    host_id: Text
    pid: Pid
    pid_start: Ticks


def host_id() -> str:
    """Names the space in which a pid means something: "boot id/pid namespace/time namespace/host name".

    The time namespace is part of it because it shifts start times; the host name because machines that were cloned from
    one running snapshot share their boot id. Two equal host ids mean that pids can be compared; two different ones
    mean nothing. Where /proc cannot be trusted (absent, or of another pid namespace) every call returns a new id,
    which equals no other: then nothing can be proven by pid.
    """
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
    return f"{boot}/{pid_namespace}/{time_namespace}/{os.uname().nodename}"


def current_process() -> ProcessIdentity:
    """The calling process. Not cached: a forked child is another process."""
    pid = os.getpid()
    try:
        start = int(_stat_fields(Path(f"/proc/{pid}/stat"))[_START_TIME])
    except (OSError, ValueError, IndexError):
        start = 0  # never a proof, see process_gone
    return ProcessIdentity(host_id=host_id(), pid=pid, pid_start=start)


def process_gone(process: ProcessIdentity) -> bool:
    """True if this process certainly runs no more, so that no thread of it can write anywhere.

    False is no statement: it lives, is stopped (it would go on writing when continued), or cannot be seen from here.
    A process that is a zombie counts as gone once all its threads are: the first one may end before the others.
    """
    if process.pid <= 0 or process.pid_start <= 0 or process.host_id != host_id():
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


def _stat_fields(path: Path) -> list[str]:
    """The fields of a stat file from the state on. The name before it may contain blanks and brackets."""
    return path.read_text(errors="replace").rpartition(")")[2].split()
