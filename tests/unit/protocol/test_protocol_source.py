"""The fence around P's blocks: preemption, poison, aborts, and when the engine may have them back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_cases import PROMPT, Stage, T, pieces, streaming

from kvpush.protocol.actions import ReportFailed, ReportReceived, ReportReleased, ReportSent, SendEnded
from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import RequestId, SendKey
from kvpush.protocol.messages import Commit, Failed, Quiet
from kvpush.protocol.send import MAX_STREAMED_PIECES
from kvpush.protocol.transitions import SendState

pytestmark = pytest.mark.unit

KEY = SendKey(T, 0)
P, D = RequestId("p"), RequestId("d")


def not_posted(stage: Stage, number: int) -> None:
    """The transfer layer holds a piece back: its blocks are being taken."""
    post = stage.writes.pop(number)
    stage.do(post.rank, post.rank.machine.on_not_posted(post.piece.key, post.piece.piece, stage.now_s))


# Preemption


def test_preempted_at_producer() -> None:
    """What has landed stays landed: P goes on from the watermark after the request has been computed again."""
    stage = streaming()
    stage.land_all()
    stage.engine("on_preempted", P)
    assert stage.p[0].machine.send(KEY).state is SendState.WAITING
    stage.engine("on_tokens", P, 32)  # computed again up to below the watermark
    stage.engine("on_tokens", P, 64)
    assert not stage.writes
    stage.engine("on_tokens", P, 96)
    stage.compute_all(P)
    assert pieces(stage.writes) == [(64, 96), (96, 100)]
    stage.land_all()
    stage.flush()
    assert stage.d[0].log == [ReportReceived(D, 100, 1000)]
    assert stage.idle()


def test_a_piece_that_was_held_back_is_owed_again() -> None:
    stage = streaming()
    stage.engine("on_tokens", P, 80)
    stage.compute_all(P)
    assert pieces(stage.writes) == [(0, 64), (64, 80), (80, 100)]
    assert stage.p[0].machine.send(KEY).state is SendState.DRAINING


def test_pieces_held_back_in_the_middle_are_owed_from_the_first_of_them_on() -> None:
    stage = streaming()
    stage.engine("on_tokens", P, 80)
    stage.engine("on_tokens", P, 96)
    not_posted(stage, 1)
    assert stage.p[0].machine.send(KEY).state is SendState.WAITING
    not_posted(stage, 1)
    stage.land_all()
    assert not stage.find(Commit)
    stage.engine("on_preempted", P)
    stage.compute_all(P)
    assert pieces(stage.writes) == [(64, 100)]
    stage.land_all()
    stage.flush()
    assert stage.d[0].log == [ReportReceived(D, 100, 1000)]


def test_the_last_piece_held_back_does_not_commit() -> None:
    stage = streaming()
    stage.land_all()
    stage.engine("on_tokens", P, 100)
    assert stage.p[0].machine.send(KEY).state is SendState.DRAINING
    not_posted(stage, 0)
    assert not stage.find(Commit)
    assert stage.p[0].machine.send(KEY).state is SendState.WAITING


def test_what_was_held_back_is_tried_again() -> None:
    """Whatever became of the preemption: a piece that was not posted does not wait for ever."""
    stage = streaming()
    stage.land_all()
    stage.compute_all(P)
    not_posted(stage, 0)
    stage.wait(0.5)
    assert pieces(stage.writes) == [(64, 100)]


def test_blocks_that_are_read_cannot_be_preempted() -> None:
    stage = streaming()
    [p] = stage.p
    with pytest.raises(ProtocolError, match="preempted while its blocks are read") as caught:
        p.machine.on_preempted(P, stage.now_s)
    assert caught.value.fault == "local"
    assert p.machine.send(KEY).state is SendState.STREAMING
    stage.engine("on_tokens", P, 80)  # nothing has changed
    assert pieces(stage.writes) == [(0, 64), (64, 80)]


def test_a_finished_request_cannot_be_preempted() -> None:
    stage = Stage()
    stage.compute_all(stage.request())
    with pytest.raises(ProtocolError, match="although it has finished"):
        stage.p[0].machine.on_preempted(P, stage.now_s)


def test_a_request_that_is_not_complete_when_it_finishes_is_a_failure() -> None:
    """Preempted with output in flight: the table does not cover the prompt."""
    stage = streaming()
    stage.land_all()
    stage.engine("on_preempted", P)
    stage.engine("on_finished", P)
    stage.flush()
    assert stage.d[0].log == [ReportFailed(D, "incomplete"), ReportReleased(D)]
    assert stage.p[0].reports(ReportSent)
    assert stage.idle()


@given(st.lists(st.sampled_from([1, 5, 16, 40, "preempt", "land", "hold back"]), max_size=25), st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_any_course_of_chunks_and_preemptions_delivers_every_token(course: list[int | str], first_token: int) -> None:
    """Every token from the first one on is written by a piece that landed, and the last piece comes last."""
    stage = Stage()
    stage.request()
    stage.register(first_token=first_token)
    stage.flush()
    ready, landed = 0, set()

    def land() -> None:
        for post in stage.writes:
            landed.update(range(post.piece.first_token, post.piece.end_token))
        stage.land_all()

    for what in [*course, 100]:
        if isinstance(what, int):
            ready = min(100, ready + what)
            stage.engine("on_tokens", P, ready)
        elif what == "land":
            land()
        elif what == "hold back":
            if stage.writes:
                not_posted(stage, -1)
        elif not stage.find(Commit):
            land()
            stage.engine("on_preempted", P)
            ready = 0
    stage.engine("on_tokens", P, 100)
    stage.wait(0.5)
    land()
    stage.wait(0.5)
    land()
    stage.engine("on_finished", P)
    assert landed == set(range(first_token, 100))
    stage.flush()
    assert [type(action) for action in stage.d[0].log] == [ReportReceived]
    assert stage.p[0].reports(ReportSent)


def test_pieces_of_one_attempt_are_bounded_so_that_their_digests_fit() -> None:
    stage = Stage(block_size=1)
    prompt = type(PROMPT)(MAX_STREAMED_PIECES + 50, PROMPT.digest)
    stage.request(prompt=prompt)
    stage.register(prompt=prompt)
    stage.flush()
    for ready in range(1, prompt.num_tokens):
        stage.engine("on_tokens", P, ready)
    assert len(stage.writes) == MAX_STREAMED_PIECES
    stage.compute_all(P, prompt)
    assert pieces(stage.writes)[-1] == (MAX_STREAMED_PIECES, prompt.num_tokens)
    while stage.writes:
        stage.land(stage.writes[0], b"x" * 16)
    commit = stage.take(Commit).message  # and has been encoded
    assert isinstance(commit, Commit)
    assert len(commit.digests) == MAX_STREAMED_PIECES + 1


# Poison


def test_stopped_consumer() -> None:
    """D is stopped, its write does not end, and P needs the blocks: P goes on, and the attempt never commits."""
    stage = streaming()
    [p] = stage.p
    stage.engine("on_poisoned", P)
    assert stage.take(Failed).message == Failed(KEY, 1, "poisoned", quiet=False)
    stage.engine("on_preempted", P)
    assert p.machine.in_flight(P) == 0  # it reads blocks that are not the request's any more
    stage.compute_all(P)
    assert pieces(stage.writes) == [(0, 64)]
    assert p.log[-1] == ReportSent(P)
    assert not p.machine.idle
    stage.land_all()
    assert [type(letter.message) for letter in stage.mail] == [Quiet]
    stage.flush()
    assert stage.d[0].log == [ReportFailed(D, "stopped"), ReportReleased(D)]
    assert stage.idle()


def test_a_poisoned_attempt_never_commits_though_every_piece_lands() -> None:
    stage = streaming()
    stage.compute_all(P)
    stage.engine("on_poisoned", P)
    stage.land_all()
    assert not stage.find(Commit)
    assert [ended.state for ended in stage.p[0].reports(SendEnded)] == ["failed"]


def test_poison_touches_only_what_is_in_flight() -> None:
    """Of two consumers one has a write in flight; the other lost nothing, and is served after the resumption."""
    stage = Stage(engines=2)
    [p] = stage.p
    stuck, well = stage.d
    stage.request(consumers=2)
    stage.register("d0", consumer=0, consumers=2, ranks=[stuck])
    stage.flush()
    stage.register("d1", consumer=1, consumers=2, ranks=[well])
    stage.flush()
    stage.engine("on_tokens", P, 32)
    first, second = stage.writes
    stage.land(second)
    stage.engine("on_poisoned", P)
    stage.engine("on_preempted", P)
    stage.flush()
    assert stuck.log == [ReportFailed(RequestId("d0"), "poisoned")]
    stage.compute_all(P)
    assert pieces(stage.writes) == [(0, 32), (32, 100)]
    stage.land(stage.writes[1])
    stage.flush()
    assert well.log == [ReportReceived(RequestId("d1"), 100, 1000)]
    assert p.reports(ReportSent)  # the poisoned write does not hold blocks that it does not read
    stage.land(first)
    stage.flush()
    assert stuck.log[-1] == ReportReleased(RequestId("d0"))
    assert stage.idle()


def test_a_consumer_that_comes_after_the_poison_is_served() -> None:
    stage = Stage(engines=2)
    stuck, late = stage.d
    stage.request(consumers=2)
    stage.register("d0", consumer=0, consumers=2, ranks=[stuck])
    stage.flush()
    stage.engine("on_tokens", P, 32)
    stage.engine("on_poisoned", P)
    stage.engine("on_preempted", P)
    stage.register("d1", consumer=1, consumers=2, ranks=[late])
    stage.flush()
    assert len(stage.writes) == 1
    stage.compute_all(P)
    stage.land(stage.writes[1])
    stage.flush()
    assert late.reports(ReportReceived)


def test_nothing_is_posted_between_poison_and_resumption() -> None:
    stage = streaming()
    stage.engine("on_poisoned", P)
    stage.register("d1", "u")
    stage.flush()
    stage.wait(1.0)
    assert pieces(stage.writes) == [(0, 64)]


def test_a_finished_request_that_is_poisoned_ends_for_everybody() -> None:
    stage = streaming()
    stage.compute_all(P)
    stage.engine("on_poisoned", P)
    assert stage.p[0].reports(ReportSent) == [ReportSent(P)]
    stage.land_all()
    stage.flush()
    assert stage.d[0].log == [ReportFailed(D, "poisoned"), ReportReleased(D)]
    assert stage.idle()


def test_the_key_of_a_poisoned_send_is_taken_until_its_writes_have_ended() -> None:
    """Another engine comes with the same transfer id while a write of the old one is still in flight."""
    stage = Stage(engines=2)
    [p] = stage.p
    stuck, other = stage.d
    stage.request()
    stage.register("d0", ranks=[stuck])
    stage.flush()
    stage.engine("on_tokens", P, 64)
    stage.engine("on_poisoned", P)
    stage.engine("on_aborted", P)
    assert p.reports(ReportSent)
    for late in (False, True):
        name = RequestId(f"d{late}")
        stage.register(name, ranks=[other])
        stage.flush()
        if not late:
            assert other.log == [ReportFailed(name, "duplicate"), ReportReleased(name)]
            stage.request("p2")
        else:
            assert other.log[2:] == [ReportFailed(name, "duplicate"), ReportReleased(name)]
    stage.land_all()
    stage.register("d3", ranks=[other])
    stage.flush()
    assert p.machine.send(KEY).agent == other.agent


def test_pieces_that_were_held_back_do_not_count_against_the_bound() -> None:
    stage = streaming()
    for _ in range(MAX_STREAMED_PIECES + 10):
        stage.engine("on_tokens", P, 80)
        not_posted(stage, 1)
    stage.engine("on_tokens", P, 80)
    assert pieces(stage.writes) == [(0, 64), (64, 80)]
