"""The simulated fabric at its worst: failing writes, stopped and killed processes, cut links."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from fabric_sides import SIZE, SLOW, done_by, pair, post, side

from kvpush.transport.base import TransportError
from kvpush.transport.memory import Faults

pytestmark = pytest.mark.unit


# Failing writes


def test_a_post_can_fail_and_leaves_nothing_behind() -> None:
    fabric, p, d = pair()
    p.agent.fail_next_post("X")
    p.agent.fail_next_post()
    with pytest.raises(TransportError, match="could not post a write to D") as caught:
        post(p, d)
    assert not caught.value.may_land
    assert p.agent.in_flight == 0
    assert fabric.next_event_s() is None
    done_by(fabric, p, post(p, d))


@pytest.mark.parametrize("after", [0.0, 0.5, 1.0])
def test_a_write_can_fail_after_a_part_of_its_bytes_and_is_then_over(after: float) -> None:
    fabric, p, d = pair(SLOW)
    p.agent.fail_next_write("D", after)
    handle = post(p, d, b"n")
    fabric.advance(2.0)
    with pytest.raises(TransportError, match="lost a write to D") as caught:
        p.agent.done(handle)
    assert not caught.value.may_land
    landed = int((d.memory != 0).sum())
    assert landed == {0.0: 0, 0.5: SIZE // 2, 1.0: SIZE * 7 // 8}[after]
    assert fabric.next_event_s() is None
    assert d.agent.notifications() == []
    done_by(fabric, p, post(p, d))


def test_a_write_can_fail_and_still_land() -> None:
    fabric, p, d = pair(SLOW)
    p.agent.fail_next_write(may_land=True)
    handle = post(p, d, b"n")
    failed_with = 0
    while not failed_with:
        fabric.advance(fabric.next_event_s())
        try:
            p.agent.done(handle)
        except TransportError as error:
            failed_with = int((d.memory != 0).sum())
            may_land = error.may_land
    assert (failed_with, may_land) == (SIZE // 2, True)
    fabric.advance(10.0)
    assert d.memory.all()
    with pytest.raises(TransportError, match="lost"):
        p.agent.done(handle)
    assert d.agent.notifications() == []


@pytest.mark.parametrize(
    ("faults", "late"), [(Faults(fail_write=0.5), False), (Faults(fail_write_late=0.5), True)], ids=["ended", "late"]
)
def test_writes_fail_at_the_given_rate(faults: Faults, late: bool) -> None:
    fabric, p, d = pair(faults)
    handles = [post(p, d, length=8) for _ in range(200)]
    fabric.advance(1.0)
    errors = []
    for handle in handles:
        try:
            assert p.agent.done(handle)
        except TransportError as error:
            errors.append(error.may_land)
    assert 70 < len(errors) < 130
    assert set(errors) == {late}


# Processes and links


def test_a_stopped_writer_goes_on_into_reused_memory_when_it_continues() -> None:
    """The hazard that no lease prevents, as it was seen with real processes."""
    fabric, p, d = pair(SLOW)
    handle = post(p, d, b"n")
    fabric.advance(0.5)
    before = d.memory.copy()
    assert before.any()
    assert not before.all()
    fabric.stop("P")
    fabric.advance(1000.0)
    assert np.array_equal(d.memory, before)
    assert fabric.next_event_s() is None
    d.memory[:] = 0
    fabric.resume("P")
    fabric.advance(1001.0)
    assert np.array_equal(d.memory != 0, before == 0)
    assert p.agent.done(handle)


def test_a_stopped_target_is_written_but_its_writer_is_not_told() -> None:
    fabric, p, d = pair(SLOW)
    handle = post(p, d, b"n")
    fabric.stop("D")
    fabric.advance(100.0)
    assert d.memory.all()
    assert not p.agent.done(handle)
    fabric.resume("D")
    assert p.agent.done(handle)


def test_a_stopped_process_makes_no_calls_and_states_are_checked() -> None:
    fabric, p, d = pair()
    fabric.stop("P")
    for call in (p.agent.notifications, lambda: post(p, d), lambda: p.agent.notify("D", b"")):
        with pytest.raises(RuntimeError, match="P makes a call although it is stopped"):
            call()
    with pytest.raises(ValueError, match="P is stopped, not running"):
        fabric.stop("P")
    with pytest.raises(ValueError, match="D is running, not stopped"):
        fabric.resume("D")
    fabric.kill("P")
    assert fabric.state("P") == "killed"
    assert fabric.state("Q") == "unknown"
    with pytest.raises(RuntimeError, match="although it is killed"):
        p.agent.notifications()


@pytest.mark.parametrize("stopped_first", [False, True])
def test_nothing_of_a_killed_writer_lands_any_more(stopped_first: bool) -> None:
    fabric, p, d = pair(SLOW)
    post(p, d, b"n")
    fabric.advance(0.5)
    if stopped_first:
        fabric.stop("P")
        fabric.advance(2.0)
    before = d.memory.copy()
    fabric.kill("P")
    fabric.advance(10.0)
    assert np.array_equal(d.memory, before)
    assert d.agent.notifications() == []
    with pytest.raises(TransportError, match="P"):
        d.agent.notify("P", b"x")


def test_the_metadata_of_a_dead_process_is_refused() -> None:
    fabric, p, d = pair()
    metadata = d.agent.metadata()
    p.agent.disconnect("D")
    fabric.kill("D")
    with pytest.raises(TransportError, match="D does not exist"):
        p.agent.connect(metadata)


def test_a_cut_link_that_nobody_notices_holds_writes_and_swallows_messages() -> None:
    fabric, p, d = pair(SLOW)
    handle = post(p, d, b"n")
    fabric.advance(0.5)
    fabric.cut("D", "P", noticed_by_writers=False)
    before = d.memory.copy()
    p.agent.notify("D", b"lost")
    late = post(p, d, b"late")
    fabric.advance(100.0)
    assert np.array_equal(d.memory, before)
    assert not p.agent.done(handle)
    fabric.heal("P", "D")
    done_by(fabric, p, handle)
    done_by(fabric, p, late)
    fabric.advance(fabric.now_s + 1)
    assert sorted(d.agent.notifications()) == [("P", b"late"), ("P", b"n")]


def test_a_cut_link_that_is_noticed_fails_its_writes_for_good() -> None:
    fabric, p, d = pair(SLOW)
    handle = post(p, d, b"n")
    fabric.advance(0.5)
    fabric.cut("P", "D")
    before = d.memory.copy()
    fabric.advance(0.5 + 0.051)
    with pytest.raises(TransportError, match="lost D") as caught:
        p.agent.done(handle)
    assert not caught.value.may_land
    for call in (lambda: p.agent.notify("D", b"x"), lambda: post(p, d), lambda: d.agent.notify("P", b"x")):
        with pytest.raises(TransportError, match="lost"):
            call()
    fabric.heal("P", "D")
    fabric.advance(100.0)
    assert np.array_equal(d.memory, before)
    with pytest.raises(TransportError, match="lost D"):
        post(p, d)
    p.agent.connect(d.agent.metadata())
    done_by(fabric, p, post(p, d, b"n"))
    fabric.advance(fabric.now_s + 1)
    assert d.agent.notifications() == [("P", b"n")]


def test_connecting_over_a_cut_link_is_noticed_again() -> None:
    fabric, p, d = pair()
    fabric.cut("P", "D")
    fabric.advance(1.0)
    p.agent.connect(d.agent.metadata())
    handle = post(p, d)
    fabric.advance(2.0)
    with pytest.raises(TransportError, match="lost D"):
        p.agent.done(handle)


def test_a_cut_link_leaves_others_alone() -> None:
    fabric, p, _d = pair()
    other = side(fabric, "E")
    p.agent.connect(other.agent.metadata())
    fabric.cut("P", "D")
    fabric.advance(1.0)
    done_by(fabric, p, post(p, other, b"n"))


def test_a_healed_link_that_was_cut_shortly_was_never_lost() -> None:
    fabric, p, d = pair(Faults(notice_s=(0.05, 0.05)))
    handle = post(p, d)
    fabric.cut("P", "D")
    fabric.advance(0.04)
    fabric.heal("P", "D")
    fabric.advance(1.0)
    assert p.agent.done(handle)


@pytest.mark.parametrize("end", ["kill", "cut"])
def test_a_death_is_noticed_within_its_time(end: str) -> None:
    fabric, p, d = pair(Faults(notice_s=(0.5, 0.5), write_delay_s=(100.0, 100.0)))
    handle = post(p, d)
    act: dict[str, Callable[[], None]] = {"kill": lambda: fabric.kill("D"), "cut": lambda: fabric.cut("P", "D")}
    act[end]()
    fabric.advance(0.49)
    assert not p.agent.done(handle)
    p.agent.notify("D", b"not known yet")
    fabric.advance(0.51)
    with pytest.raises(TransportError, match="lost D"):
        p.agent.done(handle)
    with pytest.raises(TransportError, match="lost D"):
        p.agent.notify("D", b"known")
    assert p.agent.in_flight == 0
