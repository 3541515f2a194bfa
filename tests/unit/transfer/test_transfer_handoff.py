"""Where a hand-off spends its time, and how clocks of two hosts are compared."""

from __future__ import annotations

import random

import pytest
from trace_cases import consumer, producer

from kvpush.transfer.handoff import LEGS, Client, Clocks, handoffs, paired
from kvpush.transfer.trace import RankTrace

pytestmark = pytest.mark.unit


def test_the_legs_follow_each_other_from_the_last_kernel_to_the_first_token() -> None:
    (found,) = handoffs([producer(), consumer()], {"t": Client("h", 100.015, 1e9)})
    expected = [0.0, 2.0, 3.0, 0.5, 0.5, 2.0, 1.0, 2.0, 4.0]
    assert list(found.legs_ms) == list(LEGS)
    assert list(found.legs_ms.values()) == pytest.approx(expected)
    assert found.total_ms == pytest.approx(15.0)
    assert (found.computed_s, found.clock_error_ms) == (pytest.approx(100.0), 0.0)


def test_a_late_registration_is_a_leg_of_its_own_and_not_posting() -> None:
    (found,) = handoffs([producer(matched=1.5), consumer(registered=1.0, accepted=1.8)])
    assert found.legs_ms["register"] == pytest.approx(1.5)
    assert found.legs_ms["post"] == pytest.approx(0.5)
    assert "first_token" not in found.legs_ms


def test_the_slowest_rank_decides() -> None:
    there, here = producer(), consumer()
    slow = dict(there.ranks[0].times_s)
    slow["landed"] += 0.004
    slow["committed"] += 0.004
    there.ranks.append(RankTrace(request_id="p", tp_rank=1, host_id="h", times_s=slow))
    (found,) = handoffs([there, here])
    assert found.legs_ms["write"] == pytest.approx(7.0)
    # D saw the first rank's commit at 6 ms, the chain is at 9.5: no leg is negative, and the total is right.
    assert min(found.legs_ms.values()) == 0.0
    assert found.total_ms == pytest.approx(11.0)


def test_what_did_not_arrive_or_lacks_its_other_side_has_no_legs() -> None:
    failed = [producer("f"), consumer("f", outcome="failed: peer_lost")]
    assert handoffs([*failed, producer("alone"), consumer("lonely")]) == []
    not_needed = consumer("n")
    not_needed.ranks.clear()
    assert handoffs([producer("n"), not_needed]) == []


def test_several_consumers_of_one_transfer() -> None:
    assert [d.request_id for _, d in paired([producer(), consumer(), consumer()])] == ["d", "d"]


@pytest.mark.parametrize("ahead_s", [0.0, 1234.5, -77.25])
def test_clocks_of_two_hosts_are_compared_by_the_messages_of_many_transfers(ahead_s: float) -> None:
    rng = random.Random(5)
    traces = []
    for number in range(200):
        # Each message takes between 0.05 and 3 ms more than nothing.
        delay = [rng.uniform(0.05, 3.0) for _ in range(3)]
        there = producer(f"t{number}", 100.0 + number, "p-host", ahead_s, matched=-5.0)
        here = consumer(
            f"t{number}", 100.0 + number, "d-host",
            registered=-5.0 - delay[0], accepted=-5.0 + delay[1], commit_seen=5.5 + delay[2],
        )  # fmt: skip
        traces += [there, here]
    clocks = Clocks.of(paired(traces))
    measured_s, error_s = clocks.ahead("p-host", "d-host")
    assert error_s is not None
    assert 0 < error_s < 0.0005
    assert abs(measured_s - ahead_s) <= error_s + 2e-6
    assert clocks.ahead("d-host", "p-host") == (-measured_s, error_s)
    found = handoffs(traces)
    assert len(found) == 200
    for each in found:
        assert each.clock_error_ms == pytest.approx(error_s * 1e3, abs=0.002)
        assert each.legs_ms["write"] == pytest.approx(3.0, abs=0.002)


def test_a_client_elsewhere_is_compared_by_wall_clock() -> None:
    client = Client("c-host", 100.015 + 7.0, unix_offset_s=1e9 - 7.0)
    (found,) = handoffs([producer(), consumer()], {"t": client})
    assert found.legs_ms["first_token"] == pytest.approx(4.0)
    assert found.clock_error_ms is None


def test_clocks_that_nothing_bounds_are_compared_by_wall_clock_with_an_unknown_error() -> None:
    there, here = producer(host="p-host", ahead_s=50.0), consumer(host="d-host")
    del here.ranks[0].times_s["registered"]
    (found,) = handoffs([there, here])
    assert found.clock_error_ms is None
    assert found.total_ms == pytest.approx(11.0)
