"""KVPushConnector: vLLM's interface on one side, the scheduler half or the worker half on the other."""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvpush.vllm import compat
from kvpush.vllm.config import parse_options
from kvpush.vllm.metadata import StepMetadata
from kvpush.vllm.scheduler import PushScheduler
from kvpush.vllm.stats import PushPromMetrics, PushStats
from kvpush.vllm.worker import PushWorker

_log = logging.getLogger(__name__)


class KVPushConnector(KVConnectorBase_V1, SupportsHMA):
    """Pushes the KV cache from prefill to decode engines. See docs/architecture.md for the life of a request.

    Only public hooks of vLLM are used. What differs between versions is in `compat`. Raises ConfigError,
    UnsupportedModel or UnsupportedVersion when the engine starts.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _adopt_logger()
        compat.check_version(compat.vllm_version())
        options = parse_options(self._kv_transfer_config.kv_connector_extra_config)
        options = compat.shift_port(options, vllm_config)
        self._scheduler: PushScheduler | None = None
        self._worker: PushWorker | None = None
        self._last_levels: dict[str, int] = {}
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = PushScheduler(vllm_config, kv_cache_config, options)
        else:
            self._worker = PushWorker(vllm_config, kv_cache_config, options)

    # Worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._at_worker().register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._at_worker().handshake_metadata()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        # The first hook of a step in every version, and the only one that is before the forward in all of them.
        assert isinstance(kv_connector_metadata, StepMetadata)
        self._at_worker().before_forward(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: registrations have left in `handle_preemptions`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is scheduled only when its KV is complete."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks leave after the step, from the transfer thread."""

    def finish_forward(self) -> None:
        self._at_worker().after_forward()

    def wait_for_save(self) -> None:
        self._at_worker().after_forward()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received, _ = self._at_worker().collect(finished_req_ids)
        return sent or None, received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        # Later versions call this in place of `get_finished`; it can also name requests whose load has failed.
        return compat.transfer_results(*self._at_worker().collect(finished_req_ids))

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._at_worker().take_invalid_blocks()

    def get_kv_connector_stats(self) -> PushStats | None:
        half = self._worker or self._scheduler
        counters = half.counters if half is not None else None
        new = counters.take() if counters is not None else {}
        data = {f"{name}:{label}": count for (name, label), count in new.items()}
        for name, level in (half.levels if half is not None else {}).items():
            change = level - self._last_levels.get(name, 0)
            if change:
                data[f"{name}:"] = change
            self._last_levels[name] = level
        return PushStats(data=data) if data else None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._at_worker().news()

    # Scheduler half

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._at_scheduler().set_ranks(metadata)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._at_scheduler().set_ranks(metadata)

    def on_new_request(self, request: Any) -> None:
        self._at_scheduler().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._at_scheduler().matched_tokens(request.request_id, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:  # noqa: ARG002
        # vLLM's default names prefix-cacheable groups only; a hand-over restores every group.
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._at_scheduler().on_allocated(request.request_id, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._at_scheduler().build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        scheduler = self._at_scheduler()
        scheduler.on_news(getattr(connector_output, "kv_connector_worker_meta", None))
        scheduler.on_reported(connector_output.finished_sending, connector_output.finished_recving)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._at_scheduler().on_finished(request, tuple(tuple(group) for group in block_ids))

    def reset_cache(self) -> bool | None:
        """Nothing is cached here: KV that is being transferred belongs to requests."""
        return True

    # Both

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PushStats | None:
        return PushStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[Any]]
    ) -> PushPromMetrics:
        return PushPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _at_worker(self) -> PushWorker:
        assert self._worker is not None, "called in the scheduler process"
        return self._worker

    def _at_scheduler(self) -> PushScheduler:
        assert self._scheduler is not None, "called in a worker process"
        return self._scheduler


def _adopt_logger() -> None:
    """Lets kvpush log where vLLM logs: its handlers sit on the logger "vllm" alone."""
    logger, vllm_logger = logging.getLogger("kvpush"), logging.getLogger("vllm")
    if not logger.handlers and vllm_logger.handlers:
        logger.handlers = list(vllm_logger.handlers)
        logger.setLevel(vllm_logger.level or logging.INFO)
        logger.propagate = False
