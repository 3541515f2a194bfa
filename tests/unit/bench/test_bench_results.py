"""The page of results and the README's table: made from summary.json, and up to date in the repository."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from kvpush.bench import results
from kvpush.bench.results import BEGIN, END, main, page, read_summary, readme_part, rows_of, verdicts, with_part
from kvpush.bench.summary import Figure

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]


def figure(value: float, **changes: object) -> Figure:
    fields = {
        "value": value, "unit": "ms", "command": "c", "date": "2026-01-02T03:04:05Z", "raw": "raw/a.json",
        "machine": "2 x H200", "versions": "vllm 0.26.0",
    }  # fmt: skip
    return Figure(**{**fields, **changes})  # type: ignore[arg-type]


SUMMARY = {
    "serve/0.6b/fresh/16000/8/kvpush-push/ttft_mean_ms": figure(50.0, repeats=3, low=45.0, high=60.0),
    "serve/0.6b/fresh/16000/8/vllm-push/ttft_mean_ms": figure(100.0, raw="raw/b.json", repeats=3, low=90.0, high=99.0),
    "serve/0.6b/aged/1024/0.9/kvpush-push/ttft_mean_ms": figure(11.0),
    "serve/0.6b/aged/1024/0.9/vllm-push/ttft_mean_ms": figure(10.0),
    "serve/0.6b/fresh/4096/8/kvpush-push/tpot_mean_ms": figure(2.01),
    "serve/0.6b/fresh/4096/8/vllm-push/tpot_mean_ms": figure(2.0),
    "serve/0.6b/fresh/4096/8/kvpush-push+x/tpot_mean_ms": figure(1.0),
    "serve/0.6b/fresh/9/8/kvpush-push/tpot_mean_ms": figure(1.0),
    "serve/0.6b/fresh/9/8/kvpush-push/leg_write_p50_ms": figure(7.5),
    "transfer/h200/1024/random/direct/ms": figure(12.5),
    "transfer/h200/1024/random/direct/gb_s": figure(12.25, unit="GB/s"),
    "plan/aged/ms": figure(1.25),
}


def test_only_cells_that_both_have_measured_are_compared() -> None:
    found = [(row.pool, row.isl, row.qps, row.metric, round(row.ratio, 3)) for row in rows_of(SUMMARY)]
    assert found == [
        ("fresh", 4096, 8.0, "tpot_mean_ms", 1.005),
        ("fresh", 16_000, 8.0, "ttft_mean_ms", 0.5),
        ("aged", 1024, 0.9, "ttft_mean_ms", 1.1),
    ]


def test_gains_and_losses_stand_side_by_side() -> None:
    text = page(SUMMARY)
    assert "100.0 [90.0-99.0] / 50.0 [45.0-60.0] (0.50x)" in text
    assert "10.0 / 11.0 (1.10x)" in text
    lines = verdicts(rows_of(SUMMARY))
    assert lines[0] == (
        "- **TTFT mean**: lower in 1, equal (within 2%) in 0, higher in 1 of 2 cells; "
        "from 0.50x (fresh 16,000 tokens at 8/s) to 1.10x (aged 1,024 tokens at 0.9/s)"
    )
    assert "lower in 0, equal (within 2%) in 1, higher in 0 of 1 cells" in lines[1]
    assert "measured once" in text
    assert "2 x H200; vllm 0.26.0" in text
    assert "[b.json](../bench/results/raw/b.json)" in text
    assert "Not measured in the same cells: vllm-pull" in text
    assert "| 7.50 |" in text
    assert "| h200 | 1,024 | random | direct | 12.5 | 12.2 | 2026-01-02 |" in text


def test_the_readme_keeps_what_is_around_the_marks() -> None:
    text = with_part(f"before\n{BEGIN}\nold 3.14\n{END}\nafter\n", readme_part(SUMMARY))
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "3.14" not in text
    assert "10.0 / 11.0 (1.10x)" in text
    assert with_part(text, readme_part(SUMMARY)) == text
    with pytest.raises(ValueError, match="no part between"):
        with_part("nothing", "part")


def test_the_command_writes_and_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("bench/results", "docs"):
        (tmp_path / folder).mkdir(parents=True)
    results.README.write_text(f"{BEGIN}\n{END}\n")
    assert main([]) == 1  # there is no summary yet
    results.SUMMARY.write_bytes(msgspec.json.encode(SUMMARY))
    assert main(["--check"]) == 1
    assert "docs/results.md is not what" in capsys.readouterr().err
    assert main([]) == 0
    assert main(["--check"]) == 0


def test_the_pages_of_the_repository_are_what_the_measurements_say() -> None:
    summary = read_summary(ROOT / results.SUMMARY)
    assert (ROOT / results.PAGE).read_text() == page(summary)
    readme = (ROOT / results.README).read_text()
    assert with_part(readme, readme_part(summary)) == readme


def test_no_measured_number_is_typed_by_hand_into_the_readme() -> None:
    text = (ROOT / results.README).read_text()
    around = text[: text.index(BEGIN)] + text[text.index(END) :]
    assert re.findall(r"\b\d+(?:\.\d+)? ?(?:ms|GB/s|x faster|% (?:faster|less|lower))\b", around) == []
