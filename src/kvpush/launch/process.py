"""One program that never outlives us: started through a supervisor that ends its whole tree when this process ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvpush.launch.errors import LaunchError
from kvpush.launch.supervise import descendants, signal_all

SUPERVISOR = Path(__file__).with_name("supervise.py")
START_TIMEOUT_S = 20.0
STOP_GRACE_S = 15.0
# What the supervisor needs beyond the grace time: kill, reap, exit.
SUPERVISOR_MARGIN_S = 15.0


class Process:
    """A running program, its process tree, and its log file.

    name: what messages call it. pid: of the program itself (not of its supervisor), which leads a process group.
    log_path: gets its stdout and stderr; an existing file is replaced.

    Raises LaunchError if the program cannot be executed. The tree ends with `stop`, with this process (however that
    ends, SIGKILL included), and when the program itself ends: children that it leaves behind are killed.
    """

    def __init__(self, name: str, argv: Sequence[str], log_path: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.argv = list(argv)
        self.log_path = log_path
        self.pid = 0
        self._exit_code: int | None = None
        self._received = b""
        self._stop_deadline_s: float | None = None
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._control, theirs = socket.socketpair()
        with theirs, log_path.open("wb") as log:
            # -I and -S: the supervisor needs nothing but the standard library, and nothing may get in its way.
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SUPERVISOR), str(theirs.fileno()), "--", *self.argv],
                env=None if env is None else dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._control.setblocking(False)
        self._wait_for_pid()

    @property
    def exit_code(self) -> int | None:
        """None while the program runs; otherwise its exit status, negative for a signal."""
        if self._exit_code is None:
            self._listen()
        if self._exit_code is None and self._supervisor.poll() is not None:
            self._listen()  # its last words may have come in between
            if self._exit_code is None:
                # The supervisor was killed; the kernel has killed the program with it, but not the program's children.
                self._kill_group()
                self._exit_code = -signal.SIGKILL
        return self._exit_code

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    def ask_to_stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Begins the end: SIGTERM now, SIGKILL to what is left after grace_s. Does not wait."""
        if self._stop_deadline_s is None:
            self._stop_deadline_s = time.monotonic() + grace_s + SUPERVISOR_MARGIN_S
            try:
                self._control.send(f"stop {grace_s:.3f}\n".encode())
            except OSError:
                pass  # it has ended

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Ends the program and everything that it started. Returns when all of it is gone. Idempotent."""
        self.ask_to_stop(grace_s)
        assert self._stop_deadline_s is not None
        try:
            self._supervisor.wait(timeout=max(0.1, self._stop_deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        _ = self.exit_code  # takes the last words, or kills what a killed supervisor has left
        self._control.close()

    def kill(self) -> None:
        """SIGKILL to the program itself, as the kernel's out-of-memory killer would do it."""
        if self.alive:
            os.kill(self.pid, signal.SIGKILL)

    def tree(self) -> list[int]:
        """Process ids of the program and of everything that it has started and that still runs."""
        return descendants(self._supervisor.pid)

    def signal_tree(self, number: int) -> None:
        """Sends a signal to all of them: SIGKILL as if the machine lost power, SIGSTOP and SIGCONT as if it slept."""
        signal_all(self.tree(), number)

    def log_tail(self, limit_bytes: int = 1 << 20) -> str:
        """The end of the log; empty if there is none."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, self.log_path.stat().st_size - limit_bytes))
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def _wait_for_pid(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self.pid and self._exit_code is None:
            self._listen()
            if not self.pid and (self._supervisor.poll() is not None or time.monotonic() > deadline_s):
                self._listen()
                if self.pid:
                    return
                self._supervisor.kill()
                self._supervisor.wait()
                self._control.close()
                raise LaunchError(f"the supervisor of {self.name} did not start", f"see {self.log_path}")
            time.sleep(0.005)

    def _listen(self) -> None:
        """Takes what the supervisor has said."""
        while True:
            try:
                data = self._control.recv(4096)
            except OSError:
                break  # nothing there, or closed
            if not data:
                break
            self._received += data
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            word, _, rest = line.decode(errors="replace").partition(" ")
            if word == "pid":
                self.pid = int(rest)
            elif word == "exit":
                self._exit_code = int(rest)
            elif word == "error":
                self._supervisor.wait()
                self._control.close()
                raise LaunchError(f"{self.name} cannot be started: {rest}")

    def _kill_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


def describe_exit(code: int) -> str:
    """`exit status 1`, or `signal SIGKILL`."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
