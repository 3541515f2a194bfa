"""Two raw files compared: ratios, intervals, and a verdict only where an interval allows one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bench_fakes import cell, record, serve_raw

from kvpush.bench.compare import Comparison, Pairs, block_length, bootstrap, compare, main, resample
from kvpush.bench.raw import CellResult, ServeRaw, write_raw

pytestmark = pytest.mark.unit


def measured(factor: float, n: int = 120, noise: float = 0.05, seed: int = 0, repeats: int = 1) -> list[CellResult]:
    """Requests whose difficulty is common to all files (`seed` changes only what is added to it)."""
    cells = []
    for repeat in range(repeats):
        hard = np.random.default_rng([1, repeat]).lognormal(4, 0.8, size=n)
        own = np.random.default_rng([2, seed, repeat]).normal(1, noise, size=n)
        times = [float(value) for value in hard * own * factor]
        records = [record(i, ttft_ms=t, handoff_ms=t / 2, tpot_ms=2.0) for i, t in enumerate(times)]
        cells.append(cell(records, repeat=repeat, seed=1 + repeat))
    return cells


def rows(a: list[CellResult], b: list[CellResult]) -> dict[str, Comparison]:
    return {row.metric: row for row in compare(serve_raw("vllm-push", a), serve_raw("kvpush-push", b))}


def test_a_small_difference_of_the_same_requests_is_found_although_requests_differ_widely() -> None:
    found = rows(measured(1.0), measured(0.9, seed=1))["TTFT mean"]
    assert found.ratio == pytest.approx(0.9, abs=0.02)
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.ratio < found.high < 1
    assert (found.verdict, found.pairs) == ("lower", 120)
    assert rows(measured(0.9), measured(1.0, seed=1))["TTFT mean"].verdict == "higher"


def test_no_verdict_where_the_interval_holds_1() -> None:
    found = rows(measured(1.0, noise=0.3), measured(1.0, noise=0.3, seed=2))
    assert {row.verdict for row in found.values()} == {"no difference shown"}


def test_few_requests_have_no_p99_and_no_verdict() -> None:
    found = rows(measured(1.0, n=60), measured(0.5, n=60, seed=1))
    assert found["TTFT p99"].verdict == "too few requests (100 needed)"
    assert found["TTFT p99"].low is None
    assert found["TTFT mean"].verdict == "lower"
    few = rows(measured(1.0, n=3), measured(0.5, n=3, seed=1))
    assert {row.verdict.split(" (")[0] for row in few.values()} == {"too few requests"}


def test_repeats_that_disagree_widen_the_interval() -> None:
    steady = rows(measured(1.0, repeats=3), measured(0.9, seed=1, repeats=3))["TTFT mean"]
    others = [measured(factor, seed=1, repeats=3)[i] for i, factor in enumerate((0.6, 0.9, 1.5))]
    shaky = rows(measured(1.0, repeats=3), others)["TTFT mean"]
    assert steady.verdict == "lower"
    assert shaky.verdict == "no difference shown"


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    covered = 0
    for trial in range(200):
        rng = np.random.default_rng([7, trial])
        hard = rng.lognormal(4, 0.5, size=80)
        pairs = Pairs(hard * rng.normal(1, 0.1, 80), 0.8 * hard * rng.normal(1, 0.1, 80))
        low, high = bootstrap([pairs], lambda values: np.asarray(values.mean(axis=-1)), rng, 400)
        covered += low <= 0.8 <= high
    assert 175 <= covered <= 200


def test_blocks_of_neighbours_are_drawn_and_every_place_alike() -> None:
    index = resample(np.random.default_rng(0), 27, 4000)
    assert index.shape == (4000, 27)
    assert block_length(27) == 3
    assert ((index[:, 1] - index[:, 0]) % 27 == 1).all()
    counts = np.bincount(index.ravel(), minlength=27)
    assert counts.min() > 0.9 * 4000
    assert counts.max() < 1.1 * 4000


def test_only_requests_that_both_answered_are_compared() -> None:
    a, b = measured(1.0, n=20), measured(1.0, n=20, seed=1)
    a[0].requests[3].error = "boom"
    b[0].requests[7].error = "boom"
    assert rows(a, b)["TTFT mean"].pairs == 18


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (serve_raw("vllm-push", measured(1.0), shape="8b"), "shapes differ"),
        (serve_raw("vllm-push", [cell([record()], isl=128)]), "no complete cell in common"),
        (serve_raw("vllm-push", [cell([record()], seed=9)]), "did not ask the same"),
    ],
)
def test_what_cannot_be_compared_is_named(other: ServeRaw, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compare(serve_raw("kvpush-push", measured(1.0)), other)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_raw(tmp_path / "a.json", serve_raw("vllm-push", measured(1.0)))
    slow = serve_raw("kvpush-push", measured(1.2, seed=1), variant="x")
    slow.cells[0].requests[0].error = "boom"
    write_raw(tmp_path / "b.json", slow)
    assert main([str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    printed = capsys.readouterr().out
    assert "A: vllm-push" in printed
    assert "B: kvpush-push+x" in printed
    assert "higher" in printed
    assert "one repeat of each cell" in printed
    assert "1 requests failed in B" in printed
    assert main([str(tmp_path / "a.json"), str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err
