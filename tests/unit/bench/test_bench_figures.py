"""Figures from raw files: which are drawn, what they show, and that they can be drawn again."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_fakes import cell, record, serve_raw

from kvpush.bench.figures import (
    LEG_COLOURS,
    STYLES,
    breakdown_rows,
    draw_breakdown,
    draw_handoff,
    draw_sweep,
    lines_of,
    main,
    sweeps,
)
from kvpush.bench.handoffs import HandoffRecord
from kvpush.bench.raw import Raw, write_raw
from kvpush.transfer.handoff import LEGS

matplotlib = pytest.importorskip("matplotlib", reason="the extra bench is not installed")
matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

pytestmark = pytest.mark.unit


def sources() -> list[tuple[Path, Raw]]:
    hops = [HandoffRecord(transfer_id="t", legs_ms=dict.fromkeys(LEGS, 2.0)) for _ in range(3)]
    made: list[tuple[Path, Raw]] = []
    for connector, factor, told in (("vllm-push", 1.0, []), ("kvpush-push", 0.5, hops)):
        cells = [
            cell(
                [record(i, ttft_ms=isl * factor + i, handoff_ms=10.0 * factor + i, tpot_ms=2.0) for i in range(4)],
                isl=isl, qps=qps, repeat=repeat, handoffs=told,
            )
            for isl in (1024, 4096, 8192, 16_000) for qps in (2.0, 8.0) for repeat in (0, 1)
        ]  # fmt: skip
        made.append((Path(f"{connector}.json"), serve_raw(connector, cells)))
    made.append((Path("v.json"), serve_raw("kvpush-push", [cell([record()], isl=1024, qps=4.0)], variant="x")))
    return made


def test_four_panels_with_every_connector_and_both_statistics() -> None:
    (((shape, pool), cells),) = sweeps(sources()).items()
    assert (shape, pool) == ("0.6b", "fresh")
    figure = draw_sweep(pyplot, cells, "title", "TTFT", "ms")
    assert [axis.get_title() for axis in figure.axes] == [
        f"{isl} prompt tokens" for isl in ("1,024", "4,096", "8,192", "16,000")
    ]
    assert {axis.get_ylabel() for axis in figure.axes} == {"TTFT (ms)"}
    assert {axis.get_xlabel() for axis in figure.axes} == {"requests per second"}
    (legend,) = figure.legends
    assert sorted(text.get_text() for text in legend.get_texts()) == [
        "kvpush-push, mean", "kvpush-push, p99", "vllm-push, mean", "vllm-push, p99"
    ]  # fmt: skip
    pyplot.close(figure)


def test_the_numbers_drawn_are_those_of_the_raw_files() -> None:
    cells = sweeps(sources())["0.6b", "fresh"]
    assert lines_of(cells, 4096, "kvpush-push", "ttft_mean_ms") == [
        (2.0, 2049.5, 2049.5, 2049.5),
        (8.0, 2049.5, 2049.5, 2049.5),
    ]
    figure = draw_handoff(pyplot, cells, "title")
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    assert list(lines["kvpush-push"].get_xdata()) == [5.0, *sorted([5.0, 6.0, 7.0, 8.0] * 2)]
    assert max(lines["vllm-push"].get_ydata()) == 1.0
    pyplot.close(figure)


def test_bars_hold_every_leg_of_those_who_tell_them() -> None:
    cells = sweeps(sources())["0.6b", "fresh"]
    rows = breakdown_rows(cells)
    assert len(rows) == 8
    assert all(label.startswith("kvpush-push") for label, _ in rows)
    figure = draw_breakdown(pyplot, rows, "title")
    assert len(figure.axes[0].containers) == len(LEGS)
    ends = [bar.get_x() + bar.get_width() for bar in figure.axes[0].containers[-1]]
    assert ends == pytest.approx([2.0 * len(LEGS)] * 8)
    assert "ms" in figure.axes[0].get_xlabel()
    pyplot.close(figure)


def test_styles_differ_in_more_than_colour() -> None:
    for place in range(3):
        assert len({str(style[place]) for style in STYLES.values()}) == len(STYLES)
    assert list(LEG_COLOURS) == list(LEGS)
    assert len(set(LEG_COLOURS.values())) == len(LEGS)


def test_variants_are_drawn_only_if_asked_for() -> None:
    assert (1024, 4.0) not in sweeps(sources())["0.6b", "fresh"]
    assert list(sweeps(sources(), variants=True)["0.6b", "fresh"][1024, 4.0]) == ["kvpush-push+x"]


def test_both_formats_are_written_and_drawn_again_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, raw in sources():
        write_raw(tmp_path / "raw" / path.name, raw)
    made = []
    for folder in ("one", "two"):
        assert main([str(tmp_path / "raw"), "--out", str(tmp_path / folder)]) == 0
        made.append({path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()})
    kinds = ("ttft", "tpot", "handoff", "breakdown")
    assert set(made[0]) == {f"{kind}-0.6b-fresh.{end}" for kind in kinds for end in ("png", "svg")}
    assert made[0] == made[1]
    assert capsys.readouterr().out.count(".svg") == 8


def test_nothing_to_draw_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_raw(tmp_path / "a.json", serve_raw("vllm-push", []))
    assert main([str(tmp_path / "a.json"), "--out", str(tmp_path / "out")]) == 1
    assert "no complete cell" in capsys.readouterr().err
