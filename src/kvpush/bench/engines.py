"""A prefill and a decode engine that differ from another pair in their connector only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpush.bench.connectors import Connector, Legs
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
CUDA_ENV = {"UCX_TLS": "all", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0"}


class EngineError(Exception):
    """The engines run but do not serve; nothing that is measured would mean anything."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What both engines of a pair have in common.

    device: `cpu` or `cuda`. gpus: CUDA ordinals of prefill and decode engine, unused on the CPU.
    kvpush_config: further keys of kvpush's configuration. extra_args: appended to vLLM's command line.
    """

    model: Path
    device: str
    dummy_weights: bool
    max_model_len: int
    max_num_batched_tokens: int = 8192
    gpus: tuple[int, int] = (0, 1)
    kvpush_config: Mapping[str, Any] = field(default_factory=dict)
    extra_args: tuple[str, ...] = ()

    def vllm_args(self) -> tuple[str, ...]:
        """vLLM's arguments beyond those that every engine gets."""
        args = ["--max-num-batched-tokens", str(self.max_num_batched_tokens), "--no-enable-prefix-caching"]
        if self.dummy_weights:
            args += ["--load-format", "dummy"]
        if self.device == "cuda":
            args += ["--gpu-memory-utilization", "0.8", "--attention-backend", "FLASH_ATTN"]
            args += ["--compilation-config", json.dumps(CUDA_GRAPHS)]
        return (*args, *self.extra_args)


def engine_spec(connector: Connector, options: EngineOptions, role: Role) -> EngineSpec:
    """How to start one engine of a pair, on free ports."""
    cuda = options.device == "cuda"
    return EngineSpec(
        model=str(options.model),
        role=role,
        port=free_port(),
        side_channel_port=free_port(),
        connector=connector.kv_connector,
        connector_options=options.kvpush_config if connector.ours else {},
        device=f"cuda:{options.gpus[ROLES.index(role)]}" if cuda else "cpu",
        dtype="bfloat16",
        max_model_len=options.max_model_len,
        extra_args=options.vllm_args(),
        env=CUDA_ENV if cuda else {},
    )


@dataclass(slots=True)
class EnginePair:
    """Two started engines; the fleet owns their processes."""

    connector: Connector
    options: EngineOptions
    prefill: Engine
    decode: Engine
    start_s: float = 0.0

    @classmethod
    def start(
        cls, fleet: Fleet, connector: Connector, options: EngineOptions, timeout_s: float = READY_TIMEOUT_S
    ) -> EnginePair:
        """Starts both at once and returns when both answer. Raises LaunchError with the cause if one does not."""
        prefill, decode = (fleet.engine(engine_spec(connector, options, role)) for role in ROLES)
        pair = cls(connector, options, prefill, decode)
        fleet.wait_ready(timeout_s)
        pair.start_s = max(engine.ready_s or 0.0 for engine in pair.engines)
        return pair

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.prefill, self.decode

    def legs(self) -> Legs:
        """Fresh leg parameters for this pair."""
        port = self.prefill.spec.side_channel_port
        assert port is not None
        return self.connector.legs(port)

    def dead(self) -> list[str]:
        """Roles of the engines that have ended although nobody stopped them."""
        return [engine.spec.role for engine in self.engines if not engine.alive]
