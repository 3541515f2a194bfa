"""The fence around D's memory: it is given back when it is received, quiet, or when its writer is proven gone."""

from __future__ import annotations

import pytest
from protocol_cases import PROMPT, TIMING, Stage, T, streaming

from kvpush.protocol.actions import (
    Quarantined,
    ReportFailed,
    ReportReleased,
    ReportSent,
    SendTo,
)
from kvpush.protocol.ids import AgentName, RequestId, SendKey
from kvpush.protocol.messages import Accepted, Cancel, Failed, Ping, Pong, Quiet, Register
from kvpush.protocol.timing import Timing
from kvpush.protocol.transitions import ReceiveState

pytestmark = pytest.mark.unit

KEY = SendKey(T, 0)
D = RequestId("d")
RELEASED = ReportReleased(D)


# Cancellation


def test_a_cancelled_request_is_released_when_the_last_write_has_ended() -> None:
    stage = streaming()
    [p], [d] = stage.p, stage.d
    stage.cancel(D)
    assert d.log == []  # nobody waits for an answer, and the memory is held
    stage.flush()
    assert p.machine.send(KEY).terminal
    assert not stage.mail
    assert d.log == []
    stage.land_all()
    stage.flush()
    assert d.log == [RELEASED]


def test_a_write_that_fails_is_as_quiet_as_one_that_lands() -> None:
    stage = streaming()
    stage.cancel(D)
    stage.flush()
    stage.break_write(stage.writes[0])
    stage.flush()
    assert stage.d[0].log == [RELEASED]


def test_cancelling_without_a_write_in_flight_is_answered_at_once() -> None:
    stage = Stage()
    stage.request()
    stage.register()
    stage.flush()
    stage.cancel(D)
    assert isinstance(stage.find(Cancel)[0].message, Cancel)
    stage.flush()
    assert stage.d[0].log == [RELEASED]


def test_cancelling_twice_or_what_is_not_there_does_nothing() -> None:
    stage = streaming()
    [d] = stage.d
    stage.cancel(D)
    stage.cancel(D)
    stage.cancel(RequestId("unknown"))
    assert len(stage.find(Cancel)) == 1
    assert d.log == []


def test_cancelling_after_a_failure_reports_nothing_more_than_the_release() -> None:
    stage = streaming()
    stage.engine("on_aborted", RequestId("p"))
    stage.flush()
    stage.cancel(D)
    stage.land_all()
    stage.flush()
    assert stage.d[0].log == [ReportFailed(D, "aborted"), RELEASED]


def test_a_cancellation_that_crosses_its_commit_releases() -> None:
    stage = streaming()
    stage.compute_all(RequestId("p"))
    stage.land_all()
    stage.cancel(D)
    stage.flush()
    assert stage.d[0].log == [RELEASED]
    assert stage.p[0].reports(ReportSent)
    assert stage.idle()


def test_a_request_that_is_registered_with_nobody_yet_is_released_at_once() -> None:
    """Its registration waits for a connection; once released it must not leave any more."""
    stage = Stage()
    [d] = stage.d
    actions = d.machine.register(D, KEY, PROMPT, 0, [[b"x"]], 1, [stage.p[0].address], stage.now_s)
    register = actions[0].message
    assert d.machine.wants_sent(register)
    stage.cancel(D)
    assert d.log == [RELEASED]
    assert not d.machine.wants_sent(register)
    assert d.machine.on_undelivered(stage.p[0].address, register, "given up", stage.now_s) == []


def test_a_registration_that_left_after_all_is_fenced_too() -> None:
    stage = Stage(p_ranks=2)
    [d] = stage.d
    actions = d.machine.register(D, KEY, PROMPT, 0, [[b"x"]], 1, [rank.address for rank in stage.p], stage.now_s)
    first, second = actions
    stage.do(d, [first])
    stage.cancel(D)  # waits for the first rank to be quiet
    [p0, p1] = stage.p
    assert not d.machine.wants_sent(second.message)
    found = d.machine.on_delivered(p1.address, p1.agent, second.message, stage.now_s)
    assert found == [SendTo(p1.address, Cancel(KEY, 1, d.address), p1.agent)]
    stage.do(d, d.machine.on_message(p0.agent, Quiet(KEY, 1), stage.now_s))
    assert d.log == []
    stage.do(d, d.machine.on_message(p1.agent, Quiet(KEY, 1), stage.now_s))
    assert d.log == [RELEASED]


