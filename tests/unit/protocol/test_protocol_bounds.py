"""Every wait has a bound, at both sides, and no bound runs while P computes."""

from __future__ import annotations

import pytest
from protocol_cases import PROMPT, TIMING, Stage, T, streaming

from kvpush.protocol.actions import (
    Connect,
    ReportFailed,
    ReportReceived,
    ReportReleased,
    ReportSent,
    SendEnded,
    TransferUnknown,
)
from kvpush.protocol.ids import RequestId, SendKey
from kvpush.protocol.messages import Register

pytestmark = pytest.mark.unit

KEY = SendKey(T, 0)
P, D = RequestId("p"), RequestId("d")


def failed(reason: str) -> list[object]:
    return [ReportFailed(D, reason), ReportReleased(D)]


# A half that stays alone


def test_no_request() -> None:
    """D registers a transfer that P never gets a request for."""
    stage = Stage()
    stage.register()
    stage.flush()
    stage.wait(TIMING.rendezvous_timeout_s, deliver=True)
    assert stage.d[0].log == []
    stage.wait(1.0, deliver=True)
    assert stage.d[0].log == failed("no_request")
    [unknown, ended] = stage.p[0].log
    assert unknown == TransferUnknown(T, "no_request")
    assert ended == SendEnded(KEY, None, "failed", "no_request", 100, 0, 0)
    assert stage.idle()


def test_repeating_a_registration_does_not_make_it_younger() -> None:
    stage = Stage()
    stage.register()
    [register] = stage.find(Register)
    stage.flush()
    for _ in range(int(TIMING.rendezvous_timeout_s)):
        stage.arrive(register)
        stage.wait(1.0, deliver=True)
    stage.wait(1.0, deliver=True)
    assert stage.d[0].log == failed("no_request")


def test_parts_that_never_become_whole_are_forgotten() -> None:
    stage = Stage()
    stage.register(parts=2)
    stage.mail = stage.find(Register)[:1]
    stage.flush()
    assert not stage.p[0].machine.idle
    stage.wait(TIMING.rendezvous_timeout_s + 1, ranks=stage.p)
    assert stage.p[0].machine.idle


def test_no_registration() -> None:
    """P has computed a request whose D leg was rejected, or whose router died."""
    stage = Stage()
    [p] = stage.p
    stage.compute_all(stage.request())
    stage.wait(TIMING.unclaimed_timeout_s)
    assert p.log == []
    stage.wait(1.0)
    assert p.log == [TransferUnknown(T, "unclaimed"), ReportSent(P)]
    stage.register()
    stage.flush()
    assert stage.d[0].log == failed("unclaimed")
    assert stage.idle()


def test_the_bound_of_an_unclaimed_request_begins_when_it_has_finished() -> None:
    stage = Stage()
    stage.request()
    stage.wait(TIMING.unclaimed_timeout_s * 2)
    stage.compute_all(P)
    stage.wait(TIMING.unclaimed_timeout_s)
    assert stage.p[0].log == []


def test_an_announcement_that_is_not_renewed_does_not_count() -> None:
    """D has died since: P waits no longer than for a request that nobody announced."""
    stage = Stage()
    [p], [d] = stage.p, stage.d
    stage.compute_all(stage.request())
    stage.do(d, d.machine.announce(T, PROMPT, [p.address], stage.now_s))
    stage.flush()
    stage.wait(TIMING.unclaimed_timeout_s + 1, ranks=[p])
    assert p.reports(ReportSent)


def test_an_announcement_is_waited_for_up_to_its_bound() -> None:
    stage = Stage()
    [p], [d] = stage.p, stage.d
    stage.compute_all(stage.request())
    stage.do(d, d.machine.announce(T, PROMPT, [p.address], stage.now_s))
    stage.wait(TIMING.announced_timeout_s, deliver=True)
    assert not p.reports(ReportSent)
    stage.wait(1.0, deliver=True)
    assert p.reports(ReportSent)


