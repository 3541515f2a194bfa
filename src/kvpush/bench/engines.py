"""One prefill and one decode engine as processes: command lines, start, health, logs, and a sure end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from kvpush.bench.connectors import HOST, Connector, Legs

# Engines get this long to end by themselves before they are killed.
STOP_GRACE_S = 20.0
START_TIMEOUT_S = 240.0
CUDAGRAPH_SIZES = [1, 2, 4, 8, 16, 32, 64]
LOG_TAIL_LINES = 15


class EngineError(Exception):
    """An engine did not come up; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What both engines of a pair have in common.

    extra_args: appended to vLLM's command line. kvpush_config: further keys of kvpush's configuration.
    gpus: CUDA ordinals of prefill and decode engine, unused on the CPU.
    """

    model: Path
    device: str
    dummy_weights: bool
    max_model_len: int
    max_num_batched_tokens: int = 8192
    gpus: tuple[int, int] = (0, 1)
    extra_args: tuple[str, ...] = ()
    kvpush_config: Mapping[str, Any] | None = None


def free_ports(n: int) -> list[int]:
    """n different TCP ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(n)]
    try:
        for each in sockets:
            each.bind((HOST, 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def command(options: EngineOptions, port: int, transfer_config: Mapping[str, Any]) -> list[str]:
    """The engine's argv."""
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(options.model)]
    argv += ["--host", HOST, "--port", str(port), "--max-model-len", str(options.max_model_len)]
    argv += ["--max-num-batched-tokens", str(options.max_num_batched_tokens), "--no-enable-prefix-caching"]
    argv += ["--kv-transfer-config", json.dumps(dict(transfer_config))]
    if options.dummy_weights:
        argv += ["--load-format", "dummy"]
    if options.device == "cuda":
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": CUDAGRAPH_SIZES}
        argv += ["--gpu-memory-utilization", "0.8", "--attention-backend", "FLASH_ATTN"]
        argv += ["--compilation-config", json.dumps(graphs)]
    else:
        argv += ["--enforce-eager", "--dtype", "bfloat16", "--block-size", "32"]
    return [*argv, *options.extra_args]


def environment(options: EngineOptions, place: int, of_connector: Mapping[str, str]) -> dict[str, str]:
    """The engine's environment: this process's own, and what the device needs. place: 0 for prefill, 1 for decode."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "UCX_LOG_LEVEL": "warn"}
    if options.device == "cuda":
        env |= {"CUDA_VISIBLE_DEVICES": str(options.gpus[place]), "UCX_TLS": "all"}
        env |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0"}
    else:
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return env | dict(of_connector)


class Engine:
    """One engine process in a session of its own. Owns the process and its log file from `__init__` to `kill`."""

    def __init__(self, role: str, argv: Sequence[str], env: Mapping[str, str], port: int, log: Path) -> None:
        self.role = role
        self.argv = list(argv)
        self.port = port
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                self.argv, env=dict(env), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def healthy(self) -> bool:
        """Raises EngineError if the process has ended."""
        if self.process.poll() is not None:
            raise EngineError(
                f"{self.role} engine ended with {self.process.returncode}; {self.log} ends:\n{self.tail()}"
            )
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as response:
                return bool(response.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def tail(self) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def signal(self, number: int) -> None:
        """Signals the whole process group: the engine core is a child of the server and outlives a plain kill."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass


class EnginePair:
    """A prefill and a decode engine with one connector; a context manager that always stops both.

    Raises EngineError from `start` if one does not come up within the timeout.
    """

    def __init__(self, connector: Connector, options: EngineOptions, log_stem: Path) -> None:
        self.connector = connector
        self.options = options
        self.log_stem = log_stem
        self.engines: list[Engine] = []
        self.side_channel_ports: list[int] = []
        self.start_s = 0.0

    @property
    def prefill(self) -> Engine:
        return self.engines[0]

    @property
    def decode(self) -> Engine:
        return self.engines[1]

    def legs(self) -> Legs:
        """Fresh leg parameters for this pair."""
        return self.connector.legs(self.side_channel_ports[0])

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Starts both at once and returns when both answer; takes the time of it into `start_s`."""
        began = time.monotonic()
        ports = free_ports(4)
        self.side_channel_ports = ports[2:]
        extra = dict(self.options.kvpush_config or {})
        for place, role in enumerate(("producer", "consumer")):
            side = self.side_channel_ports[place]
            config = self.connector.transfer_config(f"kv_{role}", side, self.options.device, extra)
            env = environment(self.options, place, self.connector.environment(side))
            name = "prefill" if place == 0 else "decode"
            log = self.log_stem.with_name(f"{self.log_stem.name}-{name}.log")
            self.engines.append(Engine(name, command(self.options, ports[place], config), env, ports[place], log))
        waiting = list(self.engines)
        while waiting:
            waiting = [engine for engine in waiting if not engine.healthy()]
            if waiting and time.monotonic() - began > timeout_s:
                engine = waiting[0]
                raise EngineError(f"{engine.role} engine not up within {timeout_s:g} s; its log ends:\n{engine.tail()}")
            if waiting:
                time.sleep(0.5)
        self.start_s = time.monotonic() - began

    def dead(self) -> list[str]:
        """Names of the engines that have ended although nobody stopped them."""
        return [engine.role for engine in self.engines if engine.process.poll() is not None]

    def stop(self) -> None:
        """Ends both process groups: asks first, kills what is left. Idempotent."""
        for engine in self.engines:
            engine.signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_GRACE_S
        for engine in self.engines:
            try:
                engine.process.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
        for engine in self.engines:
            engine.signal(signal.SIGKILL)
            engine.process.wait(timeout=10)
        self.engines.clear()

    def __enter__(self) -> EnginePair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
