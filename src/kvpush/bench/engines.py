"""A prefill and a decode engine that differ from another pair in their connector only: started here, or elsewhere."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kvpush.bench.connectors import Connector, KVPushLegs, Legs
from kvpush.bench.handoffs import AskedTraces, NoTraces, Traces, TraceTail
from kvpush.launch.engine import Engine, EngineSpec, Role
from kvpush.launch.fleet import READY_TIMEOUT_S, Fleet
from kvpush.launch.ports import free_port

ROLES: tuple[Role, Role] = ("prefill", "decode")
# Prefill runs without graphs; what decode batches to in the cells measured here is captured.
CUDA_GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64],
}
GPU_MEMORY_UTILIZATION = 0.8
CUDA_ENV = {"UCX_TLS": "all", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0"}


class EngineError(Exception):
    """The engines run but do not serve; nothing that is measured would mean anything."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What both engines of a pair have in common.

    device: `cpu` or `cuda`. gpus: CUDA ordinals of prefill and decode engine, unused on the CPU.
    kvpush_config: further keys of kvpush's configuration. extra_args: appended to vLLM's command line.
    memory_share: of each GPU's memory that this pair may have, less than 1 while other pairs are up.
    """

    model: Path
    device: str
    dummy_weights: bool
    max_model_len: int
    max_num_batched_tokens: int = 8192
    gpus: tuple[int, int] = (0, 1)
    kvpush_config: Mapping[str, Any] = field(default_factory=dict)
    extra_args: tuple[str, ...] = ()
    memory_share: float = 1.0

    def vllm_args(self) -> tuple[str, ...]:
        """vLLM's arguments beyond those that every engine gets."""
        args = ["--max-num-batched-tokens", str(self.max_num_batched_tokens), "--no-enable-prefix-caching"]
        if self.dummy_weights:
            args += ["--load-format", "dummy"]
        if self.device == "cuda":
            share = f"{GPU_MEMORY_UTILIZATION * self.memory_share:.3g}"
            args += ["--gpu-memory-utilization", share, "--attention-backend", "FLASH_ATTN"]
            args += ["--compilation-config", json.dumps(CUDA_GRAPHS)]
        return (*args, *self.extra_args)


def engine_spec(connector: Connector, options: EngineOptions, role: Role, trace_file: Path | None = None) -> EngineSpec:
    """How to start one engine of a pair, on free ports. trace_file: where our connector writes its records."""
    cuda = options.device == "cuda"
    ours = dict(options.kvpush_config)
    if trace_file is not None:
        ours["trace_file"] = str(trace_file.absolute())
    return EngineSpec(
        model=str(options.model),
        role=role,
        port=free_port(),
        side_channel_port=free_port(),
        connector=connector.kv_connector,
        connector_options=ours if connector.ours else {},
        device=f"cuda:{options.gpus[ROLES.index(role)]}" if cuda else "cpu",
        dtype="bfloat16",
        max_model_len=options.max_model_len,
        extra_args=options.vllm_args(),
        env=CUDA_ENV if cuda else {},
    )


class Pair(Protocol):
    """A prefill and a decode engine that answer. model: how requests name it. max_model_len: in tokens."""

    @property
    def connector(self) -> Connector: ...
    @property
    def prefill_url(self) -> str: ...
    @property
    def decode_url(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...

    def legs(self) -> Legs:
        """Fresh leg parameters for this pair."""
        ...

    def dead(self) -> list[str]:
        """Roles of the engines that have ended although nobody stopped them."""
        ...

    def logs(self) -> list[Path]:
        """The engines' logs; none if they are somewhere else."""
        ...

    def traces(self) -> Traces:
        """The records of the pair's transfers from now on."""
        ...


@dataclass(slots=True)
class EnginePair:
    """Two started engines; the fleet owns their processes."""

    connector: Connector
    options: EngineOptions
    prefill: Engine
    decode: Engine
    trace_file: Path | None = None
    start_s: float = 0.0

    @classmethod
    def start(
        cls, fleet: Fleet, connector: Connector, options: EngineOptions, timeout_s: float = READY_TIMEOUT_S
    ) -> EnginePair:
        """Starts both at once and returns when both answer. Raises LaunchError with the cause if one does not."""
        trace_file = fleet.log_dir / f"trace-{uuid.uuid4().hex[:8]}.jsonl" if connector.ours else None
        prefill, decode = (fleet.engine(engine_spec(connector, options, role, trace_file)) for role in ROLES)
        pair = cls(connector, options, prefill, decode, trace_file)
        fleet.wait_ready(timeout_s)
        pair.start_s = max(engine.ready_s or 0.0 for engine in pair.engines)
        return pair

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.prefill, self.decode

    @property
    def prefill_url(self) -> str:
        return self.prefill.url

    @property
    def decode_url(self) -> str:
        return self.decode.url

    @property
    def model(self) -> str:
        return str(self.options.model)

    @property
    def max_model_len(self) -> int:
        return self.options.max_model_len

    def legs(self) -> Legs:
        port = self.prefill.spec.side_channel_port
        assert port is not None
        return self.connector.legs(port)

    def logs(self) -> list[Path]:
        return [engine.log_path for engine in self.engines]

    def traces(self) -> Traces:
        return NoTraces() if self.trace_file is None else TraceTail(self.trace_file)

    def dead(self) -> list[str]:
        return [engine.spec.role for engine in self.engines if not engine.alive]


@dataclass(frozen=True, slots=True)
class AttachedPair:
    """Engines that somebody else has started, perhaps on two machines, with this connector.

    side_channels: (host, port) of P's and of D's side channel, for our connectors; vLLM's need none here.
    """

    connector: Connector
    prefill_url: str
    decode_url: str
    model: str
    max_model_len: int
    side_channels: Sequence[tuple[str, int]] = ()

    def legs(self) -> Legs:
        if not self.connector.ours:
            return self.connector.legs(0)
        host, port = self.side_channels[0]
        legs = self.connector.legs(port)
        assert isinstance(legs, KVPushLegs)
        legs.remote_host = host
        return legs

    def logs(self) -> list[Path]:
        return []

    def traces(self) -> Traces:
        return AskedTraces(self.side_channels) if self.connector.ours else NoTraces()

    def dead(self) -> list[str]:
        return []
