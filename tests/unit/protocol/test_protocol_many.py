"""The normal course with several ranks and consumers, and with a D that has no room yet."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_cases import PROMPT, TIMING, Stage, T

from kvpush.protocol.actions import (
    ReportReceived,
    ReportSent,
)
from kvpush.protocol.ids import RequestId, SendKey
from kvpush.protocol.messages import (
    Announce,
    Commit,
    Ping,
    Register,
)
from kvpush.protocol.transitions import ReceiveState

pytestmark = pytest.mark.unit

KEY = SendKey(T, 0)


# Several ranks


def test_writers_counted() -> None:
    """Two ranks of P write; one commits twice. Nothing is received until the other one has committed."""
    stage = Stage(p_ranks=2)
    [d] = stage.d
    stage.compute_all(stage.request())
    wanted = stage.register()
    stage.flush()
    stage.land(stage.writes[0])
    [commit] = stage.find(Commit)
    stage.arrive(commit)
    stage.arrive(commit)
    assert d.machine.receive(wanted).ranks.pending == {stage.p[1].address}
    assert not d.log
    stage.land(stage.writes[0])
    stage.flush()
    assert d.log == [ReportReceived(wanted, 100, 2000)]
    assert all(len(rank.reports(ReportSent)) == 1 for rank in stage.p)
    assert stage.idle()


def test_one_rank_of_p_writes_to_several_of_d() -> None:
    """mla-every-rank: D has more ranks than P; P's blocks stay until all of them have been served."""
    stage = Stage(p_ranks=1, d_ranks=2)
    [p] = stage.p
    request = stage.request()
    wanted = stage.register()
    stage.arrive(stage.find(Register)[0])
    stage.compute_all(request)
    stage.land_all()
    stage.flush(Commit)
    assert stage.d[0].log == [ReportReceived(wanted, 100, 1000)]
    assert not p.reports(ReportSent)
    stage.flush()
    assert {post.piece.key.tp_rank for post in stage.writes} == {1}
    stage.land_all()
    stage.flush()
    assert stage.d[1].log == [ReportReceived(wanted, 100, 1000)]
    assert p.reports(ReportSent) == [ReportSent(request)]
    assert stage.idle()


def test_every_rank_with_every_rank() -> None:
    stage = Stage(p_ranks=3, d_ranks=2)
    stage.compute_all(stage.request())
    wanted = stage.register()
    stage.flush()
    assert len(stage.writes) == 6
    stage.land_all()
    stage.flush()
    assert all(rank.log == [ReportReceived(wanted, 100, 3000)] for rank in stage.d)
    assert stage.idle()


def test_a_rank_with_nothing_to_send_is_released_by_name() -> None:
    stage = Stage(p_ranks=2)
    [d] = stage.d
    request = stage.request()
    actions = d.machine.register(RequestId("d"), KEY, PROMPT, 0, [[b"d"]], 1, [stage.p[0].address], stage.now_s)
    stage.do(d, actions)
    stage.do(d, d.machine.release(KEY, [stage.p[1].address]))
    stage.flush()
    stage.compute_all(request)
    assert stage.p[1].log == [ReportSent(request)]
    stage.land_all()
    stage.flush()
    assert d.reports(ReportReceived)
    assert stage.idle()


# Several consumers


