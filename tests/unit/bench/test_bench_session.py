"""What is said about a cell: warnings, and the engines' own numbers."""

from __future__ import annotations

import pytest
from bench_fakes import cell, record

from kvpush.bench.observe import Transfers
from kvpush.bench.session import cell_warnings, engines_say, moved

pytestmark = pytest.mark.unit

GOOD = Transfers(
    committed=2,
    received=2,
    committed_bytes=6_000_000,
    writes=5,
    spans_ms={"a": {"first write to landed": 1.0, "wait": 5.0}, "b": {"first write to landed": 3.0}},
)
VLLM = {
    "vllm:nixl_xfer_time_seconds_count": 2.0,
    "vllm:nixl_xfer_time_seconds_sum": 0.5,
    "vllm:nixl_num_failed_transfers_total": 1.0,
}


def test_a_good_cell_raises_no_warning() -> None:
    assert cell_warnings(cell([record(0), record(1)], transfers=GOOD)) == []
    assert cell_warnings(cell([record(0), record(1)], decode_counters=VLLM)) == []


def test_transfers_are_those_that_both_sides_agree_on() -> None:
    assert moved(cell([], transfers=Transfers(committed=3, received=2))) == 2
    assert moved(cell([], prefill_counters=VLLM)) == 2
    assert moved(cell([])) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "no transfer at all"),
        ({"transfers": Transfers(committed=2, received=1)}, "1 transfers for 2 answered requests"),
        ({"decode_counters": {"vllm:nixl_xfer_time_seconds_count": 1.0}}, "1 transfers for 2 answered requests"),
        ({"transfers": GOOD, "complete": False, "n": 9}, "time limit after 2 of 9"),
        ({"transfers": GOOD, "dead_engines": ["decode"]}, "ended by themselves: decode"),
        ({"transfers": GOOD, "requests": [record(0), record(1, error="boom")]}, "1 of 2 requests failed: 1 x boom"),
        (
            {"transfers": GOOD, "late_max_ms": 40.0, "requests": [record(0), record(1, arrival_s=1.04)]},
            "behind its schedule 1 times, at most 40.0 ms",
        ),
        ({"transfers": Transfers(committed=2, received=2, failed=1, failures={"failed: x": 1})}, "1 failed transfers"),
    ],
)
def test_what_should_be_doubted_is_named(changes: dict[str, object], words: str) -> None:
    (warning,) = cell_warnings(cell(**{"records": [record(0), record(1)], **changes}))  # type: ignore[arg-type]
    assert words in warning


def test_the_engines_numbers_are_given_per_transfer() -> None:
    assert engines_say(cell([], transfers=GOOD)) == (
        "2 committed, 2 received, 3.0 MB, 2.5 writes, first write to landed p50 2.00 ms, wait p50 5.00 ms"
    )
    assert engines_say(cell([], prefill_counters=VLLM)) == "nixl_xfer_time_seconds 0.25"
    assert engines_say(cell([])) == ""
