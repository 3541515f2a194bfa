"""One record for each transfer: what the scheduler half and the ranks know, its file, and its bounds."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from trace_cases import consumer, producer

from kvpush.protocol.ids import RequestId
from kvpush.transfer.records import Record, Records
from kvpush.transfer.trace import RankTrace, TraceError, from_lines, read_traces, to_line
from kvpush.transfer.tracebook import TraceBook
from kvpush.transfer.tracefile import TraceFile

pytestmark = pytest.mark.unit


def told(request_id: str, outcome: str, tp_rank: int = 0) -> RankTrace:
    return RankTrace(request_id=request_id, tp_rank=tp_rank, host_id="h", times_s={"computed": 4.0}, outcome=outcome)


def book(**bounds: int) -> TraceBook:
    return TraceBook("engine", "h", **bounds)


def test_a_producer_ends_when_every_rank_has_reported() -> None:
    mine = book()
    mine.arrived("r", "t", "prefill", 64, 1.0)
    mine.step({"other"}, 2.0)
    mine.step({"r"}, 3.0)
    mine.step({"r"}, 4.0)
    mine.finished("r", 5.0)
    mine.told([told("r", "sent", 1)])
    assert mine.take(0.0) == []
    mine.told([told("r", "sent", 0), told("unknown", "sent")])
    mine.reported({"r", "unknown"}, 6.0)
    (trace,) = mine.take(100.0)
    assert trace.times_s == {"arrived": 1.0, "scheduled": 3.0, "finished": 5.0, "reported": 6.0}
    assert (trace.side, trace.outcome, trace.number, trace.unix_offset_s) == ("prefill", "sent", 1, 100.0)
    assert [rank.tp_rank for rank in trace.ranks] == [1, 0]
    assert mine.last(5) == [trace]
    assert len(mine) == 0


def test_a_consumer_ends_when_it_is_scheduled_with_its_kv() -> None:
    mine = book()
    mine.arrived("r", "t", "decode", 64, 1.0)
    mine.allocated("r", 63, 2.0)
    mine.allocated("r", 0, 2.5)  # vLLM says so again when the KV has come
    mine.step({"r"}, 2.6)  # cannot be: nothing has come yet
    mine.told([told("r", "received")])
    mine.reported(["r"], 3.0)
    assert mine.take(0.0) == []
    mine.step({"r"}, 4.0)
    (trace,) = mine.take(0.0)
    assert trace.times_s == {"arrived": 1.0, "allocated": 2.0, "reported": 3.0, "scheduled": 4.0}
    assert trace.outcome == "received"


@pytest.mark.parametrize(
    ("events", "outcome"),
    [
        (["finished"], "cancelled"),
        (["not_needed"], "not_needed"),
        (["allocated", "finished", "told failed: peer_lost", "reported"], "failed: peer_lost"),
        (["allocated", "told received", "told failed: no_answer", "reported", "finished"], "failed: no_answer"),
        (["allocated", "reported", "finished"], "lost"),
        (["allocated", "told cancelled", "finished", "reported"], "cancelled"),
    ],
)
def test_other_ends_of_a_consumer(events: list[str], outcome: str) -> None:
    mine = book()
    mine.arrived("r", "t", "decode", 64, 0.0)
    for time_s, event in enumerate(events, 1):
        assert mine.take(0.0) == []
        match event.split(" ", 1):
            case ["finished"]:
                mine.finished("r", time_s)
            case ["allocated"]:
                mine.allocated("r", 63, time_s)
            case ["not_needed"]:
                mine.allocated("r", 0, time_s)
            case ["reported"]:
                mine.reported(["r"], time_s)
            case ["told", words]:
                mine.told([told("r", words)])
    assert [trace.outcome for trace in mine.take(0.0)] == [outcome]
    assert len(mine) == 0
    mine.finished("r", 9.0)
    mine.reported(["r"], 9.0)
    mine.step({"r"}, 9.0)
    assert mine.take(0.0) == []


def test_both_tables_are_bounded() -> None:
    mine = book(max_open=3, max_ended=2)
    for number in range(6):
        mine.arrived(f"r{number}", "t", "prefill", 1, float(number))
    assert len(mine) == 3
    assert [(trace.request_id, trace.outcome) for trace in mine.take(0.0)] == [(f"r{n}", "lost") for n in range(3)]
    assert [trace.number for trace in mine.last(10)] == [2, 3]
    mine.step({"r0", "r5"}, 9.0)  # a request that was given up is not looked at again


def test_lines_survive_and_what_is_no_record_is_named(tmp_path: Path) -> None:
    traces = [producer(), consumer()]
    path = tmp_path / "folder" / "trace.jsonl"
    first, second = TraceFile(path), TraceFile(path)
    first.write(traces[:1])
    second.write(traces[1:])
    assert read_traces(path) == traces
    first.close()
    first.close()
    first.write(traces)
    second.close()
    with path.open("ab") as file:
        file.write(to_line(traces[0])[:20])
    assert read_traces(path) == traces
    with pytest.raises(TraceError, match=r"line 2 .*no transfer record"):
        list(from_lines([to_line(traces[0]), b'{"transfer_id": 5}'], "f"))


def test_a_file_that_cannot_be_written_is_given_up_once(caplog: pytest.LogCaptureFixture) -> None:
    file = TraceFile(Path(os.devnull))
    assert file._descriptor is not None
    os.close(file._descriptor)
    file._descriptor = os.open("/dev/full", os.O_WRONLY)
    with caplog.at_level(logging.ERROR):
        file.write([producer()])
        file.write([producer()])
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text


def test_moments_are_booked_when_they_happen_if_there_is_a_clock() -> None:
    now = iter([5.0, 6.0, 7.0])
    records = Records(clock=lambda: next(now))
    record = records.open(RequestId("r"), "t")
    for _ in range(2):
        records.mark(RequestId("r"), "known", 1.0)
    records.mark(RequestId("r"), "landed", 1.0, last=True)
    records.mark(RequestId("unknown"), "landed", 1.0)
    assert record.times_s == {"known": 5.0, "landed": 7.0}
    records.fail("t", "unclaimed")
    records.end(RequestId("r"), "sent")
    assert record.outcome == "failed: unclaimed"
    assert records.take_ended() == [record]
    assert records.take_ended() == []


def test_a_rank_tells_its_place_and_when_the_engine_took_the_result() -> None:
    record = Record(RequestId("r"), "t", {"computed": 1.23456789}, num_bytes=5, num_runs=3, outcome="sent")
    assert RankTrace.of(record, 1, 2, "h", 9.0) == RankTrace(
        request_id="r", pp_rank=1, tp_rank=2, host_id="h", times_s={"computed": 1.234568, "collected": 9.0},
        num_bytes=5, num_runs=3, outcome="sent",
    )  # fmt: skip
