"""The normal course between two ranks, in every order in which its halves may meet."""

from __future__ import annotations

import itertools

import pytest
from protocol_cases import BLOCK_SIZE, Stage, T, pieces

from kvpush.protocol.actions import (
    Connect,
    ReportFailed,
    ReportReceived,
    ReportReleased,
    ReportSent,
    SendEnded,
    Verify,
)
from kvpush.protocol.ids import RequestId, SendKey
from kvpush.protocol.messages import (
    Accepted,
    Commit,
    PieceDigest,
    Register,
)
from kvpush.protocol.prompt import prompt_identity
from kvpush.protocol.transitions import ReceiveState, SendState

pytestmark = pytest.mark.unit

KEY = SendKey(T, 0)


def test_registration_first_chunk_by_chunk() -> None:
    stage = Stage()
    [p], [d] = stage.p, stage.d
    wanted = stage.register()
    assert d.machine.receive(wanted).state is ReceiveState.REGISTERED
    stage.flush()  # fast-consumer: P does not know the request yet, and holds the registration
    assert p.machine.send(KEY) is None
    assert not p.machine.idle
    request = stage.request()
    assert isinstance(stage.take(Accepted).message, Accepted)
    assert p.machine.send(KEY).state is SendState.WAITING
    stage.engine("on_tokens", request, 40)
    assert pieces(stage.writes) == [(0, 32)]  # whole blocks only
    stage.engine("on_tokens", request, 40)
    stage.engine("on_tokens", request, 47)
    assert pieces(stage.writes) == [(0, 32)]
    stage.engine("on_tokens", request, 95)
    stage.engine("on_tokens", request, 100)
    assert pieces(stage.writes) == [(0, 32), (32, 80), (80, 100)]
    assert p.machine.send(KEY).state is SendState.DRAINING
    assert p.machine.in_flight(request) == 3
    stage.engine("on_finished", request)
    stage.land(stage.writes[2])  # the order in which pieces end does not matter
    stage.land(stage.writes[0])
    assert not stage.find(Commit)
    assert not p.reports(ReportSent)
    stage.land(stage.writes[0])
    commit = stage.take(Commit)
    assert commit.message == Commit(KEY, 1, 100, 1000, 3)
    assert p.reports(ReportSent) == [ReportSent(request)]
    assert p.reports(SendEnded) == [SendEnded(KEY, request, "committed", "", 100, 1000, 3)]
    stage.arrive(commit)
    assert d.log == [ReportReceived(wanted, 100, 1000)]
    assert stage.idle()


def test_request_first() -> None:
    stage = Stage()
    request = stage.request()
    stage.compute_all(request)
    assert not stage.p[0].reports(ReportSent)
    stage.register()
    stage.flush()
    assert pieces(stage.writes) == [(0, 100)]
    stage.land_all()
    stage.flush()
    assert stage.d[0].log == [ReportReceived(RequestId("d"), 100, 1000)]
    assert stage.p[0].reports(ReportSent)
    assert stage.idle()


def test_a_commit_that_overtakes_its_acceptance() -> None:
    stage = Stage()
    stage.compute_all(stage.request())
    stage.register()
    stage.flush(Register)
    stage.land_all()
    accepted = stage.take(Accepted)
    stage.flush()
    assert stage.d[0].log == [ReportReceived(RequestId("d"), 100, 1000)]
    stage.arrive(accepted)
    assert len(stage.d[0].log) == 1
    assert stage.idle()


def test_without_streaming_everything_leaves_at_the_end() -> None:
    stage = Stage(stream=False)
    request = stage.request()
    stage.register()
    stage.flush()
    stage.engine("on_tokens", request, 96)
    assert not stage.writes
    stage.engine("on_tokens", request, 100)
    assert pieces(stage.writes) == [(0, 100)]


@pytest.mark.parametrize(
    ("first_token", "expected"), [(1, (1, 32)), (16, (16, 32)), (31, (31, 32)), (32, None), (90, None)]
)
def test_partial_prefix_hit(first_token: int, expected: tuple[int, int] | None) -> None:
    """Only what D does not hold moves, from any token on."""
    stage = Stage()
    request = stage.request()
    stage.register(first_token=first_token)
    stage.flush()
    stage.engine("on_tokens", request, 40)
    assert pieces(stage.writes) == ([expected] if expected else [])
    stage.compute_all(request)
    assert stage.writes[-1].piece.end_token == 100
    assert sum(end - first for first, end in pieces(stage.writes)) == 100 - first_token
    stage.land_all()
    stage.flush()
    assert stage.d[0].log == [ReportReceived(RequestId("d"), 100, 10 * (100 - first_token))]


@pytest.mark.parametrize("num_tokens", [1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1])
def test_short_prompt(num_tokens: int) -> None:
    prompt = prompt_identity(list(range(num_tokens)))
    stage = Stage()
    request = stage.request(prompt=prompt)
    stage.register(prompt=prompt)
    stage.flush()
    stage.compute_all(request, prompt)
    assert pieces(stage.writes)[-1][1] == num_tokens
    stage.land_all()
    stage.flush()
    assert stage.d[0].reports(ReportReceived)
    assert stage.idle()


