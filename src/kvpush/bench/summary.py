"""Turns raw files into one flat map of figures and a table beside it.

    kvpush bench summary                       all files of bench/results/raw
    kvpush bench summary RAW... --out DIR      these; summary.json and README.md go to DIR

Without arguments it also writes the pages that are made from summary.json (`kvpush bench results`).

No figure comes from anywhere else. Where several raw files hold the same figure, the newest measurement counts.
Exit status: 0, or 1 if a raw file cannot be used; then nothing is written.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from kvpush.bench.connectors import CONNECTORS
from kvpush.bench.raw import POOLS, CellResult, PlanRaw, Raw, RawError, ServeRaw, SoakRaw, TransferRaw, read_raw
from kvpush.bench.repeats import complete_cells, spreads, unit_of
from kvpush.bench.report import machine_and_versions, markdown

DEFAULT_OUT = Path("bench/results")
SERVE_SHAPES = ("0.6b", "8b", "32b", "smollm2")
PLAN_CASES = ("contiguous", "descending", "aged", "random")
TRANSFER_DEVICES = ("h200", "cpu")
TRANSFER_TABLES = ("contiguous", "aged", "random")
TRANSFER_PATHS = ("direct", "staged", "peer", "auto")
# The geometry of vLLM's own layout (K and V side by side); others are in the table only.
TRANSFER_GEOMETRY = (36, 65_536)


class Figure(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One number: its unit, the command line that measured it, when, on what, and the raw file it was computed from.

    With several repeats value is their median, and low and high are the lowest and the highest of them.
    """

    value: float
    unit: str
    command: str
    date: str
    raw: str
    machine: str = ""
    versions: str = ""
    repeats: int = 1
    low: float | None = None
    high: float | None = None


Measured = Iterator[tuple[str, Figure]]


def _number(value: float) -> str:
    """2 for 2.0, 0.9 for 0.9: as one writes it on the command line."""
    return f"{value:g}"


