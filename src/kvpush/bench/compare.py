"""Compares two raw files of the serving benchmark, cell by cell, and says what the measurements allow to say.

    kvpush bench compare A.json B.json

Ratios are B to A, with 95 % bootstrap intervals. Both files asked the same requests at the same times, so requests are
drawn in pairs; those next to each other share the engines' queues, so they are drawn in blocks; with several repeats,
repeats are drawn first. Exit status: 0, or 1 if the files hold nothing that can be compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from kvpush.bench.raw import CellResult, RawError, ServeRaw, read_raw
from kvpush.bench.repeats import CellKey, complete_cells

Floats = npt.NDArray[np.float64]
RESAMPLES = 4000
LEVEL = 0.95
# Of fewer requests the 99th percentile is one request or two; an interval from resampling them means nothing.
LEAST_FOR_P99 = 100
LEAST_REQUESTS = 20


def _mean(values: Floats) -> Floats:
    return np.asarray(values.mean(axis=-1))


def _p50(values: Floats) -> Floats:
    return np.asarray(np.percentile(values, 50, axis=-1))


def _p99(values: Floats) -> Floats:
    return np.asarray(np.percentile(values, 99, axis=-1))


# Name -> (field of RequestRecord, statistic over the last axis, requests that it needs).
METRICS: dict[str, tuple[str, Callable[[Floats], Floats], int]] = {
    "TTFT mean": ("ttft_ms", _mean, LEAST_REQUESTS),
    "TTFT p50": ("ttft_ms", _p50, LEAST_REQUESTS),
    "TTFT p99": ("ttft_ms", _p99, LEAST_FOR_P99),
    "hand-off p50": ("handoff_ms", _p50, LEAST_REQUESTS),
    "TPOT mean": ("tpot_ms", _mean, LEAST_REQUESTS),
    "TPOT p99": ("tpot_ms", _p99, LEAST_FOR_P99),
}


class Comparison(msgspec.Struct, kw_only=True):
    """One metric of one cell. a, b: milliseconds. ratio: b / a; low, high: its interval, None without one.

    verdict: `lower`, `higher` (of b), `no difference shown`, or why there is none.
    """

    pool: str
    isl: int
    qps: float
    metric: str
    pairs: int
    a: float
    b: float
    ratio: float
    low: float | None = None
    high: float | None = None
    verdict: str = ""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Values of the same requests in two files: of one repeat, in order of arrival; a and b of shape [n]."""

    a: Floats
    b: Floats


def paired_values(mine: Sequence[CellResult], theirs: Sequence[CellResult], field: str) -> list[Pairs]:
    """The requests that both have answered, by repeat. Raises ValueError if they were not the same requests."""
    others = {cell.repeat: cell for cell in theirs}
    found = []
    for cell in mine:
        other = others.get(cell.repeat)
        if other is None:
            continue
        if (cell.seed, cell.osl) != (other.seed, other.osl):
            raise ValueError("the two did not ask the same (--seed and --osl differ)")
        answered = {record.index: record for record in other.requests if record.error is None}
        values = [
            (getattr(record, field), getattr(answered[record.index], field))
            for record in cell.requests
            if record.error is None and record.index in answered
        ]
        both = [(a, b) for a, b in values if a is not None and b is not None]
        if both:
            columns = np.array(both, dtype=np.float64).T
            found.append(Pairs(columns[0], columns[1]))
    return found


def block_length(n: int) -> int:
    """How many neighbours are drawn together: about the cube root of n, as is usual for dependent data."""
    return max(1, round(float(np.cbrt(n))))


