"""A transfer id that is used again, messages that come again, and what may be seen meanwhile."""

from __future__ import annotations

import pytest
from protocol_cases import OTHER, PROMPT, TIMING, Stage, T

from kvpush.protocol.actions import (
    ReportFailed,
    ReportReceived,
    ReportReleased,
    ReportSent,
    SendEnded,
)
from kvpush.protocol.ids import PeerAddress, RequestId, SendKey
from kvpush.protocol.messages import (
    Accepted,
    Cancel,
    Commit,
    Failed,
    Ping,
    Quiet,
    Register,
    Release,
)
from kvpush.protocol.transitions import ReceiveState

pytestmark = pytest.mark.unit

KEY = SendKey(T, 0)


# A transfer id again


def test_a_transfer_id_is_usable_again_after_its_end() -> None:
    stage = Stage()
    [p], [d] = stage.p, stage.d
    for life in range(3):
        request = stage.request(f"p{life}")
        stage.register(f"d{life}")
        stage.flush()
        stage.compute_all(request)
        stage.land_all()
        stage.flush()
    assert [report.request_id for report in d.reports(ReportReceived)] == ["d0", "d1", "d2"]
    assert len(p.reports(ReportSent)) == 3
    assert stage.idle()


def test_a_late_commit_of_an_earlier_use_is_not_taken_for_this_one() -> None:
    stage = Stage()
    [d] = stage.d
    stage.compute_all(stage.request("p0"))
    stage.register("d0")
    stage.flush()
    stage.land_all()
    [late] = stage.find(Commit)
    stage.flush()
    wanted = stage.register("d1")
    stage.request("p1")
    stage.flush()
    stage.arrive(late)
    assert d.machine.receive(wanted).state is ReceiveState.ACCEPTED
    assert len(d.log) == 1
    stage.compute_all(RequestId("p1"))
    stage.land_all()
    stage.flush()
    assert d.log[1:] == [ReportReceived(wanted, 100, 1000)]


def test_report_twice() -> None:
    """Everything that was ever sent arrives again after the end: nothing is reported a second time, nothing stays."""
    stage = Stage()
    [p], [d] = stage.p, stage.d
    seen = []
    request = stage.request()
    stage.register()
    for _ in range(100):
        seen += [letter for letter in stage.mail if letter not in seen]
        if not stage.mail:
            break
        stage.arrive(stage.mail[0])
        if stage.find(Accepted):
            stage.compute_all(request)
            stage.land_all()
    logs = (list(p.log), list(d.log))
    assert {type(letter.message) for letter in seen} == {Register, Accepted, Commit}
    for letter in seen + seen[::-1]:
        stage.arrive(letter)
        stage.flush()
    assert (p.log, d.log) == logs
    assert stage.idle()


def test_a_repeated_registration_is_answered_with_how_things_stand() -> None:
    stage = Stage()
    stage.request()
    stage.register()
    [register] = stage.find(Register)
    stage.arrive(register)
    stage.arrive(register)
    assert [type(letter.message) for letter in stage.mail] == [Accepted, Accepted]
    stage.mail.clear()
    stage.compute_all(RequestId("p"))
    stage.land_all()
    stage.mail.clear()  # the commit is lost
    stage.arrive(register)
    assert isinstance(stage.take(Commit).message, Commit)
    assert not stage.writes


def test_messages_of_other_kinds_have_no_delivery_to_book() -> None:
    stage = Stage()
    [p], [d] = stage.p, stage.d
    stage.register()
    stage.mail.clear()
    for message in (Release(KEY, 9, d.address), Cancel(KEY, 1, d.address), Ping(1, d.address), Quiet(KEY, 1)):
        assert d.machine.wants_sent(message)
        assert d.machine.on_delivered(p.address, p.agent, message, stage.now_s) == []
        assert d.machine.on_undelivered(p.address, message, "x", stage.now_s) == []
    assert d.machine.receive(RequestId("d")).active


def test_other_prompt() -> None:
    """The two legs carry different prompts of one length: refused, and P goes on for who has the right one."""
    assert PROMPT.num_tokens == OTHER.num_tokens
    stage = Stage(engines=2)
    [p] = stage.p
    wrong, right = stage.d
    request = stage.request()
    stage.register("wrong", prompt=OTHER, ranks=[wrong])
    stage.flush(Register)
    assert stage.take(Failed).message == Failed(KEY, 1, "prompt_mismatch", quiet=True)
    stage.register("wrong again", "u", prompt=OTHER, ranks=[wrong])
    stage.flush()
    stage.request("pu", "u")  # the other order
    stage.flush()
    assert wrong.log == [
        ReportFailed(RequestId("wrong again"), "prompt_mismatch"),
        ReportReleased(RequestId("wrong again")),
    ]
    assert [ended.reason for ended in p.reports(SendEnded)] == ["prompt_mismatch"] * 2
    stage.register("right", ranks=[right])
    stage.flush()
    stage.compute_all(request)
    stage.land_all()
    stage.flush()
    assert right.reports(ReportReceived)
    assert ReportSent(request) in p.log


def test_state_is_visible_while_it_lasts() -> None:
    stage = Stage()
    [p], [d] = stage.p, stage.d
    request = stage.request()
    wanted = stage.register()
    assert d.machine.expects(p.agent)  # from delivery on
    assert p.machine.in_flight(request) == 0
    assert p.machine.in_flight(RequestId("unknown")) == 0
    assert p.machine.send(KEY) is None
    assert d.machine.receive(RequestId("unknown")) is None
    stage.flush()
    stage.compute_all(request)
    assert p.machine.in_flight(request) == 1
    stage.land_all()
    stage.flush()
    assert d.machine.receive(wanted) is None
    assert not d.machine.expects(p.agent)
    assert p.machine.num_tombstones == 1
    stage.wait(TIMING.tombstone_s + 1)
    assert p.machine.num_tombstones == 0


def test_the_key_names_the_rank_of_d() -> None:
    stage = Stage(d_ranks=2)
    stage.register()
    assert [letter.message.key for letter in stage.find(Register)] == [SendKey(T, 0, 0, 0), SendKey(T, 0, 0, 1)]  # type: ignore[union-attr]
    assert str(SendKey(T, 0, 0, 1)) == "t#0/pp0tp1"
    assert SendKey(T, 0).at(PeerAddress("h", 1, 2, 3)) == SendKey(T, 0, 2, 3)
