"""P's answers to cancellations, releases and pings that come late, early, twice, or from somebody else."""

from __future__ import annotations

import pytest
from protocol_cases import AGENT, AT, OTHER, TIMING, Stage, T, ask, register, streaming

from kvpush.protocol.actions import ReportReceived, ReportReleased, ReportSent
from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import AgentName, RequestId, SendKey, TransferId
from kvpush.protocol.messages import Accepted, Cancel, Commit, Failed, Lease, Ping, Pong, Quiet, Register, Release
from kvpush.protocol.transitions import SendState

pytestmark = pytest.mark.unit

KEY = SendKey(T, 0)
P, D = RequestId("p"), RequestId("d")


# Cancellations


def test_a_cancellation_of_a_later_attempt_that_overtakes_it() -> None:
    """It ends what runs, is answered under its own number, and bars the registration that it overtook."""
    stage = streaming()
    stage.mail.clear()
    assert ask(stage, Cancel(KEY, 2, AT)) == []
    stage.land_all()
    assert stage.take(Quiet).message == Quiet(KEY, 2)
    assert ask(stage, register(2)) == [Quiet(KEY, 2)]
    assert stage.p[0].machine.send(KEY) is None


def test_a_late_cancellation_of_an_earlier_attempt_is_ignored() -> None:
    stage = Stage()
    assert ask(stage, register(2)) == []
    assert ask(stage, Cancel(KEY, 1, AT)) == []
    stage.request()
    assert stage.p[0].machine.send(KEY).state is SendState.WAITING
    assert ask(stage, Cancel(KEY, 1, AT)) == []
    assert stage.p[0].machine.send(KEY).state is SendState.WAITING


def test_cancellations_are_answered_whatever_p_knows() -> None:
    stage = Stage()
    for attempt in (3, 3, 2, 4):
        assert ask(stage, Cancel(KEY, attempt, AT)) == [Quiet(KEY, attempt)]
    assert ask(stage, register(4)) == [Quiet(KEY, 4)]
    assert ask(stage, register(5)) == []  # a new one
    assert not stage.p[0].machine.idle


def test_a_cancellation_after_the_commit_is_answered() -> None:
    stage = streaming()
    stage.compute_all(P)
    stage.land_all()
    assert ask(stage, Cancel(KEY, 1, AT)) == [Quiet(KEY, 1)]
    assert ask(stage, register(1)) == [Commit(KEY, 1, 100, 1000, 2)]  # it did end with a commit


def test_a_cancellation_from_somebody_else_touches_nothing() -> None:
    stage = streaming()
    assert ask(stage, Cancel(KEY, 9, AT), AgentName("stranger")) == [Quiet(KEY, 9)]
    assert stage.p[0].machine.send(KEY).state is SendState.STREAMING
    held = SendKey(TransferId("u"), 0)
    ask(stage, register(2, key=held))
    ask(stage, Cancel(held, 9, AT), AgentName("stranger"))
    stage.request("p2", "u")
    assert stage.p[0].machine.send(held).state is SendState.WAITING


def test_a_cancelled_registration_that_waited_is_no_reason_to_wait_for_it() -> None:
    """abort-while-waiting: the request comes after its consumer has left, and is freed as soon as it has finished."""
    stage = Stage()
    stage.register()
    stage.flush()
    stage.cancel(D)
    stage.flush()
    stage.compute_all(stage.request())
    assert stage.p[0].log == [ReportSent(P)]
    assert stage.idle()


def test_a_new_use_of_the_id_after_a_cancelled_one_is_served() -> None:
    stage = Stage()
    stage.register()
    stage.flush()
    stage.cancel(D)
    stage.flush()
    stage.register("d2")
    stage.flush()
    stage.compute_all(stage.request())
    stage.land_all()
    stage.flush()
    assert stage.d[0].log == [ReportReleased(D), ReportReceived(RequestId("d2"), 100, 1000)]
    assert stage.idle()


def test_a_late_copy_of_an_earlier_use_does_not_satisfy_this_one() -> None:
    """Its cancellation is older than the request: it says nothing about this one."""
    stage = Stage()
    stage.register()
    [copy] = stage.find(Register)
    stage.flush()
    stage.cancel(D)
    stage.flush()
    stage.wait(TIMING.rendezvous_timeout_s + 1)  # the release that was noted for its request is forgotten
    stage.request()
    stage.arrive(copy)
    stage.register("d2")
    stage.flush()
    stage.compute_all(P)
    stage.land_all()
    stage.flush()
    assert stage.d[0].reports(ReportReceived)


def test_a_cancellation_forgets_the_parts_that_have_come() -> None:
    stage = Stage()
    stage.register(parts=3)
    first, second, third = stage.find(Register)
    stage.arrive(first)
    stage.cancel(D)
    stage.mail = stage.find(Cancel)
    stage.flush()
    assert stage.d[0].log == [ReportReleased(D)]
    assert stage.idle()
    for letter in (second, third, first):
        stage.arrive(letter)
        assert stage.take(Quiet).message == Quiet(KEY, 1)
    assert stage.idle()