@given(st.permutations(["register 0", "register 1", "register 2", "request", "compute"]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_n_samples_in_any_order(order: list[str], land_late: bool) -> None:
    stage = Stage()
    [p] = stage.p
    request = RequestId("p")
    for what in order:
        if what == "request":
            stage.request(consumers=3)
        elif what == "compute":
            if "request" in order[: order.index("compute")]:
                stage.compute_all(request)
        else:
            consumer = int(what[-1])
            stage.register(f"d{consumer}", consumer=consumer, consumers=3)
        stage.flush()
        if not land_late:
            stage.land_all()
            stage.flush()
    if not p.machine.in_flight(request) and order.index("compute") < order.index("request"):
        stage.compute_all(request)
    assert not (land_late and p.reports(ReportSent))
    stage.land_all()
    stage.flush()
    assert sorted(report.request_id for report in stage.d[0].log) == ["d0", "d1", "d2"]
    assert p.reports(ReportSent) == [ReportSent(request)]
    assert stage.idle()


def test_siblings_that_hit_the_cache_release() -> None:
    stage = Stage()
    [p], [d] = stage.p, stage.d
    stage.compute_all(stage.request(consumers=3))
    stage.register("d0", consumers=3)
    stage.flush()
    stage.land_all()
    stage.flush()
    assert d.reports(ReportReceived)
    assert not p.reports(ReportSent)
    for consumer in (1, 2):
        stage.do(d, d.machine.release(SendKey(T, consumer), [p.address]))
        stage.flush()
    assert p.reports(ReportSent)
    assert stage.idle()


@pytest.mark.parametrize("early", [True, False])
def test_one_release_for_all_who_have_not_registered(early: bool) -> None:
    stage = Stage()
    [p], [d] = stage.p, stage.d
    if not early:
        stage.request(consumers=4)
    stage.register("d1", consumer=1, consumers=4)
    stage.flush()
    stage.do(d, d.machine.release(KEY, [p.address], all_consumers=True))
    stage.flush()
    if early:
        stage.request(consumers=4)
    stage.compute_all(RequestId("p"))
    assert not p.reports(ReportSent)
    stage.land_all()
    stage.flush()
    assert d.reports(ReportReceived)
    assert p.reports(ReportSent)
    assert stage.idle()


# Announcements and leases


def test_an_announced_request_is_waited_for() -> None:
    """leases-renew: D has no room for a long time; its pings renew the announcement."""
    stage = Stage()
    [p], [d] = stage.p, stage.d
    stage.compute_all(stage.request())
    stage.do(d, d.machine.announce(T, PROMPT, [p.address], stage.now_s))
    assert isinstance(stage.mail[0].message, Announce)
    assert not d.machine.idle
    stage.wait(TIMING.unclaimed_timeout_s * 3, deliver=True)
    assert not p.reports(ReportSent)
    stage.register()
    stage.flush()
    stage.land_all()
    stage.flush()
    assert d.reports(ReportReceived)
    assert stage.idle()


def test_withdrawing_ends_the_announcement() -> None:
    stage = Stage()
    [p], [d] = stage.p, stage.d
    stage.do(d, d.machine.announce(T, PROMPT, [p.address], stage.now_s))
    stage.flush()
    d.machine.withdraw(T)
    d.machine.withdraw(T)
    assert d.machine.idle
    stage.wait(TIMING.rendezvous_timeout_s + 1, deliver=True)
    assert p.machine.idle


def test_a_waiting_transfer_outlives_every_lease_while_both_sides_live() -> None:
    stage = Stage()
    [d] = stage.d
    request = stage.request()
    wanted = stage.register()
    stage.flush()
    stage.engine("on_tokens", request, 1)  # P computes: no timer runs
    stage.wait(1000.0, deliver=True)
    assert d.machine.receive(wanted).state is ReceiveState.ACCEPTED
    stage.compute_all(request)
    stage.land_all()
    stage.flush()
    assert d.reports(ReportReceived)
    assert stage.idle()


def test_pings_name_what_is_still_awaited() -> None:
    stage = Stage(p_ranks=2)
    [d] = stage.d
    stage.compute_all(stage.request())
    stage.register()
    stage.flush()
    stage.land(stage.writes[0])
    stage.flush()
    stage.now_s += TIMING.ping_interval_s
    stage.do(d, d.machine.on_tick(stage.now_s))
    [ping] = stage.find(Ping)  # who has committed has nothing to keep
    assert ping.receiver is stage.p[1]
    assert isinstance(ping.message, Ping)
    assert [(lease.key, lease.attempt) for lease in ping.message.registered] == [(KEY, 1)]


def test_a_commit_stands_for_an_acceptance_that_got_lost() -> None:
    """The other rank computes for longer than an answer may take."""
    stage = Stage(p_ranks=2)
    [d] = stage.d
    request = stage.request()
    stage.register()
    stage.flush(Register)
    stage.mail = [letter for letter in stage.mail if letter.sender is stage.p[1]]
    stage.flush()
    stage.engine("on_tokens", request, 100, ranks=[stage.p[0]])
    stage.land_all()
    stage.flush()
    stage.engine("on_tokens", request, 1, ranks=[stage.p[1]])
    stage.wait(200.0, deliver=True)
    assert d.log == []
    stage.compute_all(request)
    stage.land_all()
    stage.flush()
    assert d.reports(ReportReceived)