def test_each_consumer_has_the_whole_bound() -> None:
    stage = Stage()
    [p] = stage.p
    stage.compute_all(stage.request(consumers=2))
    stage.wait(TIMING.unclaimed_timeout_s - 1)
    stage.register("d0", consumers=2)
    stage.flush()
    stage.land_all()
    stage.flush()
    stage.wait(TIMING.unclaimed_timeout_s - 1, deliver=True)
    assert not p.reports(ReportSent)
    stage.register("d1", consumer=1, consumers=2)
    stage.flush()
    stage.land_all()
    stage.flush()
    assert p.reports(ReportSent)
    assert len(stage.d[0].reports(ReportReceived)) == 2


def test_a_consumer_that_never_comes_is_given_up() -> None:
    stage = Stage()
    [p] = stage.p
    stage.compute_all(stage.request(consumers=2))
    stage.register("d0", consumers=2)
    stage.flush()
    stage.land_all()
    stage.flush()
    stage.wait(TIMING.unclaimed_timeout_s + 1)
    assert p.log[-2:] == [TransferUnknown(T, "unclaimed"), ReportSent(P)]
    assert stage.idle()


def test_a_rank_of_d_that_never_comes_is_given_up() -> None:
    stage = Stage(d_ranks=2)
    [p] = stage.p
    stage.compute_all(stage.request())
    stage.register()
    stage.mail = [letter for letter in stage.mail if letter.sender is stage.d[0]]
    stage.flush()
    stage.land_all()
    stage.flush()
    stage.wait(TIMING.unclaimed_timeout_s + 1, ranks=[p])
    assert p.reports(ReportSent)


def test_not_scheduled() -> None:
    """Accepted, and the head of P's queue cannot be admitted."""
    stage = Stage()
    stage.request()
    stage.register()
    stage.flush()
    stage.wait(TIMING.admission_timeout_s, deliver=True)
    assert stage.d[0].log == []
    stage.wait(1.0, deliver=True)
    assert stage.d[0].log == failed("not_scheduled")
    stage.compute_all(P)  # and when it is computed after all, its blocks come back at once
    assert stage.p[0].reports(ReportSent)


def test_a_preempted_request_has_the_whole_bound_again() -> None:
    stage = streaming()
    stage.land_all()
    stage.wait(TIMING.admission_timeout_s * 2, deliver=True)
    assert stage.d[0].log == []
    stage.engine("on_preempted", P)
    stage.wait(TIMING.admission_timeout_s, deliver=True)
    assert stage.d[0].log == []
    stage.wait(1.0, deliver=True)
    assert stage.d[0].log == failed("not_scheduled")


def test_a_write_that_never_ends() -> None:
    """Both sides live, and the fabric does not deliver: D has its error, and its memory when the handle ends."""
    stage = streaming()
    stage.compute_all(P)
    stage.wait(TIMING.write_timeout_s, deliver=True)
    assert stage.d[0].log == []
    stage.wait(1.0, deliver=True)
    assert stage.d[0].log == [ReportFailed(D, "write_timeout")]
    stage.wait(TIMING.abort_drain_s + 0.5, deliver=True)
    assert stage.p[0].reports(ReportSent)
    assert not stage.p[0].machine.idle
    stage.land_all()
    stage.flush()
    assert stage.d[0].log[-1] == ReportReleased(D)
    assert stage.idle()


def test_slow_writes_one_after_another_are_no_timeout() -> None:
    stage = streaming()
    for ready in (80, 96, 100):
        stage.wait(TIMING.write_timeout_s * 0.9, deliver=True)
        stage.land_all()
        stage.engine("on_tokens", P, ready)
    stage.land_all()
    stage.flush()
    assert stage.d[0].log == [ReportReceived(D, 100, 1000)]


def test_a_connection_that_is_never_made() -> None:
    stage = Stage(connected=False)
    [p], [d] = stage.p, stage.d
    stage.compute_all(stage.request())
    stage.register()
    stage.flush()
    stage.wait(TIMING.rendezvous_timeout_s, deliver=True)
    assert d.log == []
    stage.wait(1.0, deliver=True)
    assert d.log == failed("no_connection")
    assert p.reports(ReportSent)
    p.log.clear()
    stage.request("p2", "t2")
    stage.register("d2", "t2")
    stage.flush()
    assert p.log == [Connect(d.address, d.agent)]  # tried again