# Releases


def test_a_release_of_what_is_registered_is_a_fault_and_changes_nothing() -> None:
    """phantom: a rejected copy of a live request must not end it."""
    stage = Stage()
    [p] = stage.p
    assert ask(stage, register(1)) == []
    for known in (False, True):
        if known:
            stage.request()
        with pytest.raises(ProtocolError, match="registered") as caught:
            ask(stage, Release(KEY, 2, AT))
        assert caught.value.fault == "peer"
    stage.compute_all(P)
    assert not p.reports(ReportSent)
    stage.land_all()
    assert p.reports(ReportSent)


def test_a_release_of_a_consumer_that_is_none_is_a_fault() -> None:
    stage = Stage()
    stage.request()
    with pytest.raises(ProtocolError, match="consumer 1 of 1"):
        ask(stage, Release(SendKey(T, 1), 1, AT))


def test_a_late_copy_of_a_release_does_not_satisfy_a_new_use() -> None:
    stage = Stage()
    [p], [d] = stage.p, stage.d
    stage.do(d, d.machine.release(KEY, [p.address]))
    [copy] = stage.find(Release)
    stage.flush()
    stage.compute_all(stage.request())
    assert p.log == [ReportSent(P)]
    stage.arrive(copy)
    assert stage.idle()
    stage.request("p2")
    stage.arrive(copy)
    stage.register("d2")
    stage.flush()
    stage.compute_all(RequestId("p2"))
    stage.land_all()
    stage.flush()
    assert d.reports(ReportReceived)


def test_a_release_of_a_new_use_counts_although_the_old_one_is_remembered() -> None:
    stage = Stage()
    [p], [d] = stage.p, stage.d
    stage.compute_all(stage.request())
    stage.register()
    stage.flush()
    stage.land_all()
    stage.flush()
    stage.do(d, d.machine.release(KEY, [p.address]))
    stage.flush()
    stage.compute_all(stage.request("p2"))
    assert p.reports(ReportSent) == [ReportSent(P), ReportSent(RequestId("p2"))]


def test_a_release_that_crosses_the_end_of_its_request_does_not_wait_for_another() -> None:
    stage = Stage()
    stage.engine("on_aborted", stage.request())
    assert ask(stage, Release(KEY, 1, AT)) == []
    assert stage.p[0].machine.idle


def test_a_release_of_more_consumers_than_there_are_is_taken_for_what_there_is() -> None:
    stage = Stage()
    ask(stage, Release(SendKey(T, 5), 1, AT))
    ask(stage, Release(SendKey(T, 6), 2, AT, all_consumers=True))
    stage.compute_all(stage.request(consumers=2))
    assert stage.p[0].log == [ReportSent(P)]


def test_a_registration_after_its_release_is_refused() -> None:
    stage = Stage()
    stage.request(consumers=2)
    assert ask(stage, Release(KEY, 2, AT)) == []
    assert ask(stage, register(1, consumers=2)) == []  # of an earlier use, and nobody waits for an answer
    assert ask(stage, register(3, consumers=2)) == [Failed(KEY, 3, "released", quiet=True)]


# Pings


def test_a_ping_is_answered_with_how_things_stand() -> None:
    stage = streaming()
    committed, held, refused = (SendKey(TransferId(name), 0) for name in ("c", "h", "r"))
    stage.compute_all(stage.request("pc", "c"))
    ask(stage, register(2, key=committed))
    stage.land(stage.writes[-1])
    ask(stage, register(3, key=held))
    stage.request("pr", "r")
    ask(stage, register(4, key=refused, prompt=OTHER))
    leases = [Lease(KEY, 1), Lease(committed, 2), Lease(held, 3), Lease(refused, 4), Lease(SendKey(T, 7), 1)]
    *status, pong = ask(stage, Ping(5, AT, leases))
    assert pong == Pong(5, [KEY, committed, held, refused])
    assert status == [
        Accepted(KEY, 1),
        Commit(committed, 2, 100, 1000, 1),
        Failed(refused, 4, "prompt_mismatch", quiet=True),
    ]


def test_a_newer_attempt_than_p_has_seen_is_not_known() -> None:
    stage = streaming()
    held = SendKey(TransferId("h"), 0)
    ask(stage, register(3, key=held))
    ask(stage, Cancel(SendKey(TransferId("c"), 0), 3, AT))
    leases = [Lease(KEY, 2), Lease(held, 4), Lease(SendKey(TransferId("c"), 0), 4)]
    assert ask(stage, Ping(1, AT, leases)) == [Pong(1, [])]