def resample(rng: np.random.Generator, n: int, count: int) -> npt.NDArray[np.int64]:
    """Indices of shape [count, n]: blocks of neighbours, which wrap around at the end."""
    length = block_length(n)
    blocks = -(-n // length)
    starts = rng.integers(0, n, size=(count, blocks, 1))
    return ((starts + np.arange(length)) % n).reshape(count, blocks * length)[:, :n]


def bootstrap(
    repeats: Sequence[Pairs], statistic: Callable[[Floats], Floats], rng: np.random.Generator, count: int = RESAMPLES
) -> tuple[float, float]:
    """The 95 % interval of the ratio of b's statistic to a's, each the mean over the repeats.

    Repeats are drawn with replacement, then requests within each.
    """
    drawn = np.empty((2, len(repeats), count))
    for place, pairs in enumerate(repeats):
        index = resample(rng, len(pairs.a), count)
        drawn[0, place], drawn[1, place] = statistic(pairs.a[index]), statistic(pairs.b[index])
    chosen = rng.integers(0, len(repeats), size=(len(repeats), count))
    a, b = (np.take_along_axis(each, chosen, axis=0).mean(axis=0) for each in drawn)
    tail = (1 - LEVEL) / 2 * 100
    low, high = np.percentile(b / a, [tail, 100 - tail])
    return float(low), float(high)


def compare_cell(key: CellKey, a: Sequence[CellResult], b: Sequence[CellResult], seed: int = 0) -> list[Comparison]:
    """Every metric that both have."""
    found: list[Comparison] = []
    for metric, (field, statistic, needed) in METRICS.items():
        repeats = paired_values(a, b, field)
        number = sum(len(pairs.a) for pairs in repeats)
        if not repeats:
            continue
        mine = float(np.mean([statistic(pairs.a) for pairs in repeats]))
        other = float(np.mean([statistic(pairs.b) for pairs in repeats]))
        if mine <= 0:
            continue  # a ratio to nothing says nothing
        row = Comparison(
            pool=key[0], isl=key[1], qps=key[2], metric=metric, pairs=number, a=mine, b=other, ratio=other / mine
        )
        if min(len(pairs.a) for pairs in repeats) < needed:
            row.verdict = f"too few requests ({needed} needed)"
        else:
            row.low, row.high = bootstrap(repeats, statistic, np.random.default_rng([seed, len(found)]))
            row.verdict = "lower" if row.high < 1 else "higher" if row.low > 1 else "no difference shown"
        found.append(row)
    return found


def compare(a: ServeRaw, b: ServeRaw) -> list[Comparison]:
    """All cells that both have measured. Raises ValueError if there is none, or if they did not ask the same."""
    if a.shape != b.shape:
        raise ValueError(f"the shapes differ: {a.shape} and {b.shape}")
    mine, theirs = complete_cells(a), complete_cells(b)
    both = [key for key in mine if key in theirs]
    if not both:
        raise ValueError("the two have no complete cell in common")
    return [row for key in sorted(both) for row in compare_cell(key, mine[key], theirs[key])]


def name_of(raw: ServeRaw) -> str:
    """The connector, with its variant."""
    return f"{raw.connector}+{raw.variant}" if raw.variant else raw.connector


def page(a: ServeRaw, b: ServeRaw, rows: Sequence[Comparison]) -> str:
    """The comparison as text."""
    head = ["cell", "metric", "pairs", "A ms", "B ms", "B/A", "95 %", "B is"]
    body = [
        [
            f"{row.pool}/{row.isl}/{row.qps:g}",
            row.metric,
            str(row.pairs),
            f"{row.a:.2f}",
            f"{row.b:.2f}",
            f"{row.ratio:.3f}",
            "-" if row.low is None or row.high is None else f"{row.low:.3f}-{row.high:.3f}",
            row.verdict,
        ]
        for row in rows
    ]
    widths = [max(len(row[place]) for row in [head, *body]) for place in range(len(head))]
    lines = [f"A: {name_of(a)}, {a.date}; B: {name_of(b)}, {b.date}; shape {a.shape}"]
    for name, raw in (("A", a), ("B", b)):
        lost = sum(len(cell.errors) for cell in raw.cells if cell.complete)
        if lost:
            lines.append(f"{lost} requests failed in {name}; they, and their partners, are left out")
    if a.environment != b.environment:
        lines.append(
            "measured on different machines or with different versions: the ratio is not the connectors' alone"
        )
    lines += ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in [head, *body]]
    if all(len(cells) == 1 for cells in complete_cells(a).values()):
        lines.append(
            "one repeat of each cell: the intervals do not hold what differs from run to run (use --repeats 3)"
        )
    said = len([row for row in rows if row.low is not None])
    lines.append(f"{said} intervals of 95 %: about {said * (1 - LEVEL):.1f} of them miss by chance")
    return "\n".join(lines)


def _read(path: Path) -> ServeRaw:
    raw = read_raw(path)
    if not isinstance(raw, ServeRaw):
        raise RawError(f"{path}: not a raw file of the serving benchmark")
    return raw


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="kvpush bench compare", description="Two raw files, ratios and intervals.")
    parser.add_argument("a", type=Path, help="raw file of the serving benchmark")
    parser.add_argument("b", type=Path, help="another one; ratios are B to A")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    try:
        a, b = _read(args.a), _read(args.b)
        rows = compare(a, b)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(msgspec.json.encode(rows).decode() if args.json else page(a, b, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
