"""Counters and records of a rank."""

from __future__ import annotations

import threading

import pytest

from kvpush.protocol.ids import RequestId
from kvpush.transfer.counters import MAX_LABELS, Counters
from kvpush.transfer.records import Records

pytestmark = pytest.mark.unit


def test_counts_are_taken_as_differences() -> None:
    counters = Counters()
    counters.add("sends", "committed")
    counters.add("sends", "failed", 2)
    counters.add("bytes", amount=0)
    assert counters.take() == {("sends", "committed"): 1, ("sends", "failed"): 2}
    assert counters.take() == {}
    counters.add("sends", "failed")
    assert counters.take() == {("sends", "failed"): 1}
    assert counters.get("sends", "failed") == 3
    assert counters.total("sends") == 4
    assert counters.get("never") == 0
    assert counters.take() == {}  # asking makes nothing


def test_labels_that_a_peer_chooses_do_not_collect_memory() -> None:
    counters = Counters()
    for i in range(10_000):
        counters.add("loads_failed", f"reason {i}")
    counters.add("loads_failed", "reason 0")
    counters.add("sends", "committed")
    assert len(counters._total) <= MAX_LABELS + 2
    assert counters.total("loads_failed") == 10_001
    assert counters.get("loads_failed", "other") == 10_000 - MAX_LABELS
    assert counters.get("loads_failed", "reason 0") == 2
    assert counters.get("sends", "committed") == 1


def test_nothing_is_lost_or_counted_twice_while_another_thread_adds() -> None:
    counters = Counters()
    stop = threading.Event()

    def add() -> None:
        for i in range(20_000):
            counters.add("n", str(i % 50))
        stop.set()

    thread = threading.Thread(target=add)
    thread.start()
    taken = 0
    while not stop.is_set():
        taken += sum(counters.take().values())
        counters.total("n")
    thread.join(10)
    taken += sum(counters.take().values())
    assert taken == 20_000


def test_a_record_keeps_the_first_or_the_last_time() -> None:
    records = Records()
    record = records.open(RequestId("r"), "t")
    record.mark("first_write", 1.0)
    record.mark("first_write", 2.0)
    record.mark_last("landed", 1.5)
    record.mark_last("landed", 1.75)
    assert record.between_ms("first_write", "landed") == pytest.approx(750)
    assert record.between_ms("first_write", "committed") is None
    assert record.timing(("write", "first_write", "landed"), ("x", "landed", "never")) == "; write 750.00 ms"
    assert record.timing(("x", "landed", "never")) == ""
    assert records.open(RequestId("r"), "t") is record
    assert records.end(RequestId("r"), "sent") is record
    assert records.end(RequestId("r"), "sent") is None
    assert (record.outcome, list(records.ended), len(records)) == ("sent", [record], 0)


def test_records_are_bounded() -> None:
    records = Records(max_ended=3, max_open=2)
    for i in range(5):
        records.open(RequestId(str(i)), "t").mark("known", 0.0)
    assert len(records) == 2
    assert records.get(RequestId("4")) is None
    for i in range(5):
        records.open(RequestId(f"e{i}"), "t")
        records.end(RequestId(f"e{i}"), "sent")
        records.end(RequestId(str(i)), "sent")
    assert len(records.ended) == 3
