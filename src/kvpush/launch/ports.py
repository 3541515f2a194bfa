"""Ports for the servers that we start.

A port that was free a moment ago can be taken when the server binds it half a minute later. So ports are chosen outside
the range from which the kernel takes ports for outgoing connections, and each is locked against other kvpush processes
of this user until this process ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

from kvpush.launch.errors import LaunchError

LOCALHOST = "127.0.0.1"
LOWEST = 20000
TRIES = 500
# The code of that state in /proc/net/tcp.
TIME_WAIT = "06"

# Port -> the open lock file; the lock lives as long as this process.
_locks: dict[int, int] = {}


def free_port(host: str = LOCALHOST) -> int:
    """A TCP port that nobody listens on, and that no other call here returns while this process lives.

    Raises LaunchError if none is found.
    """
    low, high = _outside_the_ephemeral_range()
    chooser = random.SystemRandom()
    for _ in range(TRIES):
        port = chooser.randint(low, high)
        if port not in _locks and is_free(port, host) and _lock(port):
            return port
    raise LaunchError(f"no free port between {low} and {high}", "end some servers and try again")


def is_free(port: int, host: str = LOCALHOST) -> bool:
    """Whether nobody has bound it. Raises LaunchError if this machine has no such address.

    vLLM binds with SO_REUSEADDR, and with SO_REUSEPORT in some set-ups, long before it listens; two engines can then
    hold one port without a word. So the question is asked without these options.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise LaunchError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
            return _only_lingers(port)
    return True


def require_free(port: int, option: str, host: str = LOCALHOST) -> None:
    """Raises LaunchError, naming the option that changes it, if the port is impossible or taken."""
    if not 1 <= port <= 65535:
        raise LaunchError(f"{option} is {port}", "a port is a number from 1 to 65535")
    if not is_free(port, host):
        raise LaunchError(f"port {port} is in use on this machine", f"choose another with {option}")


def _only_lingers(port: int) -> bool:
    """Whether all that is left of a port are closed connections in TIME_WAIT, which do not hinder a server."""
    states = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        rows = [line.split() for line in lines]
        states |= {row[3] for row in rows if int(row[1].rpartition(":")[2], 16) == port}
    return states == {TIME_WAIT}  # a socket that is bound and does not listen yet is in no table


def _outside_the_ephemeral_range() -> tuple[int, int]:
    try:
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        first, last = 32768, 60999
    if first - LOWEST >= 1000:
        return LOWEST, first - 1
    if 65535 - last >= 1000:
        return last + 1, 65535
    return LOWEST, 65535  # the kernel may take all of them; a lock still keeps us apart from ourselves


def _lock(port: int) -> bool:
    folder = Path(tempfile.gettempdir()) / f"kvpush-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(folder / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return False
    _locks[port] = fd
    return True
