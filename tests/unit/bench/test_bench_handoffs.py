"""The legs of each request's hand-off, joined with what the client saw."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from bench_fakes import record

from kvpush.bench.handoffs import AskedTraces, HandoffRecord, TraceTail, handoff_records, leg_figures, legs_table
from kvpush.transfer.handoff import LEGS
from kvpush.transfer.sidechannel import EngineInfo, SideChannelServer, current_process, host_id
from kvpush.transfer.trace import RankTrace, TransferTrace, to_line

pytestmark = pytest.mark.unit


def both(transfer_id: str, start_s: float, number: int = 1, host: str = "h") -> list[TransferTrace]:
    """P's last kernel ends at start_s; the commit is seen 4 ms later, the request scheduled 8 ms later."""
    offset = time.time() - time.monotonic()
    sides = []
    for side, ranks, own in (
        ("prefill", {"computed": 0.0, "matched": -1.0, "last_write": 0.001, "landed": 0.002, "committed": 0.003}, {}),
        ("decode", {"commit_seen": 0.004, "collected": 0.006}, {"reported": 0.007, "scheduled": 0.008}),
    ):
        rank = RankTrace(request_id="r", host_id=host, times_s={name: start_s + at for name, at in ranks.items()})
        sides.append(
            TransferTrace(
                transfer_id=transfer_id, request_id="r", side=side, engine_id=side, host_id=host, number=number,
                unix_offset_s=offset, outcome="received" if side == "decode" else "sent",
                times_s={name: start_s + at for name, at in own.items()}, ranks=[rank],
            )
        )  # fmt: skip
    return sides


def legs(value_ms: float, **changes: object) -> HandoffRecord:
    return HandoffRecord(transfer_id="t", legs_ms=dict.fromkeys(LEGS, value_ms), **changes)  # type: ignore[arg-type]


def test_requests_and_records_are_joined_by_transfer_id() -> None:
    # Sent at 1000 + 2 s; first token 25 ms later, P's answer 10 ms later; the last kernel ended after 5 ms.
    requests = [record(2, arrival_s=2.0), record(3, arrival_s=3.0), record(4, arrival_s=4.0, error="boom")]
    traces = [each for name, at_s in (("t2", 1002.005), ("t4", 1004.0), ("x", 1.0)) for each in both(name, at_s)]
    (found,) = handoff_records(traces, requests, 1000.0, "h")
    assert found.transfer_id == "t2"
    assert list(found.legs_ms) == list(LEGS)
    assert found.total_ms == pytest.approx(20.0)
    assert found.legs_ms["first_token"] == pytest.approx(12.0)
    assert found.answer_ms == pytest.approx(5.0)
    assert found.clock_error_ms == 0.0


def test_a_client_elsewhere_knows_less_and_says_so() -> None:
    now_s = time.monotonic()
    (found,) = handoff_records(both("t0", now_s), [record(0, arrival_s=0.0)], now_s, "another host")
    assert found.clock_error_ms is None
    assert found.legs_ms["write"] == pytest.approx(1.0, abs=0.01)


def test_figures_and_table() -> None:
    records = [legs(float(value)) for value in range(1, 102)]
    found = leg_figures(records)
    assert found["leg_write_p50_ms"] == 51.0
    assert found["leg_write_p99_ms"] == pytest.approx(100.0)
    assert found["kernel_to_token_p50_ms"] == pytest.approx(51.0 * len(LEGS))
    assert leg_figures([]) == {}
    lines = legs_table({"kvpush-push fresh/64/2": records, "nothing": []}).splitlines()
    assert lines[0].split()[-len(LEGS) - 1 :] == [*LEGS, "sum"]
    assert lines[1].split()[:2] == ["kvpush-push", "fresh/64/2"]
    assert "51.00 / 100.00" in lines[1]
    assert len(lines) == 2
    assert legs_table({"nothing": []}) == ""
    assert "off by up to 0.250 ms" in legs_table({"x": [legs(1.0, clock_error_ms=0.25)]})
    assert "unknown error" in legs_table({"x": [legs(1.0, clock_error_ms=None)]})


def test_a_file_is_read_as_it_grows(tmp_path: Path) -> None:
    tail = TraceTail(tmp_path / "trace.jsonl")
    assert tail.new() == []
    first, second = both("t", 1.0)
    with (tmp_path / "trace.jsonl").open("wb", buffering=0) as file:
        file.write(to_line(first) + to_line(second)[:10])
        assert tail.new() == [first]
        file.write(to_line(second)[10:])
        assert tail.new() == [second]
    assert tail.new() == []


def test_engines_elsewhere_are_asked_for_what_is_new() -> None:
    lines: list[bytes] = []
    info = EngineInfo(
        engine_id="e", incarnation="i", mode="push", tp_size=1, pp_size=1, protocol_version=1,
        host_id=current_process().host_id, fingerprint={},
    )  # fmt: skip
    server = SideChannelServer("127.0.0.1", 0, info, None, lambda count: lines[-count:])
    server.start()
    try:
        asked = AskedTraces([("127.0.0.1", server.port), ("127.0.0.1", 1)])
        assert asked.new() == []
        lines += [to_line(both("a", 1.0, 1)[0]), to_line(both("b", 2.0, 2)[0])]
        assert [trace.transfer_id for trace in asked.new()] == ["a", "b"]
        lines.append(to_line(both("c", 3.0, 3)[0]))
        assert [trace.transfer_id for trace in asked.new()] == ["c"]
        assert asked.new() == []
    finally:
        server.stop()


def test_this_host_has_a_name() -> None:
    now_s = time.monotonic()
    (found,) = handoff_records(both("t0", now_s, host=host_id()), [record(0, arrival_s=0.0)], now_s)
    assert found.clock_error_ms == 0.0
