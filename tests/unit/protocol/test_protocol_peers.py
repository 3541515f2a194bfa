"""Peers that are lost or come back, and tables that are full."""

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
)
from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import RequestId, SendKey, TransferId
from kvpush.protocol.messages import Announce, Failed, Ping, Pong, Register, Release
from kvpush.protocol.pings import MAX_NAMES, MAX_OPEN, Pings
from kvpush.protocol.transitions import SendState

pytestmark = pytest.mark.unit

KEY = SendKey(T, 0)
P, D = RequestId("p"), RequestId("d")


# Peers


def test_a_lost_consumer_frees_what_p_holds_for_it() -> None:
    """consumer-restarts: D is gone without a word."""
    stage = streaming()
    [p] = stage.p
    stage.compute_all(P)
    stage.register("held", "u")
    stage.flush()
    stage.wait(TIMING.peer_timeout_s, ranks=[p])
    assert p.log == []
    stage.wait(TIMING.abort_drain_s + 1, ranks=[p])
    assert [ended.reason for ended in p.reports(SendEnded)] == ["peer_lost"] * 2
    assert p.reports(ReportSent)
    stage.land_all()
    assert p.machine.idle


def test_a_consumer_that_pings_is_not_lost() -> None:
    stage = streaming()
    stage.wait(TIMING.peer_timeout_s * 4, deliver=True)
    assert stage.d[0].log == []


def test_a_lost_consumer_that_goes_on_learns_what_became_of_its_transfers() -> None:
    stage = streaming()
    [p], [d] = stage.p, stage.d
    stage.register("held", "u")
    stage.flush()
    stage.land_all()
    stage.wait(TIMING.peer_timeout_s + 1, ranks=[p])
    stage.mail.clear()
    stage.wait(0.5, deliver=True)
    reasons = {report.request_id: report.reason for report in d.reports(ReportFailed)}
    assert reasons == {"d": "peer_lost", "held": "peer_lost"}
    assert len(d.reports(ReportReleased)) == 2
    stage.request("p2", "t2")
    stage.register("d2", "t2")
    stage.flush()
    stage.compute_all(RequestId("p2"))
    stage.land_all()
    stage.flush()
    assert d.reports(ReportReceived)


def test_an_unreachable_consumer_ends_what_waits_and_what_runs() -> None:
    stage = streaming()
    [p], [d] = stage.p, stage.d
    stage.register("held", "u")
    stage.register("parts", "v", parts=2)
    stage.mail = [letter for letter in stage.mail if getattr(letter.message, "part", 0) == 0]
    stage.flush()
    stage.do(p, p.machine.on_unreachable(d.agent, "refused", stage.now_s))
    assert {letter.message.reason for letter in stage.find(Failed)} == {"refused"}  # type: ignore[union-attr]
    assert len(stage.find(Failed)) == 2
    assert p.machine.on_unreachable(d.agent, "refused", stage.now_s) == []
    stage.land_all()
    stage.compute_all(P)
    assert p.machine.idle


def test_a_restarted_consumer_is_somebody_else() -> None:
    stage = streaming()
    [p], [old] = stage.p, stage.d
    new = stage.start_d(old.address)
    stage.d = [new]
    stage.request("p2", "t2")
    stage.register("d2", "t2")
    stage.flush()
    stage.compute_all(RequestId("p2"))
    assert {post.piece.agent for post in stage.writes} == {old.agent, new.agent}
    for post in [post for post in stage.writes if post.piece.agent == new.agent]:
        stage.land(post)
    stage.flush()
    assert new.reports(ReportReceived)
    stage.wait(TIMING.peer_timeout_s + 1, ranks=[p])
    assert ("peer_lost", old.agent) in [(ended.reason, old.agent) for ended in p.reports(SendEnded)]


def test_a_restarted_consumer_begins_its_numbers_again() -> None:
    """Its first registration is not taken for an old one of the life before."""
    stage = Stage()
    for _ in range(3):
        stage.request("p")
        stage.register("d")
        stage.flush()
        stage.compute_all(P)
        stage.land_all()
        stage.flush()
    stage.d = [stage.start_d(stage.d[0].address)]
    stage.request("p")
    stage.register("d")
    stage.flush()
    stage.compute_all(P)
    stage.land_all()
    stage.flush()
    assert stage.d[0].log == [ReportReceived(D, 100, 1000)]


# Tables


def test_ten_thousand_transfers_leave_nothing_but_bounded_memory() -> None:
    stage = Stage(max_tombstones=100)
    [p], [d] = stage.p, stage.d
    for number in range(10_000):
        request = stage.request(f"p{number}", f"t{number}")
        stage.register(f"d{number}", f"t{number}")
        if number % 500 == 0:
            stage.flush(Register)
            stage.do(d, d.machine.on_disconnected(p.agent, stage.now_s))
        stage.flush()
        stage.compute_all(request)
        stage.land_all()
        stage.flush()
        d.log.clear()
        p.log.clear()
    assert stage.idle()
    assert p.machine.num_tombstones == 100
    stage.wait(TIMING.tombstone_s + 1)
    assert p.machine.num_tombstones == 0


