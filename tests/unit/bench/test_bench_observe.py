"""What is read from logs and counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpush.bench.observe import LogTail, increase, parse_counters, parse_transfers

pytestmark = pytest.mark.unit

PRODUCER = """
INFO 11-30 11:54:19 [producer_side.py:12] kvpush: transfer ab12 committed: 1024 tokens, 117440512 bytes, 3 writes; \
prefill to commit 12.25 ms, first write to landed 0.50 ms
INFO 11-30 11:54:20 [producer_side.py:12] kvpush: transfer cd34 committed: 16 tokens, 1835008 bytes, 1 writes
WARNING 11-30 11:54:21 [producer_side.py:12] kvpush: transfer ef56 failed: prompt_mismatch
WARNING 11-30 11:54:21 [producer_side.py:12] kvpush: transfer ef57 failed: prompt_mismatch
WARNING 11-30 11:54:22 [producer_side.py:12] kvpush: transfer gh78 cannot be written: the peer is gone
WARNING 11-30 11:54:22 [producer_side.py:12] kvpush: registration of transfer gh79 refused: prompt_mismatch
INFO:     127.0.0.1:51602 - "POST /v1/completions HTTP/1.1" 200 OK
"""
CONSUMER = """
INFO kvpush: transfer ab12 received: 1024 tokens; registered to received 3.10 ms, integrity ok
INFO kvpush: transfer cd34 received: 16 tokens
INFO kvpush: transfer ef56 received: 16 tokens, integrity ok
WARNING kvpush: transfer ij90 is in use; request cmpl-1 is refused
INFO kvpush: transfers in flight: 0
WARNING kvpush: blocks of request x stay in quarantine: somebody may still write them
"""


def test_transfers_of_both_logs_are_counted() -> None:
    got = parse_transfers((PRODUCER + CONSUMER).splitlines())
    assert (got.committed, got.committed_tokens, got.committed_bytes, got.writes) == (2, 1040, 119_275_520, 4)
    assert (got.received, got.received_tokens, got.integrity_ok) == (3, 1056, 2)
    assert got.failed == 5
    assert got.failures == {
        "failed: prompt_mismatch": 2,
        "cannot be written: the peer is gone": 1,
        "refused: prompt_mismatch": 1,
        "is in use: request cmpl-1 is refused": 1,
    }
    assert got.spans_ms == {
        "ab12": {"prefill to commit": 12.25, "first write to landed": 0.5, "registered to received": 3.1}
    }


def test_logs_without_transfers_give_zeros() -> None:
    got = parse_transfers(["INFO nothing", "kvpush: transfer x received: many tokens were here"])
    assert (got.committed, got.received) == (0, 0)
    assert parse_transfers(["INFO nothing"]).failed == 0


def test_two_readings_share_nothing() -> None:
    parse_transfers(PRODUCER.splitlines())
    assert parse_transfers([]).failures == {}


def test_a_log_is_read_once_and_only_in_whole_lines(tmp_path: Path) -> None:
    first, second = tmp_path / "p.log", tmp_path / "d.log"
    first.write_text("one\ntw")
    second.write_text("")
    tail = LogTail([first, second])
    assert tail.new_lines() == ["one"]
    with first.open("a") as log:
        log.write("o\nthree\n")
    second.write_text("four\n")
    assert tail.new_lines() == ["two", "three", "four"]
    assert tail.new_lines() == []


METRICS = """
# HELP vllm:nixl_xfer_time_seconds Histogram
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="0.005"} 3.0
vllm:nixl_xfer_time_seconds_count{engine="0",model_name="/m {x} 5"} 3.0
vllm:nixl_xfer_time_seconds_sum{engine="0"} 0.25
vllm:nixl_num_failed_transfers_total{engine="0"} 1.0
vllm:nixl_num_failed_transfers_total{engine="1"} 1.0
vllm:kvpush_transfers_total{engine="0",outcome="done"} 4.0
vllm:num_requests_running{engine="0"} 2.0
"""


def test_transfer_counters_are_read_and_summed_over_labels() -> None:
    assert parse_counters(METRICS) == {
        "vllm:nixl_xfer_time_seconds_count": 3.0,
        "vllm:nixl_xfer_time_seconds_sum": 0.25,
        "vllm:nixl_num_failed_transfers_total": 2.0,
        "vllm:kvpush_transfers_total": 4.0,
    }


def test_only_what_was_added_is_kept() -> None:
    assert increase({"a": 1.0, "b": 2.0}, {"a": 4.0, "b": 2.0, "c": 0.5}) == {"a": 3.0, "c": 0.5}
