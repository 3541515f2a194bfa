"""Lost connections and restarted engines: registered once more, or failed; never mistaken for another incarnation."""

from __future__ import annotations

import pytest
from protocol_cases import PROMPT, TIMING, Stage, T, streaming

from kvpush.protocol.actions import (
    ReportFailed,
    ReportReceived,
    ReportReleased,
)
from kvpush.protocol.ids import AgentName, PeerAddress, RequestId, SendKey
from kvpush.protocol.messages import Commit, Failed, Ping, Pong, Quiet, Register
from kvpush.protocol.transitions import ReceiveState

pytestmark = pytest.mark.unit

KEY = SendKey(T, 0)
D = RequestId("d")
RELEASED = ReportReleased(D)


# Restarts and lost connections


def test_a_lost_connection_registers_once_more() -> None:
    stage = streaming()
    [p], [d] = stage.p, stage.d
    stage.land_all()
    stage.do(d, d.machine.on_disconnected(p.agent, stage.now_s))
    assert d.machine.receive(D).state is ReceiveState.REGISTERED
    [register] = stage.find(Register)
    assert register.message.attempt == 2  # type: ignore[union-attr]
    stage.flush()
    assert [(post.piece.attempt, post.piece.first_token, post.piece.end_token) for post in stage.writes] == [(2, 0, 64)]
    stage.compute_all(RequestId("p"))
    stage.land_all()
    assert stage.take(Commit).message == Commit(KEY, 2, 100, 1000, 2)
    stage.do(d, d.machine.on_message(p.agent, Commit(KEY, 2, 100, 1000, 2), stage.now_s))
    assert d.log == [ReportReceived(D, 100, 1000)]


def test_writes_of_the_old_attempt_are_awaited_before_the_new_one_commits() -> None:
    stage = streaming()
    [p], [d] = stage.p, stage.d
    [old] = stage.writes
    stage.do(d, d.machine.on_disconnected(p.agent, stage.now_s))
    stage.flush()
    stage.compute_all(RequestId("p"))
    for post in [post for post in stage.writes if post is not old]:
        stage.land(post)
    assert not stage.find(Commit)
    stage.land(old)
    assert isinstance(stage.take(Commit).message, Commit)


@pytest.mark.parametrize("failing", [True, False])
def test_the_end_of_an_old_write_says_nothing_about_the_new_attempt(failing: bool) -> None:
    stage = streaming()
    [p], [d] = stage.p, stage.d
    [old] = stage.writes
    stage.do(d, d.machine.on_disconnected(p.agent, stage.now_s))
    stage.flush()
    stage.compute_all(RequestId("p"))
    if failing:
        stage.break_write(old)
    else:
        stage.land(old, b"old")
    stage.land_all()
    assert stage.take(Commit).message == Commit(KEY, 2, 100, 1000, 2)


def test_a_second_lost_connection_is_a_failure() -> None:
    stage = streaming()
    [p], [d] = stage.p, stage.d
    stage.do(d, d.machine.on_disconnected(p.agent, stage.now_s))
    stage.do(d, d.machine.on_disconnected(p.agent, stage.now_s))
    assert d.log == [ReportFailed(D, "disconnected")]
    stage.flush()
    assert d.log == [ReportFailed(D, "disconnected")]
    stage.land_all()
    stage.flush()
    assert d.log == [ReportFailed(D, "disconnected"), RELEASED]


def test_a_lost_connection_to_somebody_else_does_not_matter() -> None:
    stage = streaming()
    [d] = stage.d
    assert d.machine.on_disconnected(AgentName("somebody"), stage.now_s) == []
    stage.cancel(D)
    assert d.machine.on_disconnected(stage.p[0].agent, stage.now_s) == []  # given up: nothing to register