def test_full_prefix_hit() -> None:
    """Nothing moves, and P frees as soon as it has finished."""
    stage = Stage()
    request = stage.request()
    stage.do(stage.d[0], stage.d[0].machine.release(KEY, [stage.p[0].address]))
    stage.flush()
    stage.compute_all(request)
    assert stage.p[0].log == [ReportSent(request)]
    assert stage.idle()


def test_a_release_before_the_request() -> None:
    stage = Stage()
    stage.do(stage.d[0], stage.d[0].machine.release(KEY, [stage.p[0].address]))
    stage.flush()
    assert not stage.p[0].machine.idle
    request = stage.request()
    stage.compute_all(request)
    assert stage.p[0].log == [ReportSent(request)]


def test_a_registration_in_parts_that_arrive_in_any_order() -> None:
    for order in itertools.permutations(range(3)):
        stage = Stage()
        request = stage.request()
        stage.register(parts=3)
        letters = stage.find(Register)
        for number in order[:2]:
            stage.arrive(letters[number])
        assert not stage.find(Accepted)
        stage.arrive(letters[order[2]])
        assert stage.p[0].machine.send(KEY).registration.blocks == ((b"d-0", b"d-1", b"d-2"),)
        stage.compute_all(request)
        stage.land_all()
        stage.flush()
        assert stage.idle()


def test_pieces_wait_for_the_connection() -> None:
    stage = Stage(connected=False)
    [p], [d] = stage.p, stage.d
    request = stage.request()
    stage.register()
    stage.flush()
    stage.compute_all(request)
    assert p.log == [Connect(d.address, d.agent)]
    assert not stage.writes
    stage.do(p, p.machine.on_connected(d.agent, stage.now_s))
    assert pieces(stage.writes) == [(0, 100)]


def test_a_connection_is_asked_for_once_and_while_the_registration_waits() -> None:
    stage = Stage(connected=False)
    [p], [d] = stage.p, stage.d
    for number in range(3):
        stage.register(f"d{number}", f"t{number}")
    stage.flush()
    stage.request("p0", "t0")
    assert p.log == [Connect(d.address, d.agent)]
    stage.do(p, p.machine.on_connected(d.agent, stage.now_s))
    stage.request("p1", "t1")
    assert len(p.log) == 1


# Digests


def test_digests_travel_with_the_commit_and_are_verified() -> None:
    stage = Stage()
    [d] = stage.d
    request = stage.request()
    wanted = stage.register()
    stage.flush()
    stage.engine("on_tokens", request, 50)
    stage.compute_all(request)
    stage.land(stage.writes[1], b"second")
    stage.land(stage.writes[0], b"first")
    stage.flush()
    [verify] = d.log
    at_p = stage.p[0].address
    assert verify == Verify(wanted, ((at_p, PieceDigest(48, 100, b"second")), (at_p, PieceDigest(0, 48, b"first"))))
    assert d.machine.receive(wanted).state is ReceiveState.RECEIVING
    stage.do(d, d.machine.on_verified(wanted, True, stage.now_s))
    assert d.log[1:] == [ReportReceived(wanted, 100, 1000)]
    assert d.machine.on_verified(wanted, True, stage.now_s) == []


def test_a_wrong_digest_is_a_failed_load_and_the_memory_is_free_at_once() -> None:
    stage = Stage()
    [d] = stage.d
    stage.compute_all(stage.request())
    wanted = stage.register()
    stage.flush()
    stage.land(stage.writes[0], b"wrong")
    stage.flush()
    d.log.clear()
    stage.do(d, d.machine.on_verified(wanted, False, stage.now_s))
    assert d.log == [ReportFailed(wanted, "integrity"), ReportReleased(wanted)]
    assert not stage.mail
    assert stage.idle()


def test_verification_needs_no_peer_any_more() -> None:
    """Whoever has committed may fall silent, break its connection or be gone: the bytes are here."""
    stage = Stage()
    [p], [d] = stage.p, stage.d
    stage.compute_all(stage.request())
    wanted = stage.register()
    stage.flush()
    stage.land(stage.writes[0], b"x")
    stage.flush()
    stage.do(d, d.machine.on_disconnected(p.agent, stage.now_s))
    stage.do(d, d.machine.on_gone(p.agent, stage.now_s))
    stage.wait(100.0)
    assert d.log == [Verify(wanted, ((p.address, PieceDigest(0, 100, b"x")),))]
    stage.do(d, d.machine.on_verified(wanted, True, stage.now_s))
    assert d.reports(ReportReceived)


def test_verified_out_of_turn_does_nothing() -> None:
    stage = Stage(p_ranks=2)
    [d] = stage.d
    stage.compute_all(stage.request())
    wanted = stage.register()
    stage.flush()
    assert d.machine.on_verified(wanted, True, stage.now_s) == []
    stage.land(stage.writes[0], b"x")
    stage.flush()  # one of two ranks
    assert d.machine.on_verified(wanted, True, stage.now_s) == []
    assert d.machine.on_verified(wanted, False, stage.now_s) == []
    assert d.machine.on_verified(RequestId("unknown"), True, stage.now_s) == []
    assert d.machine.receive(wanted).active
