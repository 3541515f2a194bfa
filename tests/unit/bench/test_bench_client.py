"""One request through two engines that only speak HTTP."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from bench_fakes import Engines, FakeEngine, with_deadline

from kvpush.bench.connectors import KVPushLegs, Legs, PullLegs, PushLegs
from kvpush.bench.record import RequestRecord
from kvpush.bench.workload import Planned

pytestmark = pytest.mark.unit

FROM_PREFILL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[3, 4]],
    "remote_num_tokens": 3,
    "remote_engine_id": "engine-p",
    "remote_request_id": "cmpl-1",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}
PLANNED = Planned(7, 0.0, 3, 6, b"[11,12,13]")


def send(
    prefill: FakeEngine, decode: FakeEngine, legs: Legs, times: int = 1, timeout_s: float = 10
) -> list[RequestRecord]:
    async def go() -> list[RequestRecord]:
        async with Engines(prefill, decode, timeout_s) as client:
            return [await client.send(PLANNED, legs, time.perf_counter(), 0.0) for _ in range(times)]

    return with_deadline(go)


def pair(**decode: Any) -> tuple[FakeEngine, FakeEngine]:
    events: list[str] = []
    return FakeEngine("P", events, FROM_PREFILL), FakeEngine("D", events, **decode)


def test_pull_sends_decode_after_prefill_with_what_it_returned() -> None:
    p, d = pair()
    (got,) = send(p, d, PullLegs())
    assert got.error is None
    assert p.events == ["P asked", "P answers", "D asked", "D answers"]
    assert p.bodies[0]["max_tokens"] == 1
    assert p.bodies[0]["prompt"] == d.bodies[0]["prompt"] == [11, 12, 13]
    assert p.bodies[0]["kv_transfer_params"]["do_remote_decode"] is True
    assert d.bodies[0]["kv_transfer_params"] == FROM_PREFILL
    assert d.bodies[0]["max_tokens"] == 6
    assert d.bodies[0]["ignore_eos"] is True
    assert d.bodies[0]["model"] == "a-model"


def test_a_record_holds_all_times() -> None:
    p, d = pair(delay_s=0.02)
    p.delay_s = 0.03
    (got,) = send(p, d, PullLegs())
    assert (got.index, got.isl, got.osl, got.tokens, got.pieces) == (7, 3, 6, 6, 6)
    assert got.prefill_response_ms is not None
    assert got.ttft_ms is not None
    assert got.tpot_ms is not None
    assert got.prefill_response_ms >= 30
    assert got.ttft_ms >= 50
    assert got.handoff_ms == pytest.approx(got.ttft_ms - got.prefill_response_ms)
    assert len(got.itl_ms) == 5
    assert got.tpot_ms == pytest.approx(sum(got.itl_ms) / 5, abs=0.01)


def test_push_learns_from_the_first_request_and_then_sends_both_at_once() -> None:
    p, d = pair()
    legs = PushLegs()
    first, second = send(p, d, legs, times=2)
    assert first.error is None
    assert second.error is None
    assert p.events[:4] == ["P asked", "P answers", "D asked", "D answers"]
    assert p.request_ids == d.request_ids
    first_params, second_params = (body["kv_transfer_params"] for body in d.bodies)
    assert not {"remote_block_ids", "remote_num_tokens"} & set(first_params)
    assert first_params["remote_request_id"] == "cmpl-1"
    assert second_params == {**first_params, "remote_request_id": "unknown"}


@pytest.mark.parametrize("legs", [KVPushLegs(7000), PushLegs(concurrent=True, coordinates=dict(FROM_PREFILL))])
def test_concurrent_legs_do_not_wait_for_each_other(legs: Legs) -> None:
    p, d = pair()
    p.wait_for = d
    d.wait_for = p
    (got,) = send(p, d, legs)
    assert got.error is None


def test_kvpush_legs_carry_one_transfer_id_and_the_producers_port() -> None:
    p, d = pair()
    (got,) = send(p, d, KVPushLegs(7000))
    assert p.bodies[0]["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": got.transfer_id,
        "transfer_mode": "push",
        "kvpush_consumers": 1,
    }
    assert d.bodies[0]["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": got.transfer_id,
        "remote_host": "127.0.0.1",
        "remote_port": 7000,
        "tp_size": 1,
        "pp_size": 1,
        "transfer_mode": "push",
        "kvpush_consumers": 1,
    }


def test_kvpush_pull_is_sequential() -> None:
    p, d = pair()
    (got,) = send(p, d, KVPushLegs(7000, "pull"))
    assert got.error is None
    assert p.events == ["P asked", "P answers", "D asked", "D answers"]
    assert d.bodies[0]["kv_transfer_params"]["transfer_mode"] == "pull"


def test_two_requests_have_different_transfer_ids() -> None:
    p, d = pair()
    first, second = send(p, d, KVPushLegs(7000), times=2)
    assert first.transfer_id != second.transfer_id


def test_a_short_answer_is_an_error() -> None:
    p, d = pair(missing=2)
    (got,) = send(p, d, PullLegs())
    assert got.error == "4 tokens answered, 6 asked"
    assert got.tokens == 4


def test_several_tokens_in_a_piece_are_counted_by_usage() -> None:
    p, d = pair(per_piece=2)
    (got,) = send(p, d, PullLegs())
    assert got.error is None
    assert (got.tokens, got.pieces) == (6, 3)
    assert got.tpot_ms == pytest.approx(sum(got.itl_ms) / 5, abs=0.01)


@pytest.mark.parametrize("legs", [PullLegs(), KVPushLegs(7000)])
def test_an_engines_refusal_is_reported_with_its_words(legs: Legs) -> None:
    p, d = pair(fail_on=frozenset({0}))
    (got,) = send(p, d, legs)
    assert got.error is not None
    assert "decode: HTTP 500" in got.error
    assert "engine says no" in got.error


def test_a_failed_prefill_ends_a_waiting_decode_leg() -> None:
    p, d = pair(hang=True)
    p.fail_on = frozenset({0})
    p.wait_for = d
    began = time.monotonic()
    (got,) = send(p, d, KVPushLegs(7000))
    assert got.error is not None
    assert "prefill: HTTP 500" in got.error
    assert time.monotonic() - began < 5
    assert d.cancelled == 1


def test_an_error_inside_the_stream_is_reported_with_what_came_before() -> None:
    p, d = pair(break_off=True)
    (got,) = send(p, d, PullLegs())
    assert got.error is not None
    assert "engine died" in got.error
    assert got.ttft_ms is not None
    assert got.pieces == 1


def test_no_answer_in_time_is_an_error() -> None:
    p, d = pair(hang=True)
    (got,) = send(p, d, KVPushLegs(7000), timeout_s=0.2)
    assert got.error == "no answer within 0.2 s"
    assert got.prefill_response_ms is not None


def test_an_engine_that_is_not_there_is_an_error() -> None:
    p, d = pair()

    async def go() -> RequestRecord:
        async with Engines(p, d) as client:
            client.decode_url = "http://127.0.0.1:1"
            return await client.send(PLANNED, KVPushLegs(7000), time.perf_counter(), 0.0)

    got = with_deadline(go)
    assert "ClientConnector" in got.error


def test_a_prefill_leg_that_returns_nothing_is_an_error_for_vllms_connectors() -> None:
    for legs in (PullLegs(), PushLegs()):
        p, d = pair()
        p.returned = None
        (got,) = send(p, d, legs)
        assert got.error is not None
        assert "no kv_transfer_params" in got.error
        assert d.bodies == []


def test_cancelling_leaves_a_record() -> None:
    p, d = pair(hang=True)

    async def go() -> RequestRecord:
        async with Engines(p, d) as client:
            task = asyncio.ensure_future(client.send(PLANNED, KVPushLegs(7000), time.perf_counter(), 0.0))
            while not d.bodies:
                await asyncio.sleep(0.001)
            task.cancel()
            return await task

    assert with_deadline(go).error == "cancelled"
