"""Draws figures from the raw files, in PNG and SVG.

    kvpush bench figures                          all files of bench/results/raw, into bench/results/figures
    kvpush bench figures RAW... --out DIR

For each shape and pool: `ttft-*` and `tpot-*` over the request rate, a panel per prompt length; `handoff-*`, the
distribution of the hand-off; `breakdown-*`, the legs of the hand-off stacked, for connectors that keep records. Needs
the extra `bench` (matplotlib). Exit status: 0; 1 if a raw file cannot be used or there is nothing to draw.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvpush.bench.handoffs import HandoffRecord, leg_figures
from kvpush.bench.raw import Raw, RawError, ServeRaw, read_raw
from kvpush.bench.record import values_of
from kvpush.bench.repeats import spreads
from kvpush.bench.report import Group, connector_order, machine_and_versions, newest_cells
from kvpush.bench.summary import raw_files
from kvpush.transfer.handoff import LEGS

# The palette of Okabe and Ito, which people with any kind of colour blindness can tell apart; marks differ as well.
STYLES = {
    "vllm-pull": ("#E69F00", "s", (0, (5, 2))),
    "vllm-push": ("#0072B2", "o", (0, (2, 1))),
    "kvpush-push": ("#D55E00", "D", "solid"),
    "kvpush-pull": ("#009E73", "^", (0, (6, 1, 1, 1))),
}
OTHERS = (("#CC79A7", "v", "solid"), ("#56B4E9", "P", "dashed"), ("#000000", "X", "dotted"))
# P's legs in blue, the way between in grey, D's in orange: each darker than the one before.
LEG_COLOURS = dict(
    zip(
        LEGS,
        ["#C6DBEF", "#85B7DB", "#3F8DC4", "#08519C", "#9A9A9A", "#FDD0A2", "#FDA45B", "#E6711F", "#8C3B04"],
        strict=True,
    )
)
PANEL_INCHES = (4.6, 3.1)
DPI = 150
# (pool, shape) -> (ISL, QPS) -> connector -> its measurements
Cells = dict[tuple[int, float], dict[str, Group]]


def sweeps(sources: Sequence[tuple[Path, Raw]], variants: bool = False) -> dict[tuple[str, str], Cells]:
    """(shape, pool) -> the newest complete cells. variants: those of non-standard set-ups as well."""
    found: dict[tuple[str, str], Cells] = {}
    for (shape, pool, isl, qps), row in sorted(newest_cells(sources).items()):
        kept = {name: group for name, group in row.items() if variants or "+" not in name}
        if kept:
            found.setdefault((shape, pool), {})[isl, qps] = kept
    return found


def style_of(name: str, names: Sequence[str]) -> tuple[str, str, Any]:
    """(colour, mark, line) of a connector; variants take what is left."""
    if name in STYLES:
        return STYLES[name]
    rest = [each for each in names if each not in STYLES]
    return OTHERS[rest.index(name) % len(OTHERS)]


def connectors_of(cells: Cells) -> list[str]:
    return sorted({name for row in cells.values() for name in row}, key=connector_order)


def lines_of(cells: Cells, isl: int, name: str, metric: str) -> list[tuple[float, float, float, float]]:
    """(QPS, median, lowest, highest repeat) of one connector and prompt length, by QPS."""
    points = []
    for (length, qps), row in sorted(cells.items()):
        if length == isl and name in row:
            found = spreads(row[name].cells, None).get(metric)
            if found is not None:
                points.append((qps, found.value, found.low, found.high))
    return points


def _panels(pyplot: Any, isls: Sequence[int]) -> tuple[Any, list[Any]]:
    columns = min(2, len(isls))
    rows = -(-len(isls) // columns)
    width, height = PANEL_INCHES
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(width * columns, height * rows + 1.1), squeeze=False, layout="constrained"
    )
    flat = list(axes.flat)
    for spare in flat[len(isls) :]:
        spare.remove()
    return figure, flat[: len(isls)]


def _legend(figure: Any, axes: Sequence[Any], **options: Any) -> None:
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        figure.legend(found.values(), found.keys(), loc="outside lower center", frameon=False, **options)


def draw_sweep(pyplot: Any, cells: Cells, title: str, what: str, unit: str) -> Any:
    """Mean (solid mark, with the range of the repeats) and 99th percentile (hollow mark) over QPS; a panel per ISL."""
    isls, names = sorted({isl for isl, _ in cells}), connectors_of(cells)
    figure, axes = _panels(pyplot, isls)
    for axis, isl in zip(axes, isls, strict=True):
        for name in names:
            colour, mark, line = style_of(name, names)
            for metric, hollow in (("mean", False), ("p99", True)):
                points = lines_of(cells, isl, name, f"{what.lower()}_{metric}_ms")
                if not points:
                    continue
                qps, value, low, high = zip(*points, strict=True)
                error = [
                    [v - a for v, a in zip(value, low, strict=True)],
                    [b - v for v, b in zip(value, high, strict=True)],
                ]
                axis.errorbar(
                    qps, value, yerr=error, color=colour, marker=mark, linestyle=line, capsize=3, markersize=6,
                    linewidth=0.9 if hollow else 1.8, markerfacecolor="white" if hollow else colour,
                    label=f"{name}, {metric}",
                )  # fmt: skip
        axis.set_title(f"{isl:,} prompt tokens")
        axis.set_xlabel("requests per second")
        axis.set_ylabel(f"{what} ({unit})")
        axis.set_ylim(bottom=0)
        rates = sorted({qps for length, qps in cells if length == isl})
        axis.set_xticks(rates, [f"{qps:g}" for qps in rates])
        if len(rates) == 1:
            axis.set_xlim(rates[0] * 0.5, rates[0] * 1.5)
        axis.grid(alpha=0.3)
    _legend(figure, axes, ncols=len(names))
    figure.suptitle(title)
    return figure


def draw_handoff(pyplot: Any, cells: Cells, title: str) -> Any:
    """The distribution of the hand-off at the highest rate that was measured, a panel per ISL."""
    isls, names = sorted({isl for isl, _ in cells}), connectors_of(cells)
    figure, axes = _panels(pyplot, isls)
    for axis, isl in zip(axes, isls, strict=True):
        qps = max(rate for length, rate in cells if length == isl)
        for name, group in sorted(cells[isl, qps].items(), key=lambda item: connector_order(item[0])):
            values = sorted(value for cell in group.cells for value in values_of(cell.requests, "handoff_ms"))
            if values:
                colour, _, line = style_of(name, names)
                share = [(place + 1) / len(values) for place in range(len(values))]
                axis.step([values[0], *values], [0.0, *share], where="post", color=colour, linestyle=line, label=name)
        axis.set_title(f"{isl:,} prompt tokens, {qps:g} requests per second")
        axis.set_xlabel("hand-off (ms): from P's answer to the first token")
        axis.set_ylabel("share of requests")
        axis.set_ylim(0, 1)
        axis.axhline(0.5, color="black", linewidth=0.5, alpha=0.5)
        axis.grid(alpha=0.3)
    _legend(figure, axes, ncols=len(names))
    figure.suptitle(title)
    return figure


def breakdown_rows(cells: Cells) -> list[tuple[str, list[HandoffRecord]]]:
    """(label, hand-offs) of every cell whose engines have told their legs."""
    rows = []
    for (isl, qps), row in sorted(cells.items()):
        for name in sorted(row, key=connector_order):
            records = [each for cell in row[name].cells for each in cell.handoffs]
            if records:
                rows.append((f"{name}\n{isl:,} tokens, {qps:g}/s", records))
    return rows


def draw_breakdown(pyplot: Any, rows: Sequence[tuple[str, list[HandoffRecord]]], title: str) -> Any:
    """Medians of the legs, stacked; behind each bar the median of the whole."""
    figure, axis = pyplot.subplots(figsize=(9.2, 0.62 * len(rows) + 2.6), layout="constrained")
    places = range(len(rows))
    left = [0.0] * len(rows)
    totals = []
    for leg, text in LEGS.items():
        medians = [leg_figures(records)[f"leg_{leg}_p50_ms"] for _, records in rows]
        axis.barh(
            places, medians, left=left, color=LEG_COLOURS[leg], edgecolor="white", linewidth=0.6, height=0.7,
            label=f"{leg}: {text}",
        )  # fmt: skip
        left = [before + added for before, added in zip(left, medians, strict=True)]
    for place, (_, records) in enumerate(rows):
        totals.append(leg_figures(records)["kernel_to_token_p50_ms"])
        axis.text(left[place], place, f"  {totals[-1]:.1f} ms", va="center")
    axis.set_yticks(places, [label for label, _ in rows])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.12 * max([*left, *totals]))
    axis.set_xlabel("ms since the end of P's last kernel: medians of the legs, and the median of the whole")
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    _legend(figure, [axis], ncols=2, fontsize="small")
    figure.suptitle(title)
    return figure


def figures_of(pyplot: Any, sources: Sequence[tuple[Path, Raw]], variants: bool = False) -> Iterator[tuple[str, Any]]:
    """(file name without its end, figure)."""
    for (shape, pool), cells in sweeps(sources, variants).items():
        about = _about(sources, shape, cells)
        makers: dict[str, Callable[[], Any]] = {
            "ttft": lambda c=cells, a=about: draw_sweep(pyplot, c, f"Time to first token, {a}", "TTFT", "ms"),  # type: ignore[misc]
            "tpot": lambda c=cells, a=about: draw_sweep(pyplot, c, f"Time per output token, {a}", "TPOT", "ms"),  # type: ignore[misc]
            "handoff": lambda c=cells, a=about: draw_handoff(pyplot, c, f"Hand-off, {a}"),  # type: ignore[misc]
        }
        for kind, make in makers.items():
            yield f"{kind}-{shape}-{pool}", make()
        rows = breakdown_rows(cells)
        if rows:
            yield f"breakdown-{shape}-{pool}", draw_breakdown(pyplot, rows, f"Where the hand-off goes, {about}")


def _about(sources: Sequence[tuple[Path, Raw]], shape: str, cells: Cells) -> str:
    """Shape, pool, machine and day, for a title."""
    paths = {group.path for row in cells.values() for group in row.values()}
    machines = sorted(
        {machine_and_versions(raw)[0] for path, raw in sources if path in paths and isinstance(raw, ServeRaw)}
    )
    pools = sorted({cell.pool for row in cells.values() for group in row.values() for cell in group.cells})
    day = max(group.date for row in cells.values() for group in row.values())[:10]
    return f"{shape}, {'/'.join(pools)} pools\n{', '.join(filter(None, machines)) or 'unknown machine'}, {day}"


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """Writes both formats. The same raw files give the same bytes of SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    figure.savefig(paths[0], dpi=DPI)
    figure.savefig(paths[1], metadata={"Date": None})
    return paths


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="kvpush bench figures", description="Draws figures from raw files.")
    parser.add_argument("raw", nargs="*", type=Path, help="raw files or folders (default: bench/results/raw)")
    parser.add_argument(
        "--out", type=Path, default=Path("bench/results/figures"), help="default: bench/results/figures"
    )
    parser.add_argument("--variants", action="store_true", help="draw non-standard set-ups, too")
    args = parser.parse_args(argv)
    try:
        import matplotlib
    except ImportError:
        print("error: matplotlib is missing; pip install 'kvpush[bench]'", file=sys.stderr)
        return 1
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "kvpush", "font.size": 10, "axes.titlesize": 11})
    from matplotlib import pyplot

    try:
        given = args.raw or [Path("bench/results/raw")]
        paths = [path for each in given for path in (raw_files(each) if each.is_dir() else [each])]
        sources = [(path, read_raw(path)) for path in paths]
    except RawError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    count = 0
    for name, figure in figures_of(pyplot, sources, args.variants):
        for path in save(figure, args.out, name):
            print(path)
            count += 1
        pyplot.close(figure)
    if not count:
        print("error: no complete cell to draw", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