def test_a_full_table_refuses_and_goes_on() -> None:
    stage = Stage()
    [p], [d] = stage.p, stage.d
    p.machine._rendezvous._max_held = 2
    for number in range(3):
        stage.register(f"d{number}", f"t{number}")
        stage.flush()
    assert d.log == [ReportFailed(RequestId("d2"), "busy"), ReportReleased(RequestId("d2"))]
    for number in range(3):
        actions = d.machine.announce(TransferId(f"a{number}"), PROMPT, [p.address], stage.now_s)
        stage.do(d, actions)
    with pytest.raises(ProtocolError, match="too many announcements") as caught:
        stage.flush(Announce)
    assert caught.value.fault == "peer"
    stage.mail.clear()
    stage.now_s += TIMING.ping_interval_s
    stage.do(d, d.machine.on_tick(stage.now_s))
    stage.flush(Ping)
    assert isinstance(stage.take(Pong).message, Pong)  # a full table is no reason to fall silent
    for number in range(3):
        stage.do(d, d.machine.release(SendKey(TransferId(f"r{number}"), 0), [p.address]))
    with pytest.raises(ProtocolError, match="releases wait already"):
        stage.flush(Release)


def test_a_cancellation_of_what_is_held_is_answered_though_the_table_is_full() -> None:
    stage = Stage()
    [p], [d] = stage.p, stage.d
    p.machine._rendezvous._max_held = 1
    stage.do(d, d.machine.release(SendKey(TransferId("r"), 0), [p.address]))
    stage.register()
    stage.flush()
    stage.cancel(D)
    stage.flush()
    assert d.log == [ReportReleased(D)]


def test_pings_are_split_and_open_ones_bounded() -> None:
    stage = Stage()
    [d] = stage.d
    for number in range(MAX_NAMES + 5):
        stage.register(f"d{number}", f"t{number}")
    stage.do(d, d.machine.announce(T, PROMPT, [stage.p[0].address], stage.now_s))
    stage.mail.clear()
    stage.now_s += TIMING.ping_interval_s
    stage.do(d, d.machine.on_tick(stage.now_s))
    pings = [letter.message for letter in stage.find(Ping)]
    assert [len(ping.registered) for ping in pings] == [MAX_NAMES, 5]  # type: ignore[union-attr]
    assert [len(ping.announced) for ping in pings] == [1, 0]  # type: ignore[union-attr]
    open_pings = Pings(d.address)
    for _ in range(MAX_OPEN + 10):
        [last] = open_pings.ask(stage.p[0].address, [], [])
    assert open_pings.answered(Pong(1)) is None
    assert open_pings.answered(Pong(last.seq)) == (stage.p[0].address, [])
    assert open_pings.answered(Pong(last.seq)) is None


def test_nothing_is_asked_of_anybody_when_nothing_is_awaited() -> None:
    stage = Stage()
    stage.compute_all(stage.request())
    stage.register()
    stage.flush()
    stage.land_all()
    stage.flush()
    stage.now_s += 100.0
    assert all(rank.machine.on_tick(stage.now_s) == [] for rank in stage.at.values())


def test_who_was_unreachable_is_connected_anew() -> None:
    stage = streaming()
    [p], [d] = stage.p, stage.d
    stage.connected = False
    stage.do(p, p.machine.on_unreachable(d.agent, "disconnected", stage.now_s))
    p.log.clear()
    stage.request("p2", "t2")
    stage.register("d2", "t2")
    stage.flush()
    stage.compute_all(RequestId("p2"))
    assert p.log == [Connect(d.address, d.agent)]
    assert len(stage.writes) == 1


def test_a_lost_consumer_whose_registration_waits_is_noticed_before_its_bound() -> None:
    stage = Stage()
    [p] = stage.p
    stage.register()
    stage.flush()
    stage.wait(TIMING.peer_timeout_s + 1, ranks=[p])
    assert [ended.reason for ended in p.reports(SendEnded)] == ["peer_lost"]
    assert p.machine.idle


def test_peers_are_watched_only_while_something_is_shared_with_them() -> None:
    stage = Stage()
    [p] = stage.p
    stage.compute_all(stage.request())
    stage.register()
    stage.flush()
    assert p.machine._peers.num_watched == 1
    stage.land_all()
    stage.wait(0.5)
    assert p.machine._peers.num_watched == 0


def test_the_bound_of_admission_begins_again_for_who_was_preempted_by_poison() -> None:
    stage = Stage(engines=2)
    [p] = stage.p
    stage.request(consumers=2)
    for consumer, rank in enumerate(stage.d):
        stage.register(f"d{consumer}", consumer=consumer, consumers=2, ranks=[rank])
    stage.flush()
    stage.engine("on_tokens", P, 32)
    stage.land(stage.writes[1])
    stage.wait(TIMING.write_timeout_s / 2, deliver=True)
    stage.engine("on_poisoned", P)
    assert p.machine.send(SendKey(T, 1)).state is SendState.WAITING
    assert p.machine.send(SendKey(T, 1)).waiting_since_s == stage.now_s
