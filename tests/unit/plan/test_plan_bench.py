"""The planner's benchmark measures what it says and writes what the summary reads."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest

from kvpush.bench.plan import CASES, POOL_BLOCKS, BlockPool, aged_pools, main, runs_as_listed, tables

pytestmark = pytest.mark.unit


def test_the_pool_hands_out_from_the_front_and_takes_back_in_reverse() -> None:
    pool = BlockPool(6)
    first, second = pool.take(2), pool.take(3)
    assert (first, second) == ([0, 1], [2, 3, 4])
    pool.give(second)
    pool.give(first)
    assert pool.take(6) == [5, 4, 3, 2, 1, 0]
    with pytest.raises(ValueError, match="1 blocks wanted, 0 are free"):
        pool.take(1)


def test_aged_pools_hold_every_block_once_and_are_not_in_order() -> None:
    for pool in aged_pools(Random(0), requests=300, most_blocks=2000, alive=4):
        blocks = pool.take(POOL_BLOCKS)
        assert sorted(blocks) == list(range(POOL_BLOCKS))
        assert blocks != sorted(blocks)


@pytest.mark.parametrize("case", CASES)
def test_tables_name_each_block_once(case: str) -> None:
    for table in tables(case, 1000):
        assert len(set(table.tolist())) == 1000
        assert table.min() >= 0
        assert table.max() < POOL_BLOCKS


def test_an_unknown_case_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown case 'tidy', known are contiguous"):
        tables("tidy", 10)


def test_runs_as_listed_count_ascending_neighbours_only() -> None:
    up, down = np.array([3, 4, 5, 9]), np.array([5, 4, 3, 9])
    assert (runs_as_listed(up, up), runs_as_listed(down, down), runs_as_listed(up, down)) == (2, 4, 4)


def test_the_report_and_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "plan.json"
    assert main(["--blocks", "400", "--bases", "3", "--repeats", "15", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["what"] == "plan"
    assert result["command"] == f"python -m kvpush.bench.plan --blocks 400 --bases 3 --repeats 15 --json {path}"
    rows = {row["case"]: row for row in result["rows"]}
    assert tuple(rows) == CASES
    assert all(0 < row["best_ms"] <= row["ms"] for row in rows.values())
    assert {case: rows[case]["runs_per_base"] for case in ("contiguous", "descending")} == {
        "contiguous": 1,
        "descending": 1,
    }
    assert rows["descending"]["runs_per_base_as_listed"] == 400
    assert 1 <= rows["aged"]["runs_per_base"] < rows["random"]["runs_per_base"] <= 400
    printed = capsys.readouterr().out
    assert all(case in printed for case in CASES)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--blocks", "0"], "--blocks is 0"),
        (["--blocks", "43000"], "--blocks is 43000"),
        (["--repeats", "14"], "--repeats is 14, must be at least 15"),
        (["--bases", "513"], "--bases is 513"),
    ],
)
def test_impossible_options_are_refused_by_name(
    arguments: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert match in capsys.readouterr().err
