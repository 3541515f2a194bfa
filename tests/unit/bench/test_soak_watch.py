"""Memory, handles and gauges of a soak's processes: what grows or stays is found."""

from __future__ import annotations

import os

import pytest

from kvpush.bench.soak import watch
from kvpush.bench.soak.watch import Life, num_handles, own_memory_bytes, parse_metrics, verdicts

pytestmark = pytest.mark.unit

MB = 1_000_000


def life(sizes: dict[float, float], **changes: int) -> Life:
    made = Life("decode", "Worker", 1, 0.0, [(at_s, int(size * MB)) for at_s, size in sizes.items()])
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def steady(seconds: int, size: float, grows_by: float = 0.0) -> dict[float, float]:
    return {float(at_s): size * (1 + grows_by * at_s / seconds) for at_s in range(0, seconds, 5)}


def test_memory_that_grows_after_the_warm_up_is_found() -> None:
    assert verdicts([life(steady(600, 900.0))]) == []
    assert verdicts([life(steady(600, 900.0, 0.03))]) == []
    found = verdicts([life(steady(600, 900.0, 0.2))])
    assert len(found) == 1
    assert "memory of decode Worker grew by" in found[0]


def test_growth_during_the_warm_up_is_none() -> None:
    sizes = {at_s: 900.0 if at_s > 90 else 400.0 + at_s for at_s in steady(600, 1.0)}
    assert verdicts([life(sizes)]) == []


def test_a_short_life_is_not_judged() -> None:
    short = life(steady(150, 900.0, 1.0))
    assert short.growth is None
    assert watch.judged_roles([short]) == set()
    assert watch.judged_roles([life(steady(600, 900.0))]) == {"decode"}


def test_handles_that_stay_are_found() -> None:
    assert verdicts([life({}, handles_first=40, handles_last=42)]) == []
    assert verdicts([life({}, handles_first=40, handles_last=43)]) == [
        "decode Worker holds 43 handles, 40 at its start"
    ]


def test_metrics_are_summed_and_kept_by_reason() -> None:
    text = (
        "# HELP kvpush_loads_failed_total x\n"
        'kvpush_loads_failed_total{engine="0",reason="peer_lost"} 2.0\n'
        'kvpush_loads_failed_total{engine="0",reason="aborted"} 1.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
        "nonsense\n"
    )
    assert parse_metrics(text) == {
        "kvpush_loads_failed_total": 3.0,
        "kvpush_loads_failed_total{peer_lost}": 2.0,
        "kvpush_loads_failed_total{aborted}": 1.0,
        "vllm:kv_cache_usage_perc": 0.25,
    }


def test_memory_and_handles_of_a_process() -> None:
    before_bytes, before_handles = own_memory_bytes(os.getpid()), num_handles(os.getpid())
    held = bytearray(os.urandom(1) * (64 * MB))
    with open(os.devnull):
        assert num_handles(os.getpid()) == (before_handles or 0) + 1
    assert own_memory_bytes(os.getpid()) - before_bytes > 50 * MB
    assert len(held) == 64 * MB
    assert own_memory_bytes(2**22 + 1) == 0
    assert num_handles(2**22 + 1) is None
