"""Timing is validated where it comes in; liveness says who is silent and who must be asked."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpush.protocol.liveness import Liveness
from kvpush.protocol.timing import OPTIONAL, Timing

pytestmark = pytest.mark.unit

FIELDS = Timing.__struct_fields__


def test_the_defaults_are_valid_and_ordered() -> None:
    timing = Timing()
    assert timing.ping_interval_s < timing.peer_timeout_s
    assert timing.unclaimed_timeout_s <= timing.announced_timeout_s
    assert timing.peer_timeout_s < timing.rendezvous_timeout_s
    assert timing.quarantine_release_after_s is None  # no time is a proof


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", [0, -1.0, 86_401, float("nan"), float("inf"), float("-inf")])
def test_an_impossible_bound_is_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be above 0"):
        Timing(**{name: value})


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", ["5", None, True, [1.0]])
def test_a_bound_that_is_no_number_is_named(name: str, value: object) -> None:
    if value is None and name in OPTIONAL:
        assert getattr(Timing(**{name: None}), name) is None  # type: ignore[arg-type]
        return
    with pytest.raises(ValueError, match=f"{name} must be a number of seconds"):
        Timing(**{name: value})  # type: ignore[arg-type]


def test_bounds_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ping_interval_s \(10.0\) must be below peer_timeout_s"):
        Timing(ping_interval_s=10.0)
    with pytest.raises(ValueError, match=r"idle_check_s \(30.0\) must be above peer_timeout_s"):
        Timing(peer_timeout_s=30.0)
    with pytest.raises(ValueError, match="announced_timeout_s"):
        Timing(unclaimed_timeout_s=301.0)
    assert Timing(unclaimed_timeout_s=300.0).unclaimed_timeout_s == 300.0


def test_timing_comes_from_a_configuration() -> None:
    assert msgspec.convert({"peer_timeout_s": 5}, Timing) == Timing(peer_timeout_s=5)
    with pytest.raises(msgspec.ValidationError, match="peer_timeut_s"):
        msgspec.convert({"peer_timeut_s": 5}, Timing)
    with pytest.raises(msgspec.ValidationError, match="ping_interval_s"):
        msgspec.convert({"ping_interval_s": 60}, Timing)


# Liveness


def watched() -> Liveness[str]:
    liveness: Liveness[str] = Liveness(10.0, 2.0)
    liveness.watch("a", 100.0)
    return liveness


def test_a_silent_peer_is_lost_once() -> None:
    liveness = watched()
    assert liveness.lost(110.0) == []
    assert liveness.lost(110.1) == ["a"]
    assert liveness.lost(200.0) == []


def test_a_peer_that_is_heard_again_can_be_lost_again() -> None:
    liveness = watched()
    liveness.lost(111.0)
    liveness.heard("a", 112.0)
    assert liveness.lost(122.0) == []
    assert liveness.lost(122.1) == ["a"]


def test_an_older_sign_of_life_does_not_make_a_peer_older() -> None:
    liveness = watched()
    liveness.heard("a", 105.0)
    liveness.heard("a", 101.0)
    assert liveness.silent_s("a", 106.0) == 1.0


def test_watching_again_does_not_refresh() -> None:
    liveness = watched()
    liveness.watch("a", 109.0)
    assert liveness.silent_s("a", 111.0) == 11.0


def test_who_is_not_watched_is_neither_alive_nor_lost() -> None:
    liveness = watched()
    liveness.heard("b", 100.0)
    assert "b" not in liveness
    assert liveness.silent_s("b", 900.0) == 0.0
    assert liveness.lost(900.0) == ["a"]


def test_pings_are_due_at_their_interval_even_for_lost_peers() -> None:
    liveness = watched()
    assert liveness.due(101.9) == []
    assert liveness.due(102.0) == ["a"]
    assert liveness.due(103.9) == []
    liveness.lost(120.0)
    assert liveness.due(120.0) == ["a"]


def test_forgotten_peers_leave_nothing() -> None:
    liveness = watched()
    liveness.watch("b", 100.0)
    liveness.forget("a")
    liveness.forget("a")
    assert len(liveness) == 1
    liveness.keep(set())
    assert len(liveness) == 0
    assert liveness.due(200.0) == []


@pytest.mark.parametrize(("timeout_s", "interval_s"), [(1.0, 1.0), (1.0, 2.0), (1.0, 0.0), (0.0, 0.0), (1.0, -1.0)])
def test_a_ping_must_come_before_its_timeout(timeout_s: float, interval_s: float) -> None:
    with pytest.raises(ValueError, match="must hold"):
        Liveness(timeout_s, interval_s)


@given(st.lists(st.tuples(st.sampled_from(["heard", "lost"]), st.floats(0.01, 8.0)), max_size=30))
@settings(deadline=None)
def test_lost_means_silent_for_longer_than_the_timeout(course: list[tuple[str, float]]) -> None:
    liveness = watched()
    now_s = last_s = 100.0
    named = False
    for what, seconds in course:
        now_s += seconds
        if what == "heard":
            liveness.heard("a", now_s)
            last_s, named = now_s, False
        else:
            silent = now_s - last_s > 10.0
            assert liveness.lost(now_s) == (["a"] if silent and not named else [])
            named = named or silent
