"""What the router counts, and its text in Prometheus' exposition format."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

PREFIX = "kvpush_router_"


@dataclass(slots=True)
class Total:
    """Sum (seconds) and number of one kind of duration."""

    sum_s: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        self.sum_s += max(0.0, seconds)
        self.count += 1

    def as_dict(self) -> dict[str, float]:
        return {"sum_s": self.sum_s, "count": self.count}


@dataclass(slots=True)
class Metrics:
    """Counters of one router. Owned by its event loop.

    requests: by (endpoint, outcome), one a client request. transfers: by outcome, one a dispatch.
    local: by reason, requests that the decode engine prefilled itself. probes: by result.
    """

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    transfers: Counter[str] = field(default_factory=Counter)
    local: Counter[str] = field(default_factory=Counter)
    probes: Counter[str] = field(default_factory=Counter)
    client_params_dropped: int = 0
    retries: int = 0
    late_prefill_failures: int = 0
    in_flight: int = 0
    ttft: Total = field(default_factory=Total)
    prefill: Total = field(default_factory=Total)
    handoff: Total = field(default_factory=Total)

    def as_dict(self) -> dict[str, Any]:
        requests: dict[str, dict[str, int]] = {}
        for (endpoint, outcome), count in sorted(self.requests.items()):
            requests.setdefault(endpoint, {})[outcome] = count
        return {
            "requests": requests,
            "transfers": dict(self.transfers),
            "local": dict(self.local),
            "probes": dict(self.probes),
            "client_params_dropped": self.client_params_dropped,
            "retries": self.retries,
            "late_prefill_failures": self.late_prefill_failures,
            "in_flight": self.in_flight,
            "ttft": self.ttft.as_dict(),
            "prefill": self.prefill.as_dict(),
            "handoff": self.handoff.as_dict(),
        }

    def text(self, engines: list[tuple[str, str, int, bool, bool]]) -> str:
        """`engines`: (role, url, requests in flight, usable, unhealthy) of each."""
        page = _Page()
        page.family("requests_total", "counter", "Client requests by endpoint and outcome.")
        for (endpoint, outcome), count in sorted(self.requests.items()):
            page.sample("requests_total", count, endpoint=endpoint, outcome=outcome)
        page.labelled(
            "transfers_total", "Dispatches of a prompt to a pair of engines by outcome.", "outcome", self.transfers
        )
        page.labelled("local_prefills_total", "Requests that the decode engine prefilled itself.", "reason", self.local)
        page.labelled("identity_probes_total", "Probes of prefill engines by result.", "result", self.probes)
        page.single(
            "client_params_dropped_total", "counter", "Transfer parameters sent by clients.", self.client_params_dropped
        )
        page.single("retries_total", "counter", "Dispatches repeated after an engine failed.", self.retries)
        page.single(
            "late_prefill_failures_total",
            "counter",
            "Prefill legs that failed after the first token.",
            self.late_prefill_failures,
        )
        page.single("in_flight", "gauge", "Client requests being served.", self.in_flight)
        for name, help_text, total in (
            ("ttft_seconds", "From a request's arrival to the first token of a stream.", self.ttft),
            ("prefill_seconds", "From dispatch to the prefill engine's answer.", self.prefill),
            ("handoff_seconds", "From the prefill engine's answer to the first token of a stream.", self.handoff),
        ):
            page.family(name, "summary", help_text)
            page.sample(f"{name}_sum", total.sum_s)
            page.sample(f"{name}_count", total.count)
        page.family("engine_in_flight", "gauge", "Legs open at an engine.")
        for role, url, in_flight, *_ in engines:
            page.sample("engine_in_flight", in_flight, role=role, url=url)
        page.family("engine_usable", "gauge", "1 if requests may be sent to the engine.")
        for role, url, _, usable, _ in engines:
            page.sample("engine_usable", int(usable), role=role, url=url)
        page.family("engine_unhealthy", "gauge", "1 if the engine says that it may load no KV.")
        for role, url, *_, unhealthy in engines:
            page.sample("engine_unhealthy", int(unhealthy), role=role, url=url)
        return page.text()


class _Page:
    def __init__(self) -> None:
        self._lines: list[str] = []

    def family(self, name: str, kind: str, help_text: str) -> None:
        self._lines += [f"# HELP {PREFIX}{name} {help_text}", f"# TYPE {PREFIX}{name} {kind}"]

    def sample(self, name: str, value: float, **labels: str) -> None:
        inside = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
        self._lines.append(f"{PREFIX}{name}{{{inside}}} {value}" if inside else f"{PREFIX}{name} {value}")

    def single(self, name: str, kind: str, help_text: str, value: int) -> None:
        self.family(name, kind, help_text)
        self.sample(name, value)

    def labelled(self, name: str, help_text: str, label: str, counts: Counter[str]) -> None:
        self.family(name, "counter", help_text)
        for text, count in sorted(counts.items()):
            self.sample(name, count, **{label: text})

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
