"""What was measured: one record per request, and the statistics over records that the figures use."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

import msgspec


class RequestRecord(msgspec.Struct, kw_only=True):
    """One request. Times in milliseconds from the moment it was sent, except the first two fields.

    scheduled_s and arrival_s: when it should have been sent and when it was, in seconds from the start of the cell.
    transfer_id: under which the engines' records of it are found.
    prefill_response_ms: until the prefill leg had answered. ttft_ms: until the client had the first token.
    handoff_ms: ttft_ms - prefill_response_ms, what disaggregation adds. itl_ms: gaps between the pieces of the answer
    as they came (a piece is one token unless the engine's server fell behind). tpot_ms: last token minus first, by
    the number of tokens after the first. error: None, or why this request does not count.
    """

    index: int
    transfer_id: str
    isl: int
    osl: int
    scheduled_s: float
    arrival_s: float
    prefill_response_ms: float | None = None
    ttft_ms: float | None = None
    handoff_ms: float | None = None
    itl_ms: list[float] = []
    tpot_ms: float | None = None
    tokens: int = 0
    pieces: int = 0
    error: str | None = None

    @property
    def late_ms(self) -> float:
        """How far behind its schedule the generator was, in milliseconds."""
        return (self.arrival_s - self.scheduled_s) * 1e3


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100) with linear interpolation, as numpy's default. Raises ValueError for no values."""
    if not values or not 0 <= q <= 100:
        raise ValueError(f"no {q}th percentile of {len(values)} values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def p99(values: Sequence[float]) -> float:
    return percentile(values, 99)


# Name of a figure -> (field of RequestRecord, statistic over the requests without error).
SERVE_METRICS: dict[str, tuple[str, Callable[[Sequence[float]], float]]] = {
    "ttft_mean_ms": ("ttft_ms", statistics.fmean),
    "ttft_p99_ms": ("ttft_ms", p99),
    "handoff_p50_ms": ("handoff_ms", median),
    "prefill_response_mean_ms": ("prefill_response_ms", statistics.fmean),
    "tpot_mean_ms": ("tpot_ms", statistics.fmean),
    "tpot_p99_ms": ("tpot_ms", p99),
}


def values_of(records: Iterable[RequestRecord], field: str) -> list[float]:
    """The field's values over the requests without error; a request that has none (TPOT of one token) is left out."""
    found = (getattr(record, field) for record in records if record.error is None)
    return [value for value in found if value is not None]


def figures(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Every metric of SERVE_METRICS that the records have values for."""
    measured = {}
    for name, (field, statistic) in SERVE_METRICS.items():
        values = values_of(records, field)
        if values:
            measured[name] = statistic(values)
    return measured
