"""Pieces by way of staging slots: what is packed needs no blocks any more, and what was asked for that way no fence."""

from __future__ import annotations

import pytest
from protocol_cases import AGENT, PROMPT, Post, Stage, T, address, pieces, streaming

from kvpush.protocol.actions import ReportFailed, ReportReceived, ReportReleased, ReportSent
from kvpush.protocol.consumer import Consumer
from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import RequestId, SendKey
from kvpush.protocol.messages import Accepted, Cancel, Commit, Failed, Quiet, Register, Staged
from kvpush.protocol.timing import Timing
from kvpush.protocol.transitions import SendState

pytestmark = pytest.mark.unit
KEY = SendKey(T, 0)
P, D = RequestId("p"), RequestId("d")


def read(stage: Stage, post: Post) -> None:
    stage.do(post.rank, post.rank.machine.on_read(post.piece.key, post.piece.piece))


def cut(stage: Stage, post: Post, end_token: int) -> None:
    stage.do(post.rank, post.rank.machine.on_cut(post.piece.key, post.piece.piece, end_token, stage.now_s))


def test_blocks_that_were_packed_may_be_taken_while_the_piece_is_on_its_way() -> None:
    stage = streaming()
    with pytest.raises(ProtocolError, match="while its blocks are read"):
        stage.engine("on_preempted", P)
    read(stage, stage.writes[0])
    assert stage.p[0].machine.in_flight(P) == 0
    stage.engine("on_preempted", P)
    stage.engine("on_tokens", P, 64)
    assert pieces(stage.writes) == [(0, 64)]  # what is on its way counts as posted
    stage.compute_all(P)
    assert pieces(stage.writes) == [(0, 64), (64, 100)]
    stage.land_all()
    stage.flush()
    assert stage.d[0].log == [ReportReceived(D, 100, 1000)]


def test_a_preemption_after_everything_was_packed_changes_nothing() -> None:
    stage = streaming()
    stage.engine("on_tokens", P, 100)
    for post in list(stage.writes):
        read(stage, post)
    stage.engine("on_preempted", P)
    assert stage.p[0].machine.send(KEY).state is SendState.DRAINING
    stage.land_all()
    stage.flush()
    assert stage.d[0].log == [ReportReceived(D, 100, 1000)]


def test_what_was_not_packed_in_time_is_owed_again() -> None:
    stage = streaming()
    stage.engine("on_tokens", P, 96)
    assert pieces(stage.writes) == [(0, 64), (64, 96)]
    later = stage.writes.pop(1)
    stage.do(later.rank, later.rank.machine.on_not_posted(later.piece.key, later.piece.piece, stage.now_s))
    cut(stage, stage.writes[0], 32)
    stage.engine("on_preempted", P)
    stage.engine("on_tokens", P, 32)
    assert pieces(stage.writes) == [(0, 64)]
    stage.compute_all(P)
    assert pieces(stage.writes) == [(0, 64), (32, 100)]
    stage.land_all()
    stage.flush()
    assert [type(entry) for entry in stage.d[0].log] == [ReportReceived]


@pytest.mark.parametrize("end_token", [0, 64, 80])
def test_a_piece_is_cut_inside_or_not_at_all(end_token: int) -> None:
    stage = streaming()
    with pytest.raises(ProtocolError, match="cannot be cut"):
        cut(stage, stage.writes[0], end_token)
    assert stage.p[0].machine.send(KEY).posted == 64


def test_an_aborted_request_gives_its_blocks_back_when_they_are_packed() -> None:
    stage = streaming()
    stage.engine("on_aborted", P)
    assert stage.p[0].reports(ReportSent) == []
    read(stage, stage.writes[0])
    assert stage.p[0].reports(ReportSent) == [ReportSent(P)]
    stage.break_write(stage.writes[0], "stopped")
    assert stage.p[0].machine.idle


def test_a_poisoned_request_fails_only_what_still_reads_it() -> None:
    stage = streaming()
    read(stage, stage.writes[0])
    stage.engine("on_poisoned", P)
    assert not stage.p[0].machine.send(KEY).terminal


def consumer(*, direct: bool) -> tuple[Consumer, Register]:
    made = Consumer(Timing(), address(0, "d"))
    actions = made.register(D, KEY, PROMPT, 0, [[b"\x00"]], 1, [address(0, "p")], 0.0, direct=direct)
    [message] = [action.message for action in actions]
    assert isinstance(message, Register)
    assert message.direct is direct
    made.on_delivered(address(0, "p"), AGENT, message, 0.0)
    return made, message


def test_a_failed_load_by_way_of_slots_is_released_at_once() -> None:
    made, message = consumer(direct=False)
    actions = made.on_message(AGENT, Failed(message.key, message.attempt, "aborted", quiet=False), 1.0)
    kinds = [type(getattr(action, "message", action)) for action in actions]
    assert kinds == [ReportFailed, Cancel, ReportReleased]
    assert made.idle
    assert made.on_message(AGENT, Quiet(message.key, message.attempt), 2.0) == []


def test_a_failed_load_that_may_be_written_directly_waits_for_quiet() -> None:
    made, message = consumer(direct=True)
    actions = made.on_message(AGENT, Failed(message.key, message.attempt, "aborted", quiet=False), 1.0)
    assert [type(getattr(action, "message", action)) for action in actions] == [ReportFailed, Cancel]
    assert made.on_message(AGENT, Quiet(message.key, message.attempt), 2.0) == [ReportReleased(D)]


def test_a_load_belongs_to_its_writer_and_its_present_attempt() -> None:
    made, message = consumer(direct=False)
    key, attempt = message.key, message.attempt
    assert made.loading(AGENT, key, attempt) == D
    assert made.loading(AGENT, key, attempt + 1) is None
    assert made.loading(AGENT, SendKey(T, 1), attempt) is None
    assert made.loading("stranger", key, attempt) is None  # type: ignore[arg-type]
    made.on_message(AGENT, Accepted(key, attempt), 1.0)
    assert made.loading(AGENT, key, attempt) == D
    made.on_message(AGENT, Commit(key, attempt, PROMPT.num_tokens, 1, 1), 1.0)
    assert made.loading(AGENT, key, attempt) is None


def test_staged_parts_are_not_for_the_state_machine() -> None:
    made, message = consumer(direct=False)
    with pytest.raises(ProtocolError, match="not this half's"):
        made.on_message(AGENT, Staged(message.key, message.attempt, 0, 1, 0, 1), 1.0)