def _check(path: Path, what: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise RawError(f"{path}: unknown {what} {value!r}; known: {', '.join(known)}")


def _check_cell(path: Path, cell: CellResult) -> None:
    where = f"{path}: cell {cell.pool}/{cell.isl}/{_number(cell.qps)}"
    if cell.complete and len(cell.requests) != cell.n:
        raise RawError(f"{where}: says it is complete with {len(cell.requests)} of {cell.n} requests")
    for record in cell.requests:
        if record.error is None and (
            record.ttft_ms is None or record.prefill_response_ms is None or record.tokens != cell.osl
        ):
            raise RawError(f"{where}: request {record.index} has neither an error nor a whole answer")


def serve_figures(path: Path, raw: ServeRaw, raw_name: str) -> Measured:
    """Figures of the complete cells. Requests that failed count in none of them, and the table shows how many.

    Goodput is left out: it is a figure of an SLO, which its name does not tell; the table has it.
    """
    _check(path, "shape", raw.shape, SERVE_SHAPES)
    _check(path, "connector", raw.connector, CONNECTORS)
    connector = f"{raw.connector}+{raw.variant}" if raw.variant else raw.connector
    for cell in raw.cells:
        _check(path, "pool", cell.pool, POOLS)
        _check_cell(path, cell)
    machine, versions = machine_and_versions(raw)
    for (pool, isl, qps), cells in complete_cells(raw).items():
        prefix = f"serve/{raw.shape}/{pool}/{isl}/{_number(qps)}/{connector}"
        for metric, spread in spreads(cells, None).items():
            several = spread.repeats > 1
            yield (
                f"{prefix}/{metric}",
                Figure(
                    value=round(spread.value, 4),
                    unit=unit_of(metric),
                    command=raw.command,
                    date=max(cell.date for cell in cells),
                    raw=raw_name,
                    machine=machine,
                    versions=versions,
                    repeats=spread.repeats,
                    low=round(spread.low, 4) if several else None,
                    high=round(spread.high, 4) if several else None,
                ),
            )


def transfer_figures(path: Path, raw: TransferRaw, raw_name: str) -> Measured:
    """Time and rate of each row with the standard geometry."""
    machine, versions = machine_and_versions(raw)
    for row in raw.rows:
        _check(path, "device", row.device, TRANSFER_DEVICES)
        _check(path, "table", row.table, TRANSFER_TABLES)
        _check(path, "path", row.path, TRANSFER_PATHS)
        if not row.verified:
            raise RawError(f"{path}: {row.tokens} tokens, {row.table}, {row.path}: bytes were not verified")
        if row.ms <= 0 or not row.samples_ms:
            raise RawError(f"{path}: {row.tokens} tokens, {row.table}, {row.path}: no time")
        if (row.regions, row.page_bytes) != TRANSFER_GEOMETRY:
            continue
        prefix = f"transfer/{row.device}/{row.tokens}/{row.table}/{row.path}"
        for metric, value, unit in (("ms", row.ms, "ms"), ("gb_s", row.gb_s, "GB/s")):
            yield (
                f"{prefix}/{metric}",
                Figure(
                    value=round(value, 4),
                    unit=unit,
                    command=raw.command,
                    date=raw.date,
                    raw=raw_name,
                    machine=machine,
                    versions=versions,
                ),
            )


def plan_figures(path: Path, raw: PlanRaw, raw_name: str) -> Measured:
    """Planning time of each case."""
    for row in raw.rows:
        _check(path, "case", row.case, PLAN_CASES)
        if row.ms <= 0:
            raise RawError(f"{path}: case {row.case}: {row.ms} ms is no time")
        yield (
            f"plan/{row.case}/ms",
            Figure(value=round(row.ms, 4), unit="ms", command=raw.command, date=raw.date, raw=raw_name),
        )


def soak_figures(path: Path, raw: SoakRaw, raw_name: str) -> Measured:
    """How many requests came to what, and how many faults they met."""
    if raw.outcomes.get("wrong", 0) + raw.outcomes.get("stuck", 0) != len(raw.bad):
        raise RawError(f"{path}: {len(raw.bad)} bad requests are described, the outcomes say otherwise")
    counts = {"requests": raw.requests, "faults": len(raw.faults), "problems": len(raw.problems)}
    for outcome in ("right", "error", "aborted", "wrong", "stuck"):
        counts[outcome] = raw.outcomes.get(outcome, 0)
    for name, count in counts.items():
        yield (
            f"soak/{raw.link}/{name}",
            Figure(value=count, unit="", command=raw.command, date=raw.date, raw=raw_name),
        )


def figures_of(path: Path, raw: Raw, raw_name: str) -> Measured:
    """Every figure of one raw file. Raises RawError naming the file."""
    if isinstance(raw, ServeRaw):
        return serve_figures(path, raw, raw_name)
    if isinstance(raw, TransferRaw):
        return transfer_figures(path, raw, raw_name)
    if isinstance(raw, SoakRaw):
        return soak_figures(path, raw, raw_name)
    return plan_figures(path, raw, raw_name)


def merge(raws: Iterable[tuple[Path, Raw]], relative_to: Path) -> dict[str, Figure]:
    """The newest figure of each name, sorted by name. relative_to: where the names of raw files start.

    Raises RawError if a file is malformed, or if two differ in what they asked under one name.
    """
    merged: dict[str, Figure] = {}
    asked: dict[str, tuple[int, Path]] = {}
    for path, raw in raws:
        raw_name = os.path.relpath(path, relative_to)
        if isinstance(raw, ServeRaw):
            for cell in raw.cells:
                key = f"{raw.shape}/{raw.variant}/{cell.isl}/{_number(cell.qps)}"
                osl, first = asked.setdefault(key, (cell.osl, path))
                if osl != cell.osl:
                    raise RawError(f"{path}: {cell.osl} output tokens at {key}, but {osl} in {first}")
        for name, figure in figures_of(path, raw, raw_name):
            if name not in merged or merged[name].date <= figure.date:
                merged[name] = figure
    return dict(sorted(merged.items()))


def raw_files(directory: Path) -> list[Path]:
    """The JSON files of a folder, by name. Raises RawError if there are none."""
    found = sorted(directory.glob("*.json"))
    if not found:
        raise RawError(f"{directory}: no raw files")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="kvpush bench summary", description="Raw files to figures.")
    parser.add_argument("raw", nargs="*", type=Path, help="raw files or folders (default: OUT/raw)")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="default: bench/results")
    args = parser.parse_args(argv)
    try:
        given = args.raw or [args.out / "raw"]
        paths = [path for each in given for path in (raw_files(each) if each.is_dir() else [each])]
        raws = [(path, read_raw(path)) for path in paths]
        merged = merge(raws, args.out)
    except RawError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    table = markdown(raws, args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(merged), indent=1) + b"\n"
    (args.out / "summary.json").write_bytes(text)
    (args.out / "README.md").write_text(table)
    print(table)
    if not args.raw and args.out == DEFAULT_OUT:
        # Here, because that module reads what this one writes.
        from kvpush.bench import results

        results.main([])
    print(f"{len(merged)} figures from {len(paths)} raw files in {args.out / 'summary.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
