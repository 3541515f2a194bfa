"""A process that serves HTTP and answers `/health`."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvpush.launch.diagnose import phase, why_it_died
from kvpush.launch.errors import LaunchError
from kvpush.launch.ports import LOCALHOST
from kvpush.launch.process import Process, describe_exit

HEALTH_TIMEOUT_S = 3.0


class Server(Process):
    """url: without a trailing slash. ready_s: seconds from the start to the first healthy answer, None before."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log_path: Path,
        host: str,
        port: int,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self.started_s = time.monotonic()
        self.ready_s: float | None = None
        super().__init__(name, argv, log_path, env)

    @property
    def url(self) -> str:
        # A server that listens on every interface is asked over the loopback one.
        host = LOCALHOST if self.host in ("0.0.0.0", "") else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def phase(self) -> str:
        """What it is doing while it starts, as far as its log tells."""
        return phase(self.log_tail(64 * 1024))

    def is_healthy(self) -> bool:
        """Whether `/health` answers 200 now."""
        # No proxy: the address is on this machine, whatever the environment says.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self.url}/health", timeout=HEALTH_TIMEOUT_S) as response:
                healthy = bool(response.status == 200)
        except (OSError, ValueError):
            return False
        if healthy and self.ready_s is None:
            self.ready_s = time.monotonic() - self.started_s
        return healthy

    def death(self) -> LaunchError:
        """What to tell about a server that has ended although nobody stopped it."""
        code = self.exit_code
        ended = describe_exit(code) if code is not None else "it still runs"
        when = "during start-up" if self.ready_s is None else "while it served"
        cause, remedy = why_it_died(self.log_tail(), code)
        text = f"{self.name} died {when} ({ended})"
        return LaunchError(f"{text}: {cause}" if cause else text, f"{remedy}; log: {self.log_path}".lstrip("; "))

    def require_alive(self) -> None:
        """Raises LaunchError, with the cause from the log, if it has ended."""
        if not self.alive:
            raise self.death()
