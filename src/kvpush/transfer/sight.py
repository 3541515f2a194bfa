"""Writers in containers of this machine, as this process sees them.

A process in another pid namespace has another number there than here, and once it is gone nothing tells which one it
was. So it is looked for while it lives, at the handshake, and held on to by a file descriptor of the kernel (pidfd).
Only namespaces below our own can be seen: from one container nothing of another one is.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import OrderedDict
from pathlib import Path

from kvpush.transfer.sidechannel import ProcessIdentity, Space, host_id, start_of

_log = logging.getLogger(__name__)

MAX_SEEN = 1024
"""Processes that are held on to; each costs a file descriptor."""


class Sight:
    """Thread-safe; nothing here waits for anybody, but `see` reads all of /proc."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: OrderedDict[ProcessIdentity, int] = OrderedDict()

    def __del__(self) -> None:
        while self._seen:
            os.close(self._seen.popitem()[1])

    def see(self, process: ProcessIdentity) -> bool:
        """Looks for a process that lives; True if it was found, so that `gone` can tell of it later."""
        with self._lock:
            if process in self._seen:
                return True
        found = _pidfd_of(process)
        if found is None:
            return False
        with self._lock:
            if process in self._seen:
                os.close(found)
                return True
            self._seen[process] = found
            if len(self._seen) > MAX_SEEN:
                os.close(self._seen.popitem(last=False)[1])
        return True

    def gone(self, process: ProcessIdentity) -> bool:
        """True if a process that was seen has ended, with all its threads. False is no statement."""
        with self._lock:
            pidfd = self._seen.get(process)
            if pidfd is None:
                return False
            self._seen.move_to_end(process)  # who is asked for is needed
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            return bool(poll.poll(0))


def _pidfd_of(process: ProcessIdentity) -> int | None:
    """A pidfd of a process of this kernel; None if it cannot be seen, or may be another one."""
    there, here = Space.of(process.host_id), Space.of(host_id())
    if there is None or here is None or process.pid_start <= 0:
        return None
    if (there.boot, there.time_namespace) != (here.boot, here.time_namespace):
        return None  # another kernel, or start times that cannot be compared
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and _is(entry, process, there):
            return _open(entry, process, there)
    return None


def _open(entry: Path, process: ProcessIdentity, there: Space) -> int | None:
    try:
        pidfd = os.pidfd_open(int(entry.name))
    except OSError as error:
        _log.debug("process %s cannot be held on to: %s", entry.name, error)
        return None
    if _is(entry, process, there):  # still: the number was not given to another one meanwhile
        return pidfd
    os.close(pidfd)
    return None


def _is(entry: Path, process: ProcessIdentity, there: Space) -> bool:
    """Whether a process that we see is the one that is known by another number in its own namespace."""
    try:
        status = (entry / "status").read_text(errors="replace")
        numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
        return (
            int(numbers[-1]) == process.pid
            and start_of(int(entry.name)) == process.pid_start
            and str((entry / "ns" / "pid").stat().st_ino) == there.pid_namespace
        )
    except (OSError, ValueError, StopIteration, IndexError):
        return False  # ended meanwhile, or it belongs to somebody whose processes we may not look into
