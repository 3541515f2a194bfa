"""Engines and routers that belong together and end together."""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from kvpush.launch.engine import Engine, EngineSpec
from kvpush.launch.errors import LaunchError
from kvpush.launch.ports import LOCALHOST, free_port, require_free
from kvpush.launch.process import STOP_GRACE_S
from kvpush.launch.router import RouterProcess
from kvpush.launch.server import Server

READY_TIMEOUT_S = 240.0
POLL_S = 0.25

# Called about four times a second while servers start, with all of them; look at ready_s and phase.
Progress = Callable[[Sequence[Server]], None]


class Fleet:
    """A context manager that owns every process started through it.

        with Fleet() as fleet:
            p = fleet.engine(EngineSpec(model, "prefill", free_port(), free_port()))
            d = fleet.engine(EngineSpec(model, "decode", free_port(), free_port()))
            fleet.wait_ready()
            router = fleet.router([p], [d])
            fleet.wait_ready()

    On leaving the block, on exceptions and on SIGINT, SIGTERM and SIGHUP (in the main thread, unless somebody handles
    them already) everything is stopped. A kill -9 of this process stops it as well: see `process`.

    log_dir: where logs go; default: a new directory under the system's temporary one. Logs stay.
    """

    def __init__(self, log_dir: Path | None = None) -> None:
        self.log_dir = log_dir or Path(tempfile.mkdtemp(prefix="kvpush-"))
        self.servers: list[Server] = []
        self._old_handlers: dict[int, Any] = {}
        self._starts = 0

    def engine(self, spec: EngineSpec) -> Engine:
        """Starts an engine and returns at once. Raises LaunchError if its port is taken or it cannot be executed."""
        if not spec.prefix:  # with one, its addresses may be those of another network namespace
            require_free(spec.port, "another port for the engine", spec.host)
        engine = Engine(spec, self._log_path(spec.label))
        self.servers.append(engine)
        return engine

    def router(
        self,
        prefill: Sequence[Engine],
        decode: Sequence[Engine],
        mode: str = "push",
        port: int | None = None,
        host: str = LOCALHOST,
        extra_args: Sequence[str] = (),
    ) -> RouterProcess:
        """Starts a router and returns at once. port: None takes a free one. Raises LaunchError as `engine` does."""
        if port is None:
            port = free_port(host)
        require_free(port, "another port for the router", host)
        router = RouterProcess(
            [each.url for each in prefill],
            [each.url for each in decode],
            port,
            self._log_path("router"),
            mode,
            host,
            extra_args,
        )
        self.servers.append(router)
        return router

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S, on_progress: Progress | None = None) -> None:
        """Returns when every server that has not been ready before answers `/health`.

        Raises LaunchError as soon as one of the fleet dies, or after timeout_s.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.require_alive()
            waiting = [server for server in self.servers if server.ready_s is None and not server.is_healthy()]
            if on_progress is not None:
                on_progress(self.servers)
            if not waiting:
                return
            if time.monotonic() > deadline_s:
                late = waiting[0]
                raise LaunchError(
                    f"{late.name} is not ready after {timeout_s:.0f} s (it was {late.phase})",
                    f"the machine may be too slow or too full; log: {late.log_path}",
                )
            time.sleep(POLL_S)

    def dead(self) -> list[Server]:
        """Servers that have ended although nobody stopped them."""
        return [server for server in self.servers if not server.alive]

    def require_alive(self) -> None:
        """Raises LaunchError, naming what died and why, if a server has ended."""
        for server in self.dead():
            raise server.death()

    def remove(self, server: Server, grace_s: float = STOP_GRACE_S) -> None:
        """Stops one server and forgets it; its port is free for a new one."""
        server.stop(grace_s)
        self.servers.remove(server)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Ends all of them at once and returns when no process is left. Idempotent."""
        for server in self.servers:
            server.ask_to_stop(grace_s)
        while self.servers:
            self.servers[-1].stop(grace_s)
            self.servers.pop()

    def __enter__(self) -> Fleet:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) == signal.SIG_DFL:
                    self._old_handlers[number] = signal.signal(number, _exit_on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
            self._old_handlers.clear()

    def _log_path(self, label: str) -> Path:
        """A new name for each start: the log of an engine that died must survive its successor."""
        self._starts += 1
        return self.log_dir / f"{self._starts:02d}-{label}.log"


def _exit_on_signal(number: int, _frame: FrameType | None) -> NoReturn:
    """Turns a signal into an exception, so that `with` blocks end as they should."""
    raise SystemExit(128 + number)