def test_a_cancellation_that_overtakes_its_registration_bars_it() -> None:
    stage = Stage()
    [p], [d] = stage.p, stage.d
    stage.request()
    stage.register()
    register = stage.take(Register)
    stage.cancel(D)
    stage.flush()
    assert d.log == [RELEASED]
    stage.arrive(register)  # much too late: its blocks are somebody else's
    stage.flush()
    assert p.machine.send(KEY) is None
    stage.compute_all(RequestId("p"))
    assert not stage.writes
    assert p.reports(ReportSent)  # and P does not wait for a consumer that has left
    assert stage.idle()


def test_it_stays_barred_after_the_tombstone_has_expired() -> None:
    stage = Stage()
    [p], [d] = stage.p, stage.d
    stage.register()
    register = stage.take(Register)
    stage.cancel(D)
    stage.flush()
    stage.wait(TIMING.tombstone_s + 5)
    assert p.machine.num_tombstones == 0
    stage.request()
    stage.arrive(register)
    assert stage.take(Failed).message == Failed(KEY, 1, "stale", quiet=True)
    assert p.machine.send(KEY) is None
    stage.register("later")  # a new registration is none of the old ones
    stage.flush()
    assert p.machine.send(KEY) is not None
    assert d.machine.receive(RequestId("later")).state is ReceiveState.ACCEPTED


# Failures at P


def test_abort_at_producer() -> None:
    """P's request is aborted after D has registered: D learns it at once."""
    stage = Stage()
    [p], [d] = stage.p, stage.d
    stage.request()
    stage.register()
    stage.flush()
    stage.engine("on_aborted", RequestId("p"))
    stage.flush()
    assert d.log == [ReportFailed(D, "aborted"), RELEASED]
    assert p.reports(ReportSent)
    assert stage.idle()


def test_a_failure_is_reported_at_once_and_the_memory_later() -> None:
    stage = streaming()
    [d] = stage.d
    stage.engine("on_aborted", RequestId("p"))
    assert stage.take(Failed).message == Failed(KEY, 1, "aborted", quiet=False)
    stage.do(d, d.machine.on_message(stage.p[0].agent, Failed(KEY, 1, "aborted", quiet=False), stage.now_s))
    assert d.log == [ReportFailed(D, "aborted")]
    assert d.machine.receive(D).state is ReceiveState.FAILING
    stage.flush()
    stage.land_all()
    assert stage.take(Quiet).message == Quiet(KEY, 1)
    stage.do(d, d.machine.on_message(stage.p[0].agent, Quiet(KEY, 1), stage.now_s))
    assert d.log == [ReportFailed(D, "aborted"), RELEASED]


def test_quiet_that_overtakes_its_failure_is_a_failure_too() -> None:
    stage = streaming()
    [d] = stage.d
    stage.engine("on_aborted", RequestId("p"))
    failed = stage.take(Failed)
    stage.land_all()
    stage.flush()
    assert d.log == [ReportFailed(D, "stopped"), RELEASED]
    stage.arrive(failed)
    assert len(d.log) == 2


def test_sibling_in_flight() -> None:
    """Of two writes the first fails while the second still writes: the memory is held until that one has ended."""
    stage = streaming()
    stage.compute_all(RequestId("p"))
    [first, second] = stage.writes
    stage.break_write(first)
    stage.flush()
    assert stage.d[0].log == [ReportFailed(D, "write_failed")]
    stage.wait(TIMING.peer_timeout_s / 2, deliver=True)
    assert stage.d[0].log == [ReportFailed(D, "write_failed")]
    stage.land(second)
    stage.flush()
    assert stage.d[0].log == [ReportFailed(D, "write_failed"), RELEASED]


def test_post_fails_on_one_rank() -> None:
    """The other ranks are cancelled and drained first."""
    stage = Stage(p_ranks=2)
    stage.compute_all(stage.request())
    stage.register()
    stage.flush()
    [first, second] = stage.writes
    stage.break_write(first, "post_failed")
    stage.flush()
    assert stage.d[0].log == [ReportFailed(D, "post_failed")]
    stage.land(second)
    stage.flush()
    assert stage.d[0].log == [ReportFailed(D, "post_failed"), RELEASED]
    assert all(rank.reports(ReportSent) for rank in stage.p)
    assert stage.idle()


def test_a_rank_that_has_committed_is_not_asked_to_be_quiet() -> None:
    stage = Stage(p_ranks=2)
    stage.compute_all(stage.request())
    stage.register()
    stage.flush()
    stage.land(stage.writes[0])
    stage.flush()
    stage.cancel(D)
    [cancel] = stage.find(Cancel)
    assert cancel.receiver is stage.p[1]