def test_the_leases_of_somebody_else_are_not_known() -> None:
    stage = streaming()
    held = SendKey(TransferId("h"), 0)
    ask(stage, register(3, key=held))
    leases = [Lease(KEY, 1), Lease(held, 3)]
    assert ask(stage, Ping(1, AT, leases), AgentName("stranger")) == [Pong(1, [])]


def test_a_ping_about_a_send_that_waits_to_be_quiet_repeats_its_failure() -> None:
    stage = streaming()
    stage.engine("on_aborted", P)
    assert ask(stage, Ping(1, AT, [Lease(KEY, 1)])) == [Failed(KEY, 1, "aborted", quiet=False), Pong(1, [KEY])]
    ask(stage, Cancel(KEY, 1, AT))
    stage.land_all()
    assert ask(stage, Ping(2, AT, [Lease(KEY, 1)])) == [Failed(KEY, 1, "aborted", quiet=True), Pong(2, [KEY])]


def test_a_ping_renews_announcements() -> None:
    stage = Stage()
    assert ask(stage, Ping(1, AT, [], [T])) == [Pong(1, [])]
    stage.wait(TIMING.rendezvous_timeout_s - 1)
    ask(stage, Ping(2, AT, [], [T]))
    stage.wait(TIMING.rendezvous_timeout_s - 1)
    assert not stage.p[0].machine.idle
    stage.wait(2.0)
    assert stage.p[0].machine.idle


def test_answers_go_to_the_incarnation_that_asked() -> None:
    stage = Stage()
    [p] = stage.p
    for message in (Ping(1, AT), Cancel(KEY, 1, AT), register(1)):
        for action in p.machine.on_message(AGENT, message, stage.now_s):
            assert (action.address, action.agent) == (AT, AGENT)


# Reasons


@pytest.mark.parametrize("reason", ["x" * 5000, "\udcff", "ü" * 200, ""])
def test_any_reason_of_the_transport_can_be_told(reason: str) -> None:
    stage = streaming()
    stage.break_write(stage.writes[0], reason)
    assert isinstance(stage.take(Failed).message, Failed)
    [p], [d] = stage.p, stage.d
    stage.register("d2", "u")
    stage.flush()
    stage.do(p, p.machine.on_unreachable(d.agent, reason, stage.now_s))
    assert isinstance(stage.take(Failed).message, Failed)


def test_an_id_that_was_closed_once_is_not_closed_for_ever() -> None:
    """Aborted, then used well, then used again with the registration first."""
    stage = Stage()
    stage.engine("on_aborted", stage.request("p1"))
    stage.compute_all(stage.request("p2"))
    stage.register("d2")
    stage.flush()
    stage.land_all()
    stage.flush()
    stage.register("d3")
    stage.flush()
    stage.compute_all(stage.request("p3"))
    stage.land_all()
    stage.flush()
    assert [report.request_id for report in stage.d[0].log] == ["d2", "d3"]


def test_a_rank_that_left_while_it_waited_does_not_take_the_others_with_it() -> None:
    """Two ranks of D register; the cancellation of the first is here, that of the second is still on its way."""
    stage = Stage(d_ranks=2)
    [p] = stage.p
    stage.register()
    stage.flush()
    stage.cancel(D)
    first, second = stage.find(Cancel)
    stage.arrive(first)
    stage.request()
    assert p.machine.send(SendKey(T, 0, 0, 1)).state is SendState.WAITING
    stage.arrive(second)
    stage.flush()
    stage.compute_all(P)
    assert p.reports(ReportSent) == [ReportSent(P)]
    assert stage.idle()


def test_a_registration_that_waits_wins_over_a_release_by_another_rank() -> None:
    stage = Stage(d_ranks=2)
    [p] = stage.p
    stage.register(ranks=stage.d[1:])
    stage.do(stage.d[0], stage.d[0].machine.release(KEY, [p.address]))
    stage.flush()
    stage.compute_all(stage.request())
    stage.land_all()
    stage.flush()
    assert stage.d[1].reports(ReportReceived)
    assert p.reports(ReportSent)


def test_a_cancelled_rank_and_a_release_of_the_same_consumer_are_no_contradiction() -> None:
    stage = Stage(d_ranks=2)
    [p] = stage.p
    stage.register(ranks=stage.d[1:])
    stage.flush()
    stage.cancel(D)
    stage.flush()
    stage.do(stage.d[0], stage.d[0].machine.release(KEY, [p.address]))
    stage.flush()
    stage.compute_all(stage.request())
    assert p.log == [ReportSent(P)]
    assert stage.idle()


def test_a_cancelled_registration_of_another_prompt_says_nothing_about_the_request() -> None:
    stage = Stage()
    stage.register(prompt=OTHER)
    stage.flush()
    stage.cancel(D)
    stage.flush()
    stage.compute_all(stage.request())
    assert not stage.p[0].reports(ReportSent)
    stage.register("d2")
    stage.flush()
    stage.land_all()
    stage.flush()
    assert stage.d[0].reports(ReportReceived)