def test_only_the_rank_that_was_lost_is_registered_again() -> None:
    stage = Stage(p_ranks=3)
    [d] = stage.d
    stage.compute_all(stage.request())
    stage.register()
    stage.flush()
    stage.land(stage.writes[0])
    commit = stage.take(Commit)
    stage.do(d, d.machine.on_disconnected(stage.p[1].agent, stage.now_s))
    [register] = stage.find(Register)
    assert register.receiver is stage.p[1]
    assert d.machine.receive(D).attempts == {stage.p[0].address: 1, stage.p[1].address: 2, stage.p[2].address: 1}
    stage.arrive(commit)  # of the first attempt, and still good
    stage.flush()
    stage.land_all()
    stage.flush()
    assert d.log == [ReportReceived(D, 100, 3000)]


def test_a_failure_at_p_before_the_new_attempt_holds_for_it_and_is_not_called_quiet() -> None:
    """P noticed the lost connection too: a write of the old attempt is in flight when D registers again."""
    stage = streaming()
    [p], [d] = stage.p, stage.d
    stage.do(p, p.machine.on_unreachable(d.agent, "disconnected", stage.now_s))
    stage.mail.clear()
    stage.do(d, d.machine.on_disconnected(p.agent, stage.now_s))
    stage.flush()
    assert d.log == [ReportFailed(D, "disconnected")]  # but not released
    stage.land_all()
    stage.flush()
    assert d.log == [ReportFailed(D, "disconnected"), RELEASED]


def test_the_reason_of_the_end_is_told_to_a_registration_that_comes_after_it() -> None:
    stage = Stage()
    [p], [d] = stage.p, stage.d
    request = stage.request()
    stage.register()
    stage.flush()
    stage.engine("on_tokens", request, 64)
    stage.break_write(stage.writes[0])
    stage.mail.clear()
    stage.do(d, d.machine.on_disconnected(p.agent, stage.now_s))
    stage.flush()
    assert d.log == [ReportFailed(D, "write_failed"), RELEASED]


def test_producer_restarts_and_the_registration_reaches_the_new_one() -> None:
    """The old incarnation may still write: only its proven end frees the memory."""
    stage = streaming()
    [old], [d] = stage.p, stage.d
    new = stage.start_p(old.address)
    stage.do(d, d.machine.on_disconnected(old.agent, stage.now_s))
    assert d.log == [ReportFailed(D, "peer_restarted")]
    stage.mail.clear()
    stage.wait(TIMING.ping_interval_s, ranks=[d])
    stage.flush()
    assert len(d.log) == 1  # the new one is quiet, the old one is not
    assert d.machine.receive(D).may_write == {old.agent: old.address}
    stage.do(d, d.machine.on_gone(old.agent, stage.now_s))
    assert d.log == [ReportFailed(D, "peer_restarted"), RELEASED]
    assert not d.machine.expects(new.agent)
    stage.register("next")  # new requests use P again, without a restart of D
    stage.request(ranks=[new])
    stage.flush()
    assert d.machine.receive(RequestId("next")).state is ReceiveState.ACCEPTED


def test_a_commit_of_the_old_incarnation_does_not_hide_the_new_one() -> None:
    """The rank has committed by one incarnation; the other has the registration too, and may write."""
    stage = Stage(p_ranks=2)
    [d] = stage.d
    [p0, p1] = stage.p
    stage.compute_all(stage.request())
    stage.register()
    [again] = [letter for letter in stage.find(Register) if letter.receiver is p0]
    stage.flush()
    stage.land(next(post for post in stage.writes if post.rank is p0))
    stage.flush()
    assert d.machine.receive(D).ranks.pending == {p1.address}
    new = AgentName("p0-reborn")
    stage.do(d, d.machine.on_delivered(p0.address, new, again.message, stage.now_s))
    assert d.log == [ReportFailed(D, "peer_restarted")]
    stage.do(d, d.machine.on_gone(p1.agent, stage.now_s))
    assert RELEASED not in d.log
    stage.do(d, d.machine.on_message(new, Quiet(KEY, 1), stage.now_s))
    assert d.log[-1] == RELEASED


