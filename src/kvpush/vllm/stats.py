"""Counters of the connector as vLLM's stats: summed over ranks and steps, logged, and shown in /metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

# Counter -> what it counts. Labels are in the counter's second half: "sends:committed".
COUNTERS = {
    "bytes_written": "Bytes of KV that this engine has written into decode engines",
    "bytes_received": "Bytes of KV that prefill engines have committed to this engine",
    "writes": "Writes that have landed",
    "writes_failed": "Writes that have failed",
    "writes_refused": "Writes that could not be posted",
    "writes_lost": "Failed writes of which bytes may still land",
    "pieces": "Pieces sent on their way, by path",
    "parts": "Staged parts that have arrived in a slot here, by what was done with them",
    "sends": "Transfers that ended at this engine as producer, by outcome",
    "receives": "Transfers received by this engine",
    "loads_failed": "Transfers that did not arrive, by reason",
    "unmatched": "Registrations without request and requests without registration that were dropped, by reason",
    "messages_dropped": "Messages dropped, by fault",
    "handshakes_failed": "Handshakes that failed, by reason",
    "disconnects": "Connections that broke, by reason",
    "notify_failed": "Messages that could not be sent",
    "transport_errors": "Times that the transport could not read its messages",
    "protocol_errors": "Commands that made no sense: defects of kvpush",
    "preemptions": "Offered requests that were preempted; label poisoned: while they were being read",
    "loads_refused": "Prompts that this engine computed itself because nothing may be loaded, by reason",
    "quarantines": "Requests whose blocks went into quarantine",
    "quarantines_expired": "Requests whose blocks left quarantine by time, without proof that nobody writes to them",
    "integrity": "Digests of KV: compared, by result; not sent although expected; or given up by P",
    "bad_params": "Requests whose kv_transfer_params were refused",
    "transfer_id_fallbacks": "Requests without transfer_id, matched by request id",
}

# Gauge -> what it shows now.
GAUGES = {
    "quarantined_blocks": "Blocks in quarantine, added up over ranks",
    "unhealthy": "1 while too many blocks are in quarantine and nothing is loaded",
    "open_transfers": "Requests whose hand-over has not ended at this engine, as producer or as consumer",
    "open_writes": "Writes in flight, and failed ones of which bytes may still land",
}


@dataclass
class PushStats(KVConnectorStats):  # type: ignore[misc]
    """data: "name:label" -> what was added since the last step; that of a gauge can also be negative.

    Nothing but differences: vLLM adds them up over ranks, steps and logging intervals.
    """

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name.rstrip(":"): value for name, value in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not self.data


class PushPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`kvpush_<counter>_total{reason=...}` and `kvpush_<level>` for each engine."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: dict[int, list[Any]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._engines = per_engine
        self._counters = {
            name: self._counter_cls(name=f"kvpush_{name}", documentation=text, labelnames=[*labelnames, "reason"])
            for name, text in COUNTERS.items()
        }
        self._gauges = {
            name: self._gauge_cls(name=f"kvpush_{name}", documentation=text, labelnames=labelnames)
            for name, text in GAUGES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self._engines[engine_idx]
        for item, value in transfer_stats_data.items():
            name, _, reason = item.partition(":")
            if name in self._gauges:
                self._gauges[name].labels(*labels).inc(value)
            elif name in self._counters:
                self._counters[name].labels(*labels, reason).inc(value)
