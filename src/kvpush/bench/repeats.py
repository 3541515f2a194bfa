"""Figures of a cell, and of several measurements of the same cell: their median, and how far they lie apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvpush.bench.handoffs import leg_figures
from kvpush.bench.raw import CellResult, ServeRaw, Slo
from kvpush.bench.record import figures, median

UNITS = {"ms": "ms", "qps": "1/s", "share": "1"}
# (pool, ISL, QPS)
CellKey = tuple[str, int, float]


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some repeats, the lowest and the highest of them, and how many there were."""

    value: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values), len(values))


def unit_of(metric: str) -> str:
    """The unit that a metric's name ends in."""
    return UNITS[metric.rpartition("_")[2]]


def cell_figures(cell: CellResult, slo: Slo | None) -> dict[str, float]:
    """Every figure of one measurement: of the requests, of the hand-off's legs, and goodput where there is an SLO.

    goodput_qps: requests that met the SLO, by the seconds from the first arrival to the last answer. slo_met_share: of
    all requests, those that failed included.
    """
    found = {**figures(cell.requests), **leg_figures(cell.handoffs)}
    if slo is not None and cell.requests and cell.wall_s > 0:
        met = sum(slo.met(record) for record in cell.requests)
        found["goodput_qps"] = met / cell.wall_s
        found["slo_met_share"] = met / len(cell.requests)
    return found


def complete_cells(raw: ServeRaw) -> dict[CellKey, list[CellResult]]:
    """The cells that were measured to their end, each with its repeats in order."""
    found: dict[CellKey, list[CellResult]] = {}
    for cell in sorted(raw.cells, key=lambda cell: cell.repeat):
        if cell.complete:
            found.setdefault((cell.pool, cell.isl, cell.qps), []).append(cell)
    return found


def spreads(cells: Iterable[CellResult], slo: Slo | None) -> dict[str, Spread]:
    """Every figure over the repeats of one cell that have it."""
    values: dict[str, list[float]] = {}
    for cell in cells:
        for name, value in cell_figures(cell, slo).items():
            values.setdefault(name, []).append(value)
    return {name: Spread.of(each) for name, each in values.items()}