def test_a_pong_from_another_incarnation_is_a_failure() -> None:
    stage = streaming()
    [old], [d] = stage.p, stage.d
    stage.start_p(old.address)
    stage.now_s += TIMING.ping_interval_s
    stage.do(d, d.machine.on_tick(stage.now_s))
    stage.flush()
    assert d.log == [ReportFailed(D, "peer_restarted")]


def test_a_third_incarnation_is_one_more_to_wait_for() -> None:
    stage = streaming()
    [p], [d] = stage.p, stage.d
    register = Register(KEY, 1, PROMPT, 0, [b"d-0"], d.address)
    for name in ("second", "third"):
        stage.do(d, d.machine.on_delivered(p.address, AgentName(name), register, stage.now_s))
    assert d.log == [ReportFailed(D, "peer_restarted")]
    for name in ("second", "third"):
        stage.do(d, d.machine.on_message(AgentName(name), Quiet(KEY, 1), stage.now_s))
        assert RELEASED not in d.log
    stage.do(d, d.machine.on_gone(p.agent, stage.now_s))
    assert d.log[-1] == RELEASED


def test_a_registration_that_could_not_be_sent_is_a_failed_load() -> None:
    stage = Stage()
    [d] = stage.d
    nowhere = PeerAddress("nowhere", 1)
    stage.do(d, d.machine.register(D, KEY, PROMPT, 0, [[b"x"]], 1, [nowhere], stage.now_s))
    assert d.log == [ReportFailed(D, "peer_restarted"), RELEASED]


def test_one_of_two_that_could_not_be_sent_is_a_failed_load_with_a_fence() -> None:
    stage = Stage()
    [d] = stage.d
    ranks = [PeerAddress("nowhere", 1), stage.p[0].address]
    actions = d.machine.register(D, KEY, PROMPT, 0, [[b"x"]], 1, ranks, stage.now_s)
    stage.do(d, reversed(actions))
    assert d.log == [ReportFailed(D, "peer_restarted")]
    stage.flush()
    assert d.log == [ReportFailed(D, "peer_restarted"), RELEASED]


def test_a_part_that_could_not_be_sent_fails_the_whole() -> None:
    stage = Stage()
    [p], [d] = stage.p, stage.d
    first, second = d.machine.register(D, KEY, PROMPT, 0, [[b"x"], [b"y"]], 1, [p.address], stage.now_s)
    stage.do(d, [first])
    stage.do(d, d.machine.on_undelivered(p.address, second.message, "disconnected", stage.now_s))
    assert d.log == [ReportFailed(D, "disconnected")]
    stage.flush()
    assert d.log == [ReportFailed(D, "disconnected"), RELEASED]
    assert p.machine.idle


def test_a_message_of_an_earlier_use_from_a_writer_of_then_is_no_fault() -> None:
    """The present use is not registered with anybody yet."""
    stage = streaming()
    [p], [d] = stage.p, stage.d
    stage.compute_all(RequestId("p"))
    stage.land_all()
    late = stage.find(Commit)[0].message
    stage.flush()
    d.machine.register(RequestId("d2"), KEY, PROMPT, 0, [[b"x"]], 1, [p.address], stage.now_s)
    assert d.machine.on_message(p.agent, late, stage.now_s) == []


@pytest.mark.parametrize("late", [Failed(KEY, 1, "late", quiet=True), Quiet(KEY, 1), Commit(KEY, 1, 100, 1000, 1)])
def test_what_is_said_about_the_attempt_before_is_over(late: Quiet) -> None:
    stage = streaming()
    [p], [d] = stage.p, stage.d
    stage.do(d, d.machine.on_disconnected(p.agent, stage.now_s))
    assert d.machine.on_message(p.agent, late, stage.now_s) == []
    assert d.machine.receive(D).state is ReceiveState.REGISTERED
    assert d.machine.receive(D).may_write == {p.agent: p.address}


