"""What is asked, and when: cells, Poisson arrivals and prompts, all fixed by a seed.

Everything here depends on the seed and the cell alone, so that each connector meets the same prompts at the same times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

# Ids below are special tokens in the models used here.
FIRST_ORDINARY_TOKEN = 10
AGEING_ISLS = (40, 100, 300, 700, 1500, 3000)
AGEING_OSLS = (4, 16, 64)


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of a sweep: `n` requests of `isl` prompt tokens, arriving at `qps` per second on average."""

    isl: int
    qps: float
    n: int

    def duration_s(self) -> float:
        """Expected time from the first to the last arrival."""
        return self.n / self.qps


@dataclass(frozen=True, slots=True)
class Planned:
    """A request before it is sent. `prompt_json` is the encoded token list, so that sending costs the loop nothing."""

    index: int
    at_s: float
    isl: int
    osl: int
    prompt_json: bytes


def parse_cells(text: str) -> list[Cell]:
    """Reads `ISL:QPS:N,ISL:QPS:N,...`. Raises ValueError naming the part that is wrong."""
    cells = []
    for part in text.split(","):
        pieces = part.strip().split(":")
        try:
            isl, qps, n = int(pieces[0]), float(pieces[1]), int(pieces[2])
        except (ValueError, IndexError):
            raise ValueError(f"cell {part!r} is not ISL:QPS:N") from None
        if len(pieces) != 3 or isl < 1 or n < 1 or not 0 < qps < float("inf"):
            raise ValueError(f"cell {part!r} is not ISL:QPS:N with all three above zero")
        cells.append(Cell(isl, qps, n))
    if len({(cell.isl, cell.qps) for cell in cells}) != len(cells):
        raise ValueError(f"cells {text!r} name one ISL and QPS twice")
    return cells


def _prompt(rng: np.random.Generator, isl: int, vocabulary: int) -> bytes:
    return msgspec.json.encode(rng.integers(FIRST_ORDINARY_TOKEN, vocabulary, size=isl).tolist())


def arrival_times(seed: int, cell: Cell) -> list[float]:
    """Seconds after the start of the cell at which its requests are sent: exponential gaps, the first at 0."""
    rng = np.random.default_rng([seed, 1, cell.isl, round(cell.qps * 1000)])
    gaps = rng.exponential(1 / cell.qps, size=cell.n)
    return [0.0, *np.cumsum(gaps[:-1]).tolist()]


def open_loop(seed: int, cell: Cell, osl: int, vocabulary: int) -> list[Planned]:
    """The requests of a cell. A longer cell of the same ISL, QPS and seed begins with the same requests."""
    rng = np.random.default_rng([seed, 2, cell.isl, round(cell.qps * 1000)])
    return [
        Planned(index, at_s, cell.isl, osl, _prompt(rng, cell.isl, vocabulary))
        for index, at_s in enumerate(arrival_times(seed, cell))
    ]


def warm_up(seed: int, isls: Sequence[int], osl: int, vocabulary: int) -> list[Planned]:
    """One request of each length, in the order given; `at_s` means nothing."""
    rng = np.random.default_rng([seed, 3])
    return [Planned(i, 0.0, isl, osl, _prompt(rng, isl, vocabulary)) for i, isl in enumerate(isls)]


def ageing(seed: int, n: int, longest: int, vocabulary: int) -> list[Planned]:
    """Mixed requests that shuffle both engines' free lists when many run at once; none exceeds `longest` tokens in all.

    Raises ValueError if not even the shortest fits.
    """
    shapes = [(isl, osl) for isl in AGEING_ISLS for osl in AGEING_OSLS if isl + osl <= longest]
    if not shapes:
        raise ValueError(f"no ageing request fits into {longest} tokens")
    rng = np.random.default_rng([seed, 4])
    chosen = [shapes[i] for i in rng.integers(0, len(shapes), size=n)]
    return [Planned(i, 0.0, isl, osl, _prompt(rng, isl, vocabulary)) for i, (isl, osl) in enumerate(chosen)]
