"""The prefill engine, the decode engine and the router of a soak; they die and come back under the same addresses."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvpush.bench.soak.link import DECODE, PREFILL, Link
from kvpush.launch import Engine, EngineSpec, Fleet, RouterProcess, Server, free_port
from kvpush.launch.ports import LOCALHOST, is_free

ROUTER = "router"
ROLES = (PREFILL, DECODE, ROUTER)
Victims = Literal["all", "server", "worker"]

# Small pools, so that they fill up, and short chunks, so that prompts take several and mix.
MAX_MODEL_LEN = 2048
KV_BLOCKS = 256
CHUNK_TOKENS = 512
# Bounds of the engines: the product's own where a fault must be able to outlast them, shorter where a run would wait.
BOUNDS = {"rendezvous_timeout_s": 15.0, "unclaimed_timeout_s": 20.0, "announced_timeout_s": 60.0}
REQUEST_TIMEOUT_S = 120.0
IDENTITY_WAIT_S = 5.0
# How long a dead process's port may stay busy, and how long an engine may outlive its worker.
PORT_TIMEOUT_S = 15.0
DEATH_TIMEOUT_S = 30.0


class DeploymentError(Exception):
    """A part did not end or did not come back as it should."""


@dataclass(frozen=True, slots=True)
class DeploymentOptions:
    """policy: `fail` or `recompute`, what the decode engine does about KV that did not come. integrity: see the
    connector's option. link: the network that can be cut; without one both engines share this machine's memory."""

    model: str
    policy: str
    integrity: str
    link: Link | None


class Deployment:
    """All methods block; the fleet owns the processes. starts: role -> how often it was started."""

    def __init__(self, fleet: Fleet, options: DeploymentOptions) -> None:
        self.starts = dict.fromkeys(ROLES, 0)
        self._fleet = fleet
        self._link = options.link
        self._specs = {PREFILL: self._spec(PREFILL, options), DECODE: self._spec(DECODE, options)}
        self._router_port = free_port()
        self._servers: dict[str, Server] = {}
        self._up: set[str] = set()

    @property
    def router_url(self) -> str:
        return f"http://{LOCALHOST}:{self._router_port}"

    @property
    def model(self) -> str:
        return self._specs[DECODE].model

    def server(self, role: str) -> Server:
        return self._servers[role]

    def up(self, role: str) -> bool:
        """It has been started, has answered, and has not ended since."""
        return role in self._up and self._servers[role].alive

    def start(self) -> None:
        """Starts everything and returns when all of it answers. Raises LaunchError."""
        for role in (PREFILL, DECODE):
            self._start(role)
        self._fleet.wait_ready()
        self._start(ROUTER)
        self._fleet.wait_ready()
        self._up |= {*ROLES}

    def set_policy(self, policy: str) -> None:
        """Of the next decode engine."""
        self._specs[DECODE] = replace(self._specs[DECODE], load_failure_policy=policy)

    def kill(self, role: str, victims: Victims = "all") -> None:
        """SIGKILL: to all of its processes, to the one that serves HTTP, or to the one that computes.

        Returns when nothing of it is left. Raises DeploymentError if the rest does not follow.
        """
        server = self._servers[role]
        self._up.discard(role)
        if victims == "all":
            server.signal_tree(signal.SIGKILL)
        elif victims == "server":
            server.kill()
        else:
            os.kill(worker_of(server), signal.SIGKILL)
        left = not _until(lambda: not server.alive, DEATH_TIMEOUT_S)
        self._fleet.remove(server)
        if left:
            raise DeploymentError(f"{server.name} outlived its {victims} by {DEATH_TIMEOUT_S:.0f} s")

    def restart(self, role: str, timeout_s: float) -> None:
        """Starts it anew under its old addresses and returns when it answers. Raises LaunchError or DeploymentError."""
        port = self._router_port if role == ROUTER else self._specs[role].port
        behind_prefix = role != ROUTER and self._specs[role].prefix
        if not behind_prefix and not _until(lambda: is_free(port), PORT_TIMEOUT_S):
            raise DeploymentError(f"port {port} of the {role} is still busy {PORT_TIMEOUT_S:.0f} s after its end")
        server = self._start(role)
        deadline_s = time.monotonic() + timeout_s
        # A router calls itself healthy only if its engines are; it serves before.
        while not (_listens(self._router_port) if role == ROUTER else server.is_healthy()):
            server.require_alive()
            if time.monotonic() > deadline_s:
                raise DeploymentError(f"{server.name} is not ready {timeout_s:.0f} s after its restart")
            time.sleep(0.25)
        self._up.add(role)

    def stop(self, role: str) -> None:
        """SIGSTOP to all of its processes."""
        self._servers[role].signal_tree(signal.SIGSTOP)

    def go_on(self, role: str) -> None:
        """SIGCONT."""
        self._servers[role].signal_tree(signal.SIGCONT)

    def _start(self, role: str) -> Server:
        self.starts[role] += 1
        if role == ROUTER:
            prefill, decode = self._servers[PREFILL], self._servers[DECODE]
            assert isinstance(prefill, Engine)
            assert isinstance(decode, Engine)
            limits = ("--request-timeout-s", str(REQUEST_TIMEOUT_S), "--identity-wait-s", str(IDENTITY_WAIT_S))
            server: Engine | RouterProcess = self._fleet.router(
                [prefill], [decode], port=self._router_port, extra_args=limits
            )
        else:
            server = self._fleet.engine(self._specs[role])
        self._servers[role] = server
        return server

    def _spec(self, role: str, options: DeploymentOptions) -> EngineSpec:
        place: dict[str, Any] = {}
        connector: dict[str, Any] = {"integrity": options.integrity, **BOUNDS}
        if self._link is not None:
            end = self._link.ends[role]
            connector["side_channel_host"] = end.link_address
            place = {"host": end.host_address, "prefix": end.prefix, "env": end.environment}
        return EngineSpec(
            model=options.model,
            role="prefill" if role == PREFILL else "decode",
            name=role,
            port=free_port(),
            side_channel_port=free_port(),
            connector_options=connector,
            load_failure_policy=options.policy if role == DECODE else None,
            # Greedy text of one engine and of a pair can be compared token for token only in full precision.
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            extra_args=(
                "--max-num-batched-tokens", str(CHUNK_TOKENS), "--num-gpu-blocks-override", str(KV_BLOCKS),
                "--enable-prefix-caching",
            ),
            **place,
        )  # fmt: skip


def worker_of(server: Server) -> int:
    """The process that computes: the one that holds most memory of those below the HTTP server."""
    below = [pid for pid in server.tree() if pid != server.pid]
    if not below:
        raise DeploymentError(f"{server.name} has no process beside the one that serves HTTP")
    return max(below, key=_resident_pages)


def _resident_pages(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1])
    except OSError:
        return 0


def _listens(port: int) -> bool:
    try:
        with socket.create_connection((LOCALHOST, port), timeout=1.0):
            return True
    except OSError:
        return False


def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True