def test_digests_of_the_attempt_before_are_not_told_again() -> None:
    stage = streaming()
    [p], [d] = stage.p, stage.d
    stage.land(stage.writes[0], b"old")
    stage.do(d, d.machine.on_disconnected(p.agent, stage.now_s))
    stage.flush()
    stage.compute_all(RequestId("p"))
    for name in (b"new", b"rest"):
        stage.land(stage.writes[0], name)
    commit = stage.take(Commit).message
    assert isinstance(commit, Commit)
    assert [digest.digest for digest in commit.digests] == [b"new", b"rest"]


def test_a_new_attempt_that_got_lost_is_sent_again() -> None:
    """P knows only the one before: that it had accepted that one says nothing."""
    stage = streaming()
    [p], [d] = stage.p, stage.d
    stage.do(d, d.machine.on_disconnected(p.agent, stage.now_s))
    stage.mail.clear()
    stage.wait(TIMING.ping_interval_s + 0.5, deliver=True)
    assert d.log == []
    assert p.machine.send(KEY).attempt == 2
    assert d.machine.receive(D).state is ReceiveState.ACCEPTED


def test_a_new_attempt_has_the_whole_bound_for_its_answer() -> None:
    stage = Stage()
    [p], [d] = stage.p, stage.d
    stage.register()
    stage.mail.clear()
    bound_s = TIMING.rendezvous_timeout_s + TIMING.peer_timeout_s

    def wait(seconds: float) -> None:
        end_s = stage.now_s + seconds
        while stage.now_s < end_s:
            stage.now_s += 1.0
            stage.do(d, d.machine.on_tick(stage.now_s))
            for letter in stage.find(Ping):
                stage.mail.remove(letter)
                stage.do(d, d.machine.on_message(p.agent, Pong(letter.message.seq, [KEY]), stage.now_s))  # type: ignore[union-attr]

    wait(bound_s - 2)
    stage.do(d, d.machine.on_disconnected(p.agent, stage.now_s))
    wait(bound_s)
    assert d.log == []
    wait(1.0)
    assert d.log == [ReportFailed(D, "no_answer")]


def test_an_attempt_before_that_could_not_be_sent_is_over() -> None:
    stage = Stage()
    [p], [d] = stage.p, stage.d
    first, second = d.machine.register(D, KEY, PROMPT, 0, [[b"x"], [b"y"]], 1, [p.address], stage.now_s)
    stage.do(d, [first])
    stage.do(d, d.machine.on_disconnected(p.agent, stage.now_s))
    assert d.machine.on_undelivered(p.address, second.message, "disconnected", stage.now_s) == []
    assert d.machine.receive(D).active


def test_what_could_not_be_sent_after_the_end_changes_nothing() -> None:
    stage = streaming()
    [p], [d] = stage.p, stage.d
    stage.cancel(D)
    register = Register(KEY, 1, PROMPT, 0, [b"d-0"], d.address)
    assert d.machine.on_undelivered(p.address, register, "given up", stage.now_s) == []
    assert d.machine.receive(D).may_write == {p.agent: p.address}


def test_a_registration_of_an_earlier_use_does_not_count_as_one_of_this() -> None:
    stage = streaming()
    [p], [d] = stage.p, stage.d
    stage.compute_all(RequestId("p"))
    stage.land_all()
    stage.flush()
    d.machine.register(RequestId("d2"), KEY, PROMPT, 0, [[b"x"]], 1, [p.address], stage.now_s)
    old = Register(KEY, 1, PROMPT, 0, [b"d-0"], d.address)
    assert d.machine.on_delivered(p.address, p.agent, old, stage.now_s) == []
    assert d.machine.receive(RequestId("d2")).may_write == {}
    assert d.machine.on_undelivered(p.address, old, "x", stage.now_s) == []
    assert d.machine.receive(RequestId("d2")).active