# Silence and quarantine


def test_never_answers() -> None:
    """P takes the registration and is stopped: an error in time, the memory only when it goes on."""
    stage = streaming()
    [p], [d] = stage.p, stage.d
    stage.wait(TIMING.peer_timeout_s + 1, ranks=[d])
    assert d.log == [ReportFailed(D, "peer_lost")]
    assert d.machine.quarantined == []
    stage.wait(TIMING.peer_timeout_s + 1, ranks=[d])
    assert d.log == [ReportFailed(D, "peer_lost"), Quarantined(D, (p.address,))]
    assert [receive.request_id for receive in d.machine.quarantined] == [D]
    assert d.machine.receive(D).may_write == {p.agent: p.address}
    stage.wait(3600.0, ranks=[d])
    assert len(d.log) == 2  # no time is a proof
    stage.flush()  # P goes on, and finds the cancellations
    assert len(d.log) == 2
    stage.land_all()
    stage.flush()
    assert d.log[2:] == [RELEASED]
    assert d.machine.quarantined == []


def test_a_quarantine_expires_only_if_it_is_told_to_and_says_that_nothing_is_proven() -> None:
    stage = streaming(timing=Timing(quarantine_release_after_s=60.0))
    [p], [d] = stage.p, stage.d
    stage.wait(TIMING.peer_timeout_s + 1, ranks=[d])
    stage.wait(TIMING.peer_timeout_s + 1, ranks=[d])
    assert d.log[-1] == Quarantined(D, (p.address,))
    stage.wait(59.0, ranks=[d])
    assert d.log[-1] == Quarantined(D, (p.address,))
    stage.wait(2.0, ranks=[d])
    assert d.log[-1] == ReportReleased(D, unproven=(p.address,))
    assert d.machine.idle
    # What P says about it later concerns nobody.
    stage.land_all()
    stage.flush()
    assert len(d.log) == 3


def test_a_failing_load_does_not_expire_before_its_quarantine_has_begun() -> None:
    stage = streaming(timing=Timing(quarantine_release_after_s=0.5))
    [d] = stage.d
    stage.cancel(D)
    stage.wait(TIMING.peer_timeout_s - 1, ranks=[d])
    assert d.log == []
    stage.land_all()
    stage.flush()
    assert d.log == [RELEASED]  # by proof


def test_cancellations_are_repeated_until_they_are_answered() -> None:
    stage = streaming()
    [d] = stage.d
    stage.cancel(D)
    stage.mail.clear()
    stage.wait(TIMING.ping_interval_s, ranks=[d])
    assert len(stage.find(Cancel)) == 1
    stage.wait(TIMING.peer_timeout_s, ranks=[d])
    assert len(stage.find(Cancel)) == 5
    stage.wait(TIMING.peer_timeout_s * 10, ranks=[d])  # in quarantine more rarely: nobody reads them
    assert 14 <= len(stage.find(Cancel)) <= 15
    stage.land_all()
    stage.flush()
    assert d.log[-1] == RELEASED
    assert d.machine.idle


def test_proof_that_the_writer_is_gone_releases_a_quarantine() -> None:
    stage = streaming()
    [p], [d] = stage.p, stage.d
    stage.wait(3 * TIMING.peer_timeout_s, ranks=[d])
    stage.do(d, d.machine.on_gone(AgentName("somebody else"), stage.now_s))
    assert RELEASED not in d.log
    stage.do(d, d.machine.on_gone(p.agent, stage.now_s))
    assert d.log[-1] == RELEASED
    assert d.machine.on_gone(p.agent, stage.now_s) == []
    assert d.machine.idle


def test_proof_before_the_silence_is_noticed_is_a_failure_and_a_release() -> None:
    stage = streaming()
    [p], [d] = stage.p, stage.d
    stage.do(d, d.machine.on_gone(p.agent, stage.now_s))
    assert d.log == [ReportFailed(D, "peer_gone"), RELEASED]
    assert not stage.find(Cancel)


def test_a_dead_writer_fails_its_load_at_once_and_holds_the_memory_until_its_connection_has_ended() -> None:
    stage = streaming()
    [p], [d] = stage.p, stage.d
    stage.do(d, d.machine.on_dead(AgentName("somebody else"), stage.now_s))
    assert d.log == []
    stage.do(d, d.machine.on_dead(p.agent, stage.now_s))
    assert d.log == [ReportFailed(D, "peer_gone")]
    stage.do(d, d.machine.on_dead(p.agent, stage.now_s))
    assert d.log == [ReportFailed(D, "peer_gone")]
    stage.do(d, d.machine.on_gone(p.agent, stage.now_s))
    assert d.log[-1] == RELEASED
    assert d.machine.idle


