"""P's answers to messages that come late, early, twice, or from somebody else."""

from __future__ import annotations

import pytest
from protocol_cases import AGENT, AT, OTHER, Stage, T, ask, pieces, register, streaming

from kvpush.protocol.actions import ReportFailed, ReportReceived, ReportReleased
from kvpush.protocol.ids import AgentName, PeerAddress, RequestId, SendKey, TransferId
from kvpush.protocol.messages import Accepted, Cancel, Failed, Quiet, Register

pytestmark = pytest.mark.unit

KEY = SendKey(T, 0)
P, D = RequestId("p"), RequestId("d")


def test_the_stage_names_its_rank_as_expected() -> None:
    stage = Stage()
    assert (stage.d[0].agent, stage.d[0].address) == (AGENT, AT)


# Two of one name


def test_duplicate_transfer_id_of_another_engine() -> None:
    """The first is unharmed, the second a failed load; afterwards the id is usable."""
    stage = Stage(engines=2)
    first, second = stage.d
    stage.request()
    stage.register("d1", ranks=[first])
    stage.flush()
    stage.register("d2", ranks=[second])
    stage.flush()
    assert second.log == [ReportFailed(RequestId("d2"), "duplicate"), ReportReleased(RequestId("d2"))]
    stage.compute_all(P)
    stage.land_all()
    stage.flush()
    assert first.log == [ReportReceived(RequestId("d1"), 100, 1000)]
    stage.request("p3")
    stage.register("d3", ranks=[second])
    stage.flush()
    stage.compute_all(RequestId("p3"))
    stage.land_all()
    stage.flush()
    assert second.reports(ReportReceived)
    assert stage.idle()


def test_duplicate_before_the_request_is_known() -> None:
    stage = Stage(engines=2)
    first, second = stage.d
    stage.register("d1", ranks=[first])
    stage.flush()
    stage.register("d2", ranks=[second])
    stage.flush()
    assert second.log == [ReportFailed(RequestId("d2"), "duplicate"), ReportReleased(RequestId("d2"))]
    stage.compute_all(stage.request())
    stage.land_all()
    stage.flush()
    assert first.reports(ReportReceived)


def test_a_duplicate_with_several_ranks_does_not_mix_with_the_first() -> None:
    """Rank 1 of the second engine comes before rank 1 of the first one: it must not take that one's place."""
    stage = Stage(d_ranks=2, engines=2)
    mine, theirs = stage.d[:2], stage.d[2:]
    stage.request()
    stage.register("d1", ranks=mine)
    late = [letter for letter in stage.mail if letter.sender is mine[1]]
    stage.mail.remove(late[0])
    stage.flush()
    stage.register("d2", ranks=theirs)
    stage.flush()
    assert all(rank.reports(ReportFailed) for rank in theirs)
    stage.arrive(late[0])
    stage.flush()
    stage.compute_all(P)
    stage.land_all()
    stage.flush()
    assert all(rank.log == [ReportReceived(RequestId("d1"), 100, 1000)] for rank in mine)
    assert stage.idle()


def test_a_refused_registration_stays_refused() -> None:
    """Its memory was given back on the word that nothing will ever be written: a late copy must not revive it."""
    stage = Stage(engines=2)
    [p] = stage.p
    first, second = stage.d
    stage.request()
    stage.register("d1", ranks=[first])
    stage.flush()
    stage.register("d2", ranks=[second])
    [copy] = stage.find(Register)
    stage.flush()
    stage.compute_all(P)
    stage.land_all()
    stage.flush()
    stage.request("p2")
    stage.arrive(copy)
    assert p.machine.send(KEY) is None
    assert stage.take(Failed).message == Failed(KEY, 1, "duplicate", quiet=True)


def test_a_cancellation_of_one_peer_does_not_forget_that_of_another() -> None:
    stage = Stage()
    assert ask(stage, Cancel(KEY, 5, AT)) == [Quiet(KEY, 5)]
    assert ask(stage, Cancel(KEY, 9, AT), AgentName("other")) == [Quiet(KEY, 9)]
    stage.request()
    assert ask(stage, register(5)) == [Quiet(KEY, 5)]
    assert stage.p[0].machine.send(KEY) is None


def test_a_consumer_that_p_was_not_told_of_is_a_duplicate() -> None:
    stage = Stage()
    stage.request(consumers=2)
    assert ask(stage, register(key=SendKey(T, 2), consumers=3)) == [Failed(SendKey(T, 2), 1, "duplicate", quiet=True)]
    assert ask(stage, register(2, key=SendKey(T, 1), consumers=3)) == [Accepted(SendKey(T, 1), 2)]


def test_ranks_that_disagree_about_their_number_are_refused() -> None:
    stage = Stage()
    stage.request()
    assert ask(stage, register(targets=2)) == [Accepted(KEY, 1)]
    other = SendKey(T, 0, 0, 1)
    answer = ask(stage, register(key=other, targets=3, sender=PeerAddress("d0", 1, 0, 1)), AgentName("rank 1"))
    assert answer == [Failed(other, 1, "contradiction", quiet=True)]


# Registrations again


def test_a_copy_of_a_live_registration_is_never_told_that_it_is_over() -> None:
    """The floor of its peer has risen above it meanwhile: later registrations have ended and were forgotten."""
    stage = Stage(max_tombstones=1)
    for held in (True, False):
        for attempt in range(10, 20):
            ask(stage, Cancel(SendKey(TransferId(f"u{attempt}"), 0), attempt, AT))
        if held:
            assert ask(stage, register(20)) == []
            ask(stage, Cancel(SendKey(TransferId("v"), 0), 30, AT))
            ask(stage, Cancel(SendKey(TransferId("w"), 0), 31, AT))
            assert ask(stage, register(20)) == []
        else:
            stage.request()
            assert ask(stage, register(20)) == [Accepted(KEY, 20)]
            stage.compute_all(P)
            assert pieces(stage.writes) == [(0, 100)]


def test_a_lower_attempt_that_comes_late_is_ignored() -> None:
    stage = Stage()
    stage.request()
    assert ask(stage, register(2)) == [Accepted(KEY, 2)]
    assert ask(stage, register(1)) == []
    assert stage.p[0].machine.send(KEY).attempt == 2


def test_a_higher_attempt_replaces_a_held_one() -> None:
    stage = Stage()
    assert ask(stage, register(1)) == []
    assert ask(stage, register(2, blocks=[b"d-1"])) == []
    assert ask(stage, register(1)) == []
    stage.request()
    assert stage.p[0].machine.send(KEY).registration.blocks == ((b"d-1",),)


def test_a_higher_attempt_with_another_prompt_ends_the_send() -> None:
    stage = streaming()
    stage.mail.clear()
    assert ask(stage, register(2, prompt=OTHER)) == [Failed(KEY, 2, "prompt_mismatch", quiet=False)]
    assert ask(stage, register(3, prompt=OTHER)) == [Failed(KEY, 3, "prompt_mismatch", quiet=False)]
    stage.land_all()
    assert stage.take(Quiet).message == Quiet(KEY, 3)


def test_a_higher_attempt_of_a_cancelled_send_waits_for_its_writes() -> None:
    stage = streaming()
    assert ask(stage, Cancel(KEY, 1, AT)) == []
    assert ask(stage, register(2)) == [Failed(KEY, 2, "cancelled", quiet=False)]
    stage.land_all()
    assert stage.take(Quiet).message == Quiet(KEY, 2)
    assert ask(stage, register(2)) == [Quiet(KEY, 2)]
