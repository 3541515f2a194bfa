"""Writes the page of results, and the figures in the README, from summary.json: no number is typed by hand.

kvpush bench results           docs/results.md and the marked part of README.md
kvpush bench results --check   exit status 1 if they are not what summary.json says
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvpush.bench.report import table
from kvpush.bench.summary import Figure

SUMMARY = Path("bench/results/summary.json")
PAGE = Path("docs/results.md")
README = Path("README.md")
BEGIN, END = "<!-- results: made by `kvpush bench results` -->", "<!-- end of results -->"
# Shape -> what it is, in words.
SHAPES = {
    "0.6b": "Qwen3-0.6B's layers, random weights",
    "8b": "Qwen3-8B's layers, random weights",
    "32b": "Qwen3-32B",
    "smollm2": "SmolLM2-135M-Instruct",
}
OURS, THEIRS = "kvpush-push", ("vllm-push", "vllm-pull")
METRICS = {
    "ttft_mean_ms": "TTFT mean",
    "ttft_p99_ms": "TTFT p99",
    "handoff_p50_ms": "hand-off p50",
    "tpot_mean_ms": "TPOT mean",
    "tpot_p99_ms": "TPOT p99",
}
# Metrics of the README's table.
SHORT = ("ttft_mean_ms", "handoff_p50_ms", "tpot_mean_ms")
# Ratios nearer to 1 than this are called equal.
EQUAL = 0.02
Summary = Mapping[str, Figure]


@dataclass(frozen=True, slots=True)
class Row:
    """One metric of one cell: ours and what it is compared with."""

    shape: str
    pool: str
    isl: int
    qps: float
    metric: str
    other: str
    ours: Figure
    theirs: Figure

    @property
    def ratio(self) -> float:
        return self.ours.value / self.theirs.value


def read_summary(path: Path) -> dict[str, Figure]:
    """Raises ValueError naming the file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Figure])
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path}: {error}") from None


def rows_of(summary: Summary) -> list[Row]:
    """Every cell that kvpush and one of vLLM's connectors have measured, against each of them."""
    rows = []
    for name, figure in summary.items():
        parts = name.split("/")
        if parts[0] != "serve" or parts[5] != OURS or parts[6] not in METRICS:
            continue
        for other in THEIRS:
            theirs = summary.get("/".join([*parts[:5], other, parts[6]]))
            if theirs is not None and theirs.value > 0:
                rows.append(Row(parts[1], parts[2], int(parts[3]), float(parts[4]), parts[6], other, figure, theirs))
    metrics = list(METRICS)
    return sorted(
        rows,
        key=lambda r: (r.shape, r.other != "vllm-push", r.pool != "fresh", r.isl, r.qps, metrics.index(r.metric)),
    )


def _value(figure: Figure) -> str:
    spread = f" [{figure.low:.1f}-{figure.high:.1f}]" if figure.low is not None and figure.high is not None else ""
    return f"{figure.value:.1f}{spread}" if figure.value >= 10 else f"{figure.value:.2f}{spread}"


def _cells(rows: Sequence[Row], metrics: Sequence[str]) -> list[list[str]]:
    """A line per cell: for each metric theirs, ours and the ratio."""
    found: dict[tuple[str, int, float], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row.pool, row.isl, row.qps), {})[row.metric] = row
    lines = []
    for (pool, isl, qps), by_metric in found.items():
        line = [pool, f"{isl:,}", f"{qps:g}"]
        for metric in metrics:
            known = by_metric.get(metric)
            line.append("-" if known is None else f"{_value(known.theirs)} / {_value(known.ours)} ({known.ratio:.2f}x)")
        lines.append(line)
    return lines


def verdicts(rows: Sequence[Row]) -> list[str]:
    """For each metric in how many cells kvpush is better, equal or worse, and the extremes."""
    lines = []
    for metric, text in METRICS.items():
        ratios = {f"{r.pool} {r.isl:,} tokens at {r.qps:g}/s": r.ratio for r in rows if r.metric == metric}
        if not ratios:
            continue
        better = sum(ratio < 1 - EQUAL for ratio in ratios.values())
        worse = sum(ratio > 1 + EQUAL for ratio in ratios.values())
        best, worst = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
        lines.append(
            f"- **{text}**: lower in {better}, equal (within {EQUAL:.0%}) in {len(ratios) - better - worse}, higher in "
            f"{worse} of {len(ratios)} cells; from {ratios[best]:.2f}x ({best}) to {ratios[worst]:.2f}x ({worst})"
        )
    return lines