def test_all_writers_must_be_quiet_or_gone() -> None:
    stage = Stage(p_ranks=3)
    [d] = stage.d
    stage.compute_all(stage.request())
    stage.register()
    stage.flush()
    stage.land(stage.writes[0])  # the first commits
    stage.flush()
    stage.cancel(D)
    stage.do(d, d.machine.on_gone(stage.p[1].agent, stage.now_s))
    assert d.log == []
    stage.flush()
    assert d.log == []  # the third has a write in flight
    stage.land(next(post for post in stage.writes if post.rank is stage.p[2]))
    stage.flush()
    assert d.log == [RELEASED]


def test_quarantine_names_only_who_may_still_write() -> None:
    stage = Stage(p_ranks=2)
    [d] = stage.d
    stage.compute_all(stage.request())
    stage.register()
    stage.flush()
    stage.land(stage.writes[0])
    stage.flush()
    stage.wait(3 * TIMING.peer_timeout_s, ranks=[d])
    assert d.log[-1] == Quarantined(D, (stage.p[1].address,))


def test_silence_of_a_rank_that_has_committed_does_not_matter() -> None:
    stage = Stage(p_ranks=2)
    [d] = stage.d
    request = stage.request()
    stage.register()
    stage.flush()
    stage.engine("on_tokens", request, 100, ranks=[stage.p[0]])
    stage.land_all()
    stage.flush()
    stage.engine("on_tokens", request, 1, ranks=[stage.p[1]])
    for _ in range(60):
        stage.wait(1.0, ranks=[d, stage.p[1]])
        ping = Ping(10_000, d.address)
        stage.do(d, d.machine.on_message(stage.p[1].agent, Accepted(KEY, 1), stage.now_s))
        stage.p[1].machine.on_message(d.agent, ping, stage.now_s)
    assert d.log == []


def test_no_answer_from_a_peer_that_lives() -> None:
    """P answers pings, but the registration is neither accepted nor refused."""
    stage = Stage()
    [p], [d] = stage.p, stage.d
    stage.register()
    stage.mail.clear()
    bound_s = TIMING.rendezvous_timeout_s + TIMING.peer_timeout_s
    last = 0
    while stage.now_s < 1000.0 + bound_s:
        stage.now_s += 1.0
        stage.do(d, d.machine.on_tick(stage.now_s))
        for letter in stage.find(Ping):
            stage.mail.remove(letter)
            last = letter.message.seq  # type: ignore[union-attr]
            stage.do(d, d.machine.on_message(p.agent, Pong(last, [KEY]), stage.now_s))
    assert last > 10
    assert d.log == []
    stage.wait(0.5, ranks=[d])
    assert d.log[0] == ReportFailed(D, "no_answer")


def test_a_registration_that_leaves_after_its_writer_has_said_quiet_opens_the_fence_again() -> None:
    stage = Stage(p_ranks=2)
    [d] = stage.d
    [p0, p1] = stage.p
    stage.register()
    [copy] = [letter.message for letter in stage.find(Register) if letter.receiver is p0]
    stage.cancel(D)
    stage.mail.clear()
    stage.do(d, d.machine.on_message(p0.agent, Quiet(KEY, 1), stage.now_s))
    stage.do(d, d.machine.on_delivered(p0.address, p0.agent, copy, stage.now_s))
    assert len(stage.find(Cancel)) == 1
    stage.do(d, d.machine.on_message(p1.agent, Quiet(KEY, 1), stage.now_s))
    assert d.log == []
    stage.do(d, d.machine.on_message(p0.agent, Quiet(KEY, 1), stage.now_s))
    assert d.log == [RELEASED]


def test_silence_counts_only_for_who_still_owes_something() -> None:
    """Rank 0 has committed the first transfer and owes the second one; then it falls silent."""
    stage = Stage(p_ranks=2)
    [d] = stage.d
    [p0, p1] = stage.p
    stage.compute_all(stage.request())
    stage.register()
    stage.flush()
    stage.land(next(post for post in stage.writes if post.rank is p0))
    stage.flush()
    stage.register("d2", "t2")
    stage.flush()
    for _ in range(int(TIMING.peer_timeout_s) + 2):
        stage.wait(1.0, ranks=[d])
        stage.do(d, d.machine.on_message(p1.agent, Accepted(KEY, 1), stage.now_s))
    assert [report.request_id for report in d.reports(ReportFailed)] == ["d2"]
