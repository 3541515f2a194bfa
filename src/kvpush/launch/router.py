"""The router as a process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kvpush.launch.ports import LOCALHOST
from kvpush.launch.server import Server


def router_command(
    prefill: Sequence[str], decode: Sequence[str], mode: str, host: str, port: int, extra_args: Sequence[str] = ()
) -> list[str]:
    """The router's argv. prefill, decode: URLs of the engines."""
    argv = [sys.executable, "-m", "kvpush.router", "--mode", mode, "--host", host, "--port", str(port)]
    for option, urls in (("--prefill", prefill), ("--decode", decode)):
        for url in urls:
            argv += [option, url]
    return [*argv, *extra_args]


class RouterProcess(Server):
    """A started router in front of engines given by URL. See `Server` for url, pid, log_path, alive, ready and stop."""

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        port: int,
        log_path: Path,
        mode: str = "push",
        host: str = LOCALHOST,
        extra_args: Sequence[str] = (),
    ) -> None:
        argv = router_command(prefill, decode, mode, host, port, extra_args)
        super().__init__("the router", argv, log_path, host, port)
