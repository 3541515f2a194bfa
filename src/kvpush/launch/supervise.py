"""Runs one command and sees to it that nothing of it outlives the process that asked for it.

    python supervise.py FD -- COMMAND...

FD is one end of a socket pair; the asking process holds the other. This script is the parent of the command and the
adoptive parent (PR_SET_CHILD_SUBREAPER) of everything that the command leaves behind. It ends the whole tree when told
to, when the other end of the socket closes (which the kernel does even for a process that was killed), when its own
parent changes, or when the command ends. SIGTERM goes first; what is left after the grace time is killed.

It says `pid N` once the command runs, `exit CODE` when that has ended (negative: by that signal), and `error TEXT` if
it could not be started. It understands `stop SECONDS`. It runs alone, by path: standard library only, no import of
kvpush.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# Grace for a tree whose owner is gone or whose main process has died: nobody waits for a clean end any more.
ORPHAN_GRACE_S = 3.0
# After SIGKILL; a process in an uninterruptible call may stay longer, and nothing can be done about it.
KILL_WAIT_S = 10.0
POLL_S = 0.2

_libc = ctypes.CDLL(None, use_errno=True)


def descendants(root: int) -> list[int]:
    """Process ids below `root` that still run (zombies are left out)."""
    children: dict[int, list[int]] = {}
    states: dict[int, str] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The command in parentheses may itself hold spaces and parentheses.
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        children.setdefault(int(parent), []).append(int(name))
        states[int(name)] = state.decode()
    found: list[int] = []
    queue = [root]
    while queue:
        for child in children.get(queue.pop(), []):
            queue.append(child)
            if states[child] not in "ZX":
                found.append(child)
    return found


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


class Supervisor:
    """One command, its tree, and the socket to the owner."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.parent = os.getppid()
        self.main = 0
        self.popen: subprocess.Popen[bytes] | None = None
        self.exit_code: int | None = None
        self.grace_s = ORPHAN_GRACE_S
        self.stopping = False

    def say(self, line: str) -> None:
        try:
            self.control.sendall(line.encode() + b"\n")
        except OSError:
            pass  # the owner is gone, and the socket says so when it is read

    def start(self, command: list[str]) -> bool:
        def die_with_the_supervisor() -> None:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

        try:
            # Its own session: a Ctrl-C in the owner's terminal must not reach it before the owner has decided. The
            # object is kept, because it would collect the exit code that `reap` is waiting for when it is deleted.
            self.popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_the_supervisor
            )
            self.main = self.popen.pid
        except OSError as error:
            self.say(f"error {command[0]}: {error.strerror or error}")
            return False
        self.say(f"pid {self.main}")
        return True

    def reap(self) -> None:
        """Collects the main process's exit code, and the orphans that became our children."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.main and self.exit_code is None:
                self.exit_code = os.waitstatus_to_exitcode(status)
                self.say(f"exit {self.exit_code}")

    def listen(self) -> None:
        """Waits a moment for an order; a closed socket or a new parent is one, too."""
        ready, _, _ = select.select([self.control], [], [], POLL_S)
        if ready:
            try:
                order = self.control.recv(4096).decode(errors="replace").split()
            except OSError:
                order = []
            self.stopping = True
            if len(order) >= 2 and order[-2] == "stop":
                self.grace_s = float(order[-1])
        elif os.getppid() != self.parent:
            self.stopping = True

    def end_tree(self) -> None:
        """SIGTERM to every descendant, wherever it has moved; after the grace time SIGKILL until there is none.

        Once the main process has ended, nobody is left to tell the others to end, so they get little time.
        """
        signal_all(descendants(os.getpid()), signal.SIGTERM)
        deadline_s = time.monotonic() + self.grace_s
        main_ended = False
        while time.monotonic() < deadline_s:
            self.reap()
            if not descendants(os.getpid()):
                return
            if self.exit_code is not None and not main_ended:
                main_ended = True
                deadline_s = min(deadline_s, time.monotonic() + ORPHAN_GRACE_S)
            time.sleep(0.02)
        deadline_s = time.monotonic() + KILL_WAIT_S
        while time.monotonic() < deadline_s:
            self.reap()
            left = descendants(os.getpid())
            if not left:
                return
            signal_all(left, signal.SIGKILL)
            time.sleep(0.02)

    def run(self, command: list[str]) -> int:
        if not self.start(command):
            return 127
        while self.exit_code is None and not self.stopping:
            self.listen()
            self.reap()
        self.end_tree()
        self.reap()
        code = self.exit_code
        return 1 if code is None else code if code >= 0 else 128 - code


def main() -> int:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    if sys.argv[2] != "--" or len(sys.argv) < 4:
        print("usage: supervise.py FD -- COMMAND...", file=sys.stderr)
        return 2
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    supervisor = Supervisor(control)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def stop(_number: int, _frame: object) -> None:
        supervisor.stopping = True

    signal.signal(signal.SIGTERM, stop)
    return supervisor.run(sys.argv[3:])


if __name__ == "__main__":
    sys.exit(main())
