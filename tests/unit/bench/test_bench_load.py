"""The generators: open loop keeps its schedule, closed loop its concurrency, both their time limit."""

from __future__ import annotations

import asyncio
import time

import pytest
from bench_fakes import Engines, FakeEngine, record, with_deadline

from kvpush.bench.connectors import KVPushLegs
from kvpush.bench.load import LIMIT_GRACE_S, run_closed_loop, run_open_loop
from kvpush.bench.record import RequestRecord
from kvpush.bench.workload import Cell, Planned, open_loop

pytestmark = pytest.mark.unit

FAR_S = 1e9


def planned(*at_s: float) -> list[Planned]:
    return [Planned(index, at, 3, 4, b"[11]") for index, at in enumerate(at_s)]


class Sender:
    """Stands in for a client: answers after `takes_s` and notes how many were in flight."""

    def __init__(self, takes_s: float) -> None:
        self.takes_s = takes_s
        self.in_flight = 0
        self.most = 0
        self.sent: list[int] = []

    async def __call__(self, request: Planned, started_s: float, scheduled_s: float) -> RequestRecord:
        arrival_s = time.perf_counter() - started_s
        self.sent.append(request.index)
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        error = None
        try:
            await asyncio.sleep(self.takes_s)
        except asyncio.CancelledError:
            error = "cancelled"
        self.in_flight -= 1
        return record(request.index, scheduled_s=scheduled_s, arrival_s=arrival_s, error=error)


def test_open_loop_sends_on_schedule_however_slow_the_answers_are() -> None:
    sender = Sender(0.3)
    requests = planned(0.0, 0.05, 0.1, 0.15)
    records = with_deadline(lambda: run_open_loop(sender, requests, FAR_S))
    assert [r.index for r in records] == [0, 1, 2, 3]
    assert sender.most == 4
    for got, asked in zip(records, requests, strict=True):
        assert got.scheduled_s == asked.at_s
        assert 0 <= got.late_ms < 50


def test_a_blocked_generator_shows_as_lateness() -> None:
    async def blocking(request: Planned, started_s: float, scheduled_s: float) -> RequestRecord:
        arrival_s = time.perf_counter() - started_s
        time.sleep(0.1)  # the fault under test
        return record(request.index, scheduled_s=scheduled_s, arrival_s=arrival_s)

    records = with_deadline(lambda: run_open_loop(blocking, planned(0.0, 0.01, 0.02), FAR_S))
    assert records[2].late_ms > 100


def test_the_time_limit_stops_arrivals_and_keeps_what_was_answered() -> None:
    sender = Sender(0.01)
    records = with_deadline(lambda: run_open_loop(sender, planned(0.0, 0.05, 600.0), time.monotonic() + 0.3))
    assert [r.index for r in records] == [0, 1]
    assert all(r.error is None for r in records)


def test_the_time_limit_cancels_what_does_not_come_back() -> None:
    sender = Sender(600)
    began = time.monotonic()
    records = with_deadline(lambda: run_open_loop(sender, planned(0.0, 0.02), time.monotonic() + 0.1))
    assert [r.error for r in records] == ["cancelled", "cancelled"]
    assert time.monotonic() - began < LIMIT_GRACE_S + 3


def test_closed_loop_keeps_the_concurrency_and_sends_everything() -> None:
    sender = Sender(0.005)
    requests = planned(*[0.0] * 40)
    records = with_deadline(lambda: run_closed_loop(sender, requests, 6, FAR_S))
    assert sorted(r.index for r in records) == list(range(40))
    assert sender.sent == list(range(40))
    assert sender.most == 6


def test_closed_loop_stops_at_the_time_limit() -> None:
    sender = Sender(0.05)
    records = with_deadline(lambda: run_closed_loop(sender, planned(*[0.0] * 1000), 2, time.monotonic() + 0.3))
    assert 2 <= len(records) < 40
    assert sender.in_flight == 0


def test_every_connector_meets_the_same_requests_at_the_same_times() -> None:
    """Two different engine pairs, one slower: prompts are equal, arrivals follow the same schedule."""
    cell = Cell(5, 40.0, 12)

    async def through(delay_s: float) -> tuple[list[RequestRecord], list[list[int]]]:
        events: list[str] = []
        p, d = FakeEngine("P", events, {}), FakeEngine("D", events, delay_s=delay_s)
        async with Engines(p, d) as client:
            legs = KVPushLegs(7000)
            records = await run_open_loop(
                lambda request, started, at: client.send(request, legs, started, at), open_loop(9, cell, 4, 500), FAR_S
            )
        return records, [body["prompt"] for body in p.bodies]

    fast, fast_prompts = with_deadline(lambda: through(0.0))
    slow, slow_prompts = with_deadline(lambda: through(0.05))
    assert [r.error for r in fast + slow] == [None] * 24
    # Neighbours may overtake each other on their way through a busy machine.
    assert sorted(fast_prompts) == sorted(slow_prompts)
    assert [r.scheduled_s for r in fast] == [r.scheduled_s for r in slow]


def test_failures_are_counted_not_dropped() -> None:
    async def go() -> list[RequestRecord]:
        events: list[str] = []
        p, d = FakeEngine("P", events, {}), FakeEngine("D", events, fail_on=frozenset({1, 3}))
        async with Engines(p, d) as client:
            legs = KVPushLegs(7000)
            return await run_open_loop(
                lambda request, started, at: client.send(request, legs, started, at),
                open_loop(9, Cell(5, 200.0, 6), 4, 500),
                FAR_S,
            )

    records = with_deadline(go)
    assert len(records) == 6
    assert sum(r.error is not None for r in records) == 2