def _section(shape: str, other: str, rows: Sequence[Row]) -> str:
    head = ["pool", "ISL", "QPS", *(f"{text}" for text in METRICS.values())]
    figures = [figure for row in rows for figure in (row.ours, row.theirs)]
    days = sorted({figure.date[:10] for figure in figures})
    about = sorted({f"{figure.machine}; {figure.versions}" for figure in figures if figure.machine})
    raws = sorted({figure.raw for figure in figures})
    links = ", ".join(f"[{Path(raw).name}](../bench/results/{raw})" for raw in raws)
    least = min(figure.repeats for figure in figures)
    runs = (
        "Each cell was measured once, so a difference of some percent may be chance."
        if least == 1
        else f"Medians of at least {least} repeats, with the lowest and the highest in brackets."
    )
    return "\n".join(
        [
            f"## {SHAPES.get(shape, shape)}: {OURS} against {other}\n",
            f"{', '.join(days)}; {'; '.join(about)}. {runs}\n",
            f"Milliseconds: {other} / {OURS} (ratio; below 1 is better for kvpush).\n",
            table(head, _cells(rows, list(METRICS))),
            *verdicts(rows),
            f"\nRaw files: {links}\n",
        ]
    )


def _legs(summary: Summary) -> str:
    """The legs of the hand-off, medians; empty where nobody has measured them."""
    found: dict[str, dict[str, Figure]] = {}
    for name, figure in summary.items():
        parts = name.split("/")
        if parts[0] == "serve" and parts[6].endswith("_p50_ms") and parts[6].startswith(("leg_", "kernel_")):
            found.setdefault(" ".join(parts[1:6]), {})[parts[6].removeprefix("leg_").removesuffix("_p50_ms")] = figure
    if not found:
        return ""
    legs = list(dict.fromkeys(leg for row in found.values() for leg in row))
    rows = [[cell, *(_value(row[leg]) if leg in row else "-" for leg in legs)] for cell, row in found.items()]
    return (
        "## Where the hand-off goes\n\nMedians of the legs in milliseconds, from the end of P's last kernel to the "
        "client's first token ([reproduce.md](reproduce.md) says what each is).\n\n"
        + table(["shape, pool, ISL, QPS, connector", *(leg.replace("_", " ") for leg in legs)], rows)
    )


def _transfers(summary: Summary) -> str:
    rows = []
    for name, figure in summary.items():
        parts = name.split("/")
        if parts[0] == "transfer" and parts[5] == "ms":
            rate = summary["/".join([*parts[:5], "gb_s"])]
            rows.append(
                [parts[1], f"{int(parts[2]):,}", parts[3], parts[4], _value(figure), _value(rate), figure.date[:10]]
            )
    if not rows:
        return ""
    head = ["device", "tokens", "block table", "path", "ms", "GB/s", "date"]
    return "## Raw transfers\n\n36 regions of 64 KiB pages, one process to another.\n\n" + table(head, rows)


def page(summary: Summary) -> str:
    """docs/results.md."""
    rows = rows_of(summary)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.shape, row.other), []).append(row)
    head = (
        "# Results\n\nMade by `kvpush bench results` from [summary.json](../bench/results/summary.json); do not edit. "
        "[reproduce.md](reproduce.md) says how each number is measured and what its name means; "
        "[bench/results](../bench/results/README.md) has every cell, warnings included. Losses stand beside gains: of "
        "every cell that both connectors have measured, nothing is left out.\n"
    )
    missing = [other for other in THEIRS if not any(row.other == other for row in rows)]
    if missing:
        head += f"\nNot measured in the same cells: {', '.join(missing)}.\n"
    sections = [_section(shape, other, group) for (shape, other), group in groups.items()]
    return "\n".join(each for each in [head, *sections, _legs(summary), _transfers(summary)] if each)


def readme_part(summary: Summary) -> str:
    """What stands between the marks in the README: every cell on GPUs, in three metrics."""
    lines = [BEGIN, ""]
    shapes = dict.fromkeys(row.shape for row in rows_of(summary) if row.other == "vllm-push" and row.shape != "smollm2")
    for shape in shapes:
        rows = [row for row in rows_of(summary) if row.shape == shape and row.other == "vllm-push"]
        cells = _cells([row for row in rows if row.metric in SHORT], SHORT)
        machine = next((row.ours.machine for row in rows if row.ours.machine), "")
        versions = next((row.ours.versions for row in rows if row.ours.versions), "")
        day = max(row.ours.date for row in rows)[:10]
        lines.append(
            f"{SHAPES.get(shape, shape)}; {machine}; {versions}; {day}. vLLM's push connector / kvpush, in ms:"
        )
        lines += ["", table(["pool", "ISL", "QPS", *(METRICS[metric] for metric in SHORT)], cells)]
    return "\n".join([*lines, END])


def with_part(text: str, part: str) -> str:
    """A README with its marked part replaced. Raises ValueError if the marks are not there."""
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin:
        raise ValueError(f"{README} has no part between {BEGIN} and {END}")
    return text[:begin] + part + text[end + len(END) :]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="kvpush bench results", description="summary.json to docs and README.")
    parser.add_argument("--check", action="store_true", help="only look whether they are up to date")
    args = parser.parse_args(argv)
    try:
        summary = read_summary(SUMMARY)
        wanted = {PAGE: page(summary), README: with_part(README.read_text(), readme_part(summary))}
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if args.check:
        for path in stale:
            print(f"error: {path} is not what {SUMMARY} says; run kvpush bench results", file=sys.stderr)
        return 1 if stale else 0
    for path, text in wanted.items():
        path.write_text(text)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
