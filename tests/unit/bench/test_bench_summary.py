"""Raw files to figures: names, merging, refusals, and the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bench_fakes import cell, record, serve_raw, soak_raw, transfer_raw, write_json

from kvpush.bench.handoffs import HandoffRecord
from kvpush.bench.raw import PlanRaw, PlanRow, Raw, RawError, Slo, SoakRequest, read_raw, write_raw
from kvpush.bench.summary import main
from kvpush.transfer.handoff import LEGS

pytestmark = pytest.mark.unit

PLAN = {
    "what": "plan",
    "date": "2026-01-02T03:04:05Z",
    "command": "python -m kvpush.bench.plan",
    "rows": [{"case": "aged", "ms": 1.25, "descriptors": 27706, "runs": 906}],
}


def saved(path: Path, raw: Raw) -> Path:
    write_raw(path, raw)
    return path


def summary(out: Path) -> dict[str, Any]:
    return json.loads((out / "summary.json").read_text())


def test_serve_figures_have_the_agreed_names_units_and_sources(tmp_path: Path) -> None:
    raw = serve_raw("kvpush-push", [cell([record(0), record(1, ttft_ms=35.0, handoff_ms=25.0)], isl=1024, qps=8.0)])
    saved(tmp_path / "raw" / "a.json", raw)
    assert main(["--out", str(tmp_path)]) == 0
    got = summary(tmp_path)
    assert set(got) == {
        f"serve/0.6b/fresh/1024/8/kvpush-push/{metric}"
        for metric in (
            "ttft_mean_ms",
            "ttft_p99_ms",
            "handoff_p50_ms",
            "prefill_response_mean_ms",
            "tpot_mean_ms",
            "tpot_p99_ms",
        )
    }
    assert got["serve/0.6b/fresh/1024/8/kvpush-push/ttft_mean_ms"] == {
        "value": 30.0,
        "unit": "ms",
        "command": "python -m kvpush.bench.serve --some",
        "date": "2026-01-02T03:04:05Z",
        "raw": "raw/a.json",
        "machine": "2 x H200",
        "versions": "vllm 0.26.0",
    }


def test_repeats_give_their_median_and_their_range(tmp_path: Path) -> None:
    cells = [cell([record(ttft_ms=value)], repeat=place) for place, value in enumerate((30.0, 10.0, 11.0))]
    saved(tmp_path / "raw" / "a.json", serve_raw("kvpush-push", cells))
    assert main(["--out", str(tmp_path)]) == 0
    got = summary(tmp_path)["serve/0.6b/fresh/64/2/kvpush-push/ttft_mean_ms"]
    assert (got["value"], got["low"], got["high"], got["repeats"]) == (11.0, 10.0, 30.0, 3)
    assert "| 11.00 [10.00-30.00] |" in (tmp_path / "README.md").read_text()


def test_legs_and_goodput_stand_in_the_table(tmp_path: Path) -> None:
    told = [HandoffRecord(transfer_id="t", legs_ms=dict.fromkeys(LEGS, 2.0))]
    raw = serve_raw("kvpush-push", [cell([record()], handoffs=told, wall_s=2.0)], slo=Slo(ttft_ms=50.0))
    saved(tmp_path / "raw" / "a.json", raw)
    assert main(["--out", str(tmp_path)]) == 0
    assert summary(tmp_path)["serve/0.6b/fresh/64/2/kvpush-push/leg_write_p50_ms"]["value"] == 2.0
    page = (tmp_path / "README.md").read_text()
    assert "0.50 (TTFT at most 50 ms)" in page
    assert f"| 2.00 / 2.00 | {2.0 * len(LEGS):.2f} / {2.0 * len(LEGS):.2f} |" in page


def test_fractional_rates_are_written_as_on_the_command_line(tmp_path: Path) -> None:
    saved(tmp_path / "raw" / "a.json", serve_raw("vllm-pull", [cell([record()], qps=0.9)], shape="8b"))
    assert main(["--out", str(tmp_path)]) == 0
    assert "serve/8b/fresh/64/0.9/vllm-pull/ttft_mean_ms" in summary(tmp_path)


def test_transfer_and_plan_figures(tmp_path: Path) -> None:
    saved(tmp_path / "raw" / "t.json", transfer_raw())
    write_json(tmp_path / "raw" / "p.json", PLAN)
    assert main(["--out", str(tmp_path)]) == 0
    got = summary(tmp_path)
    assert {name: (figure["value"], figure["unit"]) for name, figure in got.items()} == {
        "plan/aged/ms": (1.25, "ms"),
        "transfer/h200/1024/random/direct/ms": (12.0, "ms"),
        "transfer/h200/1024/random/direct/gb_s": (12.58, "GB/s"),
    }


WRONG = SoakRequest(at_s=3.0, took_s=1.0, outcome="wrong", prompt_tokens=9, fields={}, expected="a", texts=["b"])


def test_a_soak_is_counted_and_shown_with_what_was_wrong(tmp_path: Path) -> None:
    saved(tmp_path / "raw" / "old.json", soak_raw())
    outcomes = {"right": 99, "wrong": 1}
    newer = {"date": "2026-02-02T00:00:00Z", "problems": ["1 requests were wrong"], "bad": [WRONG]}
    saved(tmp_path / "raw" / "new.json", soak_raw(outcomes=outcomes, **newer))
    saved(tmp_path / "raw" / "other.json", soak_raw(link="shared-memory"))
    assert main(["--out", str(tmp_path)]) == 0
    got = {name: figure["value"] for name, figure in summary(tmp_path).items()}
    assert got["soak/tcp/requests"] == 100
    assert got["soak/tcp/wrong"] == 1
    assert got["soak/tcp/problems"] == 1
    assert got["soak/shared-memory/error"] == 8
    assert got["soak/shared-memory/faults"] == 1
    text = (tmp_path / "README.md").read_text()
    assert "| tcp | 15 | 1 | 100 | 99 | 0 | 0 | 1 | 0 | 12.5 | 1 problems |" in text
    assert "| shared-memory | 15 | 1 | 100 | 90 | 8 | 2 | 0 | 0 | 12.5 | passed |" in text
    assert "- tcp: 1 requests were wrong" in text


def test_a_soak_that_hides_a_wrong_answer_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "raw" / "a.json", soak_raw(outcomes={"right": 1, "wrong": 1}))
    assert main(["--out", str(tmp_path)]) == 1


def test_another_geometry_gives_no_figure_but_a_row(tmp_path: Path) -> None:
    saved(tmp_path / "raw" / "t.json", transfer_raw(regions=72, page_bytes=32_768))
    assert main(["--out", str(tmp_path)]) == 0
    assert summary(tmp_path) == {}
    assert "72 x 32 KiB" in (tmp_path / "README.md").read_text()


def test_the_newest_measurement_wins_whatever_the_order_of_files(tmp_path: Path) -> None:
    new = cell([record(ttft_ms=11.0)], date="2026-03-01T00:00:00Z")
    old = cell([record(ttft_ms=99.0)], date="2026-02-01T00:00:00Z")
    saved(tmp_path / "raw" / "a.json", serve_raw("vllm-push", [new]))
    saved(tmp_path / "raw" / "b.json", serve_raw("vllm-push", [old]))
    assert main(["--out", str(tmp_path)]) == 0
    got = summary(tmp_path)["serve/0.6b/fresh/64/2/vllm-push/ttft_mean_ms"]
    assert (got["value"], got["raw"]) == (11.0, "raw/a.json")


def test_failed_requests_count_in_no_figure_and_stand_in_the_table(tmp_path: Path) -> None:
    bad = record(1, ttft_ms=None, error="decode: HTTP 500")
    result = cell([record(0), bad], warnings=["1 of 2 requests failed: 1 x decode: HTTP 500"])
    saved(tmp_path / "raw" / "a.json", serve_raw("kvpush-push", [result]))
    assert main(["--out", str(tmp_path)]) == 0
    assert summary(tmp_path)["serve/0.6b/fresh/64/2/kvpush-push/ttft_mean_ms"]["value"] == 25.0
    page = (tmp_path / "README.md").read_text()
    assert "| 1/2 |" in page
    assert "1 x decode: HTTP 500" in page


def test_a_cell_cut_by_the_time_limit_gives_no_figure(tmp_path: Path) -> None:
    saved(tmp_path / "raw" / "a.json", serve_raw("kvpush-push", [cell([record(0)], n=9, complete=False)]))
    assert main(["--out", str(tmp_path)]) == 0
    assert summary(tmp_path) == {}


def test_a_variant_is_kept_apart(tmp_path: Path) -> None:
    saved(tmp_path / "raw" / "a.json", serve_raw("kvpush-push", [cell([record(ttft_ms=50.0)])], variant="integrity"))
    saved(tmp_path / "raw" / "b.json", serve_raw("kvpush-push", [cell([record(ttft_ms=40.0)])]))
    assert main(["--out", str(tmp_path)]) == 0
    got = summary(tmp_path)
    assert got["serve/0.6b/fresh/64/2/kvpush-push+integrity/ttft_mean_ms"]["value"] == 50.0
    assert got["serve/0.6b/fresh/64/2/kvpush-push/ttft_mean_ms"]["value"] == 40.0


def test_the_table_compares_with_vllms_push(tmp_path: Path) -> None:
    for connector, ttft_ms in (("vllm-pull", 100.0), ("vllm-push", 50.0), ("kvpush-push", 25.0)):
        saved(tmp_path / "raw" / f"{connector}.json", serve_raw(connector, [cell([record(ttft_ms=ttft_ms)])]))
    assert main(["--out", str(tmp_path)]) == 0
    rows = [line for line in (tmp_path / "README.md").read_text().splitlines() if line.startswith("| 64 | 2 |")]
    assert [row.split(" | ")[2] for row in rows] == ["vllm-pull", "vllm-push", "kvpush-push"]
    assert "100.00 (2.00x)" in rows[0]
    assert "50.00 |" in rows[1]
    assert "25.00 (0.50x)" in rows[2]


BREAKS: dict[str, Any] = {
    "not JSON": b"{",
    "no kind": {"rows": []},
    "unknown kind": {**PLAN, "what": "guess"},
    "missing key": {"what": "plan", "rows": []},
    "wrong type": {**PLAN, "rows": [{"case": "aged", "ms": "fast"}]},
    "unknown case": {**PLAN, "rows": [{"case": "sorted", "ms": 1}]},
    "no time": {**PLAN, "rows": [{"case": "aged", "ms": 0}]},
    "unknown shape": serve_raw("kvpush-push", [cell([record()])], shape="tiny"),
    "unknown connector": serve_raw("lmcache", [cell([record()])]),
    "unknown pool": serve_raw("kvpush-push", [cell([record()], pool="old")]),
    "request without an answer or an error": serve_raw("kvpush-push", [cell([record(ttft_ms=None)])]),
    "too few tokens": serve_raw("kvpush-push", [cell([record(tokens=3)])]),
    "complete without all requests": serve_raw("kvpush-push", [cell([record()], n=5)]),
    "unverified transfer": transfer_raw(verified=False),
    "unknown device": transfer_raw(device="b200"),
    "unknown path": transfer_raw(path="magic"),
    "unknown table": transfer_raw(table="tidy"),
}


@pytest.mark.parametrize("content", BREAKS.values(), ids=BREAKS)
def test_a_malformed_file_is_refused_by_name_and_nothing_is_written(
    tmp_path: Path, content: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "raw" / "a-good.json", transfer_raw())
    text = content if isinstance(content, bytes) else msgspec.json.encode(content)
    (tmp_path / "raw" / "broken.json").write_bytes(text)
    assert main(["--out", str(tmp_path)]) == 1
    assert "broken.json" in capsys.readouterr().err
    assert not (tmp_path / "summary.json").exists()


def test_two_answers_lengths_under_one_name_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "raw" / "a.json", serve_raw("vllm-push", [cell([record()])]))
    other = cell([record(osl=5, tokens=5)], osl=5)
    saved(tmp_path / "raw" / "b.json", serve_raw("kvpush-push", [other]))
    assert main(["--out", str(tmp_path)]) == 1
    assert "b.json" in capsys.readouterr().err


def test_no_files_and_a_missing_file_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path)]) == 1
    assert main([str(tmp_path / "gone.json"), "--out", str(tmp_path)]) == 1
    assert "gone.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "raw",
    [
        serve_raw("kvpush-push", [cell([record()], warnings=["w"])], unfinished=["fresh/1/1"], problem="p"),
        transfer_raw(),
        PlanRaw(date="d", command="c", rows=[PlanRow(case="aged", ms=1.0)]),
    ],
    ids=["serve", "transfer", "plan"],
)
def test_what_is_written_is_read_back(tmp_path: Path, raw: Raw) -> None:
    assert read_raw(saved(tmp_path / "raw.json", raw)) == raw
    assert [path.name for path in tmp_path.iterdir()] == ["raw.json"]


def test_errors_name_the_place_in_the_file(tmp_path: Path) -> None:
    path = write_json(tmp_path / "x.json", {**PLAN, "rows": [{"case": "aged", "ms": "fast"}]})
    with pytest.raises(RawError, match=r"x\.json: .*ms"):
        read_raw(path)
