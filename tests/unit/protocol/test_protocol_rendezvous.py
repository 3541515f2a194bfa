"""The tables of P that wait: parts of registrations, registrations, releases, announcements, and tombstones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_cases import OTHER, PROMPT, address

from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import AgentName, RequestId, SendKey, TransferId
from kvpush.protocol.messages import Register
from kvpush.protocol.registration import Assembly, Registration
from kvpush.protocol.rendezvous import HeldRelease, LocalRequest, Rendezvous

pytestmark = pytest.mark.unit

A, B = AgentName("a"), AgentName("b")
T = TransferId("t")
KEY = SendKey(T, 0)


def part(number: int, of: int, attempt: int = 1, **values: Any) -> Register:
    fields: dict[str, Any] = {
        "key": KEY, "attempt": attempt, "prompt": PROMPT, "first_token": 0,
        "blocks": [f"{number}".encode(), b"g"], "sender": address(), "part": number, "parts": of,
    }  # fmt: skip
    return Register(**(fields | values))


def registration(
    attempt: int = 1,
    agent: AgentName = A,
    key: SendKey = KEY,
    host: str = "d",
    blocks: bytes = b"x",
    now_s: float = 0.0,
) -> Registration:
    place = address(key.tp_rank, host)
    return Registration(key, attempt, PROMPT, 0, ((blocks,),), 1, 1, agent, place, now_s)


def local(name: str = "r", transfer_id: TransferId = T, consumers: int = 1) -> LocalRequest:
    return LocalRequest(RequestId(name), transfer_id, PROMPT, consumers, known_s=0.0)


# Parts


@given(st.permutations(range(5)), st.lists(st.integers(0, 4), max_size=6))
@settings(deadline=None)
def test_parts_are_joined_in_their_order_whatever_order_they_come_in(order: list[int], again: list[int]) -> None:
    assembly = Assembly()
    *early, last = order
    for number in [*early, *(number for number in again if number != last)]:
        assert assembly.add(A, part(number, 5), 3.0) is None
    joined = assembly.add(A, part(last, 5), 9.0)
    assert joined is not None
    assert joined.blocks == ((b"0", b"1", b"2", b"3", b"4"), (b"g",) * 5)
    assert (joined.agent, joined.key, joined.attempt, joined.received_s) == (A, KEY, 1, 9.0)
    assert len(assembly) == 0


def test_a_whole_registration_passes_straight_through() -> None:
    assembly = Assembly()
    joined = assembly.add(A, part(0, 1, consumers=3, targets=2), 1.0)
    assert joined is not None
    assert (joined.consumers, joined.targets, joined.blocks, joined.num_bytes) == (3, 2, ((b"0",), (b"g",)), 2)
    assert len(assembly) == 0


def test_parts_of_different_peers_do_not_mix() -> None:
    assembly = Assembly()
    assert assembly.add(A, part(0, 2), 0.0) is None
    assert assembly.add(B, part(1, 2), 0.0) is None
    assert len(assembly) == 2


def test_a_higher_attempt_replaces_the_parts_of_a_lower_one() -> None:
    assembly = Assembly()
    assembly.add(A, part(0, 2, attempt=1), 0.0)
    assert assembly.add(A, part(1, 2, attempt=2), 0.0) is None
    assert assembly.add(A, part(1, 2, attempt=1, blocks=[b"late", b"late"]), 0.0) is None
    assert len(assembly) == 1
    joined = assembly.add(A, part(0, 2, attempt=2), 0.0)
    assert joined is not None
    assert joined.attempt == 2
    assert joined.blocks == ((b"0", b"1"), (b"g", b"g"))


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": OTHER},
        {"first_token": 1},
        {"consumers": 2},
        {"targets": 2},
        {"blocks": [b"x"]},
        {"sender": address(0, "e")},
    ],
    ids=lambda values: next(iter(values)),
)
def test_parts_that_contradict_each_other_are_refused_and_the_first_stay(values: dict[str, Any]) -> None:
    assembly = Assembly()
    assembly.add(A, part(0, 2), 0.0)
    with pytest.raises(ProtocolError) as caught:
        assembly.add(A, part(1, 2, **values), 0.0)
    assert caught.value.fault == "peer"
    assert assembly.add(A, part(1, 2), 0.0) is not None


def test_parts_of_another_number_are_refused() -> None:
    assembly = Assembly()
    assembly.add(A, part(0, 2), 0.0)
    with pytest.raises(ProtocolError, match="contradict"):
        assembly.add(A, part(1, 3), 0.0)


def test_incomplete_registrations_are_bounded() -> None:
    assembly = Assembly(max_open=2)
    for number in range(2):
        assembly.add(A, part(0, 2, key=SendKey(TransferId(f"t{number}"), 0)), 0.0)
    with pytest.raises(ProtocolError, match="2 registrations are incomplete"):
        assembly.add(A, part(0, 2), 0.0)
    assert assembly.add(A, part(0, 1), 0.0) is not None
    assert len(assembly) == 2


def test_incomplete_registrations_expire_are_cancelled_and_go_with_their_peer() -> None:
    assembly = Assembly()
    assembly.add(A, part(0, 2, attempt=4), 5.0)
    assembly.expire(5.0)
    assembly.drop(A, KEY, 3)
    assembly.drop(B, KEY, 4)
    assembly.drop_agent(B)
    assert len(assembly) == 1
    assembly.drop(A, KEY, 4)
    assert len(assembly) == 0
    assembly.add(A, part(0, 2), 5.0)
    assembly.expire(5.1)
    assert len(assembly) == 0
    assembly.add(A, part(0, 2), 5.0)
    assembly.drop_agent(A)
    assert len(assembly) == 0


# The rendezvous


def test_the_registration_first_then_the_request() -> None:
    table = Rendezvous()
    mine = registration()
    assert table.hold(mine) == ""
    assert table.hold(registration(key=SendKey(TransferId("u"), 0))) == ""
    request = local()
    assert table.add_local(request) == ([mine], [])
    assert table.local(T) is request
    assert table.by_request(RequestId("r")) is request
    assert [held.key.transfer_id for held in table.held()] == ["u"]


def test_several_consumers_and_ranks_wait_for_one_request() -> None:
    table = Rendezvous()
    waiting = [registration(key=SendKey(T, consumer, 0, rank)) for consumer in range(2) for rank in range(2)]
    for one in waiting:
        assert table.hold(one) == ""
    assert table.add_local(local(consumers=2))[0] == waiting


def test_a_taken_transfer_or_request_id_is_refused_and_changes_nothing() -> None:
    table = Rendezvous()
    table.hold(registration(key=SendKey(TransferId("u"), 0)))
    table.add_local(local())
    for request, says in ((local("other"), "already has a request"), (local("r", TransferId("u")), "is known already")):
        with pytest.raises(ProtocolError, match=says) as caught:
            table.add_local(request)
        assert caught.value.fault == "local"
    assert table.local(TransferId("u")) is None
    assert len(table.locals()) == len(table.held()) == 1


def test_a_removed_request_leaves_nothing() -> None:
    table = Rendezvous()
    request = local()
    table.add_local(request)
    table.announce(T, A, 0.0)
    table.remove_local(request)
    assert table.empty
    table.add_local(local())  # and its names may be used again


def test_a_newer_attempt_takes_the_place_and_the_age_of_an_older_one() -> None:
    table = Rendezvous()
    table.hold(registration(1, now_s=1.0))
    assert table.hold(registration(1, blocks=b"changed", now_s=2.0)) == ""
    assert table.hold(registration(3, blocks=b"new", now_s=3.0)) == ""
    assert table.hold(registration(2, now_s=4.0)) == ""
    [held] = table.held()
    assert (held.attempt, held.blocks, held.received_s) == (3, ((b"new",),), 1.0)
    assert table.expire(1.5) == [held]
    assert table.empty


@pytest.mark.parametrize(
    "stranger",
    [registration(agent=B), registration(key=SendKey(T, 0, 0, 1), agent=B, host="other")],
    ids=["same key", "same consumer"],
)
def test_a_stranger_does_not_take_a_place_that_is_held(stranger: Registration) -> None:
    table = Rendezvous()
    table.hold(registration())
    assert table.hold(stranger) == "duplicate"
    assert [held.agent for held in table.held()] == [A]
    assert table.hold(registration(key=SendKey(T, 0, 0, 1), agent=B)) == ""  # another rank of the same engine


def test_held_registrations_are_bounded_in_number_and_size() -> None:
    table = Rendezvous(max_held=2, max_held_bytes=10)
    keys = [SendKey(TransferId(f"t{number}"), 0) for number in range(3)]
    assert table.hold(registration(key=keys[0], blocks=b"12345")) == ""
    assert table.hold(registration(key=keys[1], blocks=b"123456")) == "busy"
    assert table.hold(registration(key=keys[1], blocks=b"12345")) == ""
    assert table.hold(registration(key=keys[2], blocks=b"")) == "busy"
    assert table.hold(registration(2, key=keys[0], blocks=b"123456")) == "busy"
    assert table.hold(registration(2, key=keys[0], blocks=b"123")) == ""
    assert table.drop_held(keys[1]) is not None
    assert table.drop_held(keys[1]) is None
    assert table.hold(registration(key=keys[2], blocks=b"1234567")) == ""


def test_a_release_waits_for_its_request() -> None:
    table = Rendezvous()
    release = HeldRelease(KEY, 1, all_consumers=True, since_s=0.0)
    table.hold_release(release)
    assert not table.empty
    assert table.add_local(local()) == ([], [release])
    table.remove_local(local())
    assert table.empty


def test_a_registration_ends_what_its_rank_said_before() -> None:
    table = Rendezvous()
    table.hold_release(HeldRelease(KEY, 1, all_consumers=False, since_s=0.0))
    table.hold(registration(2))
    held, released = table.add_local(local())
    assert (len(held), released) == (1, [])


def test_releases_are_bounded_and_expire() -> None:
    table = Rendezvous(max_held=1)
    table.hold_release(HeldRelease(KEY, 1, all_consumers=False, since_s=5.0))
    with pytest.raises(ProtocolError, match="1 releases wait"):
        table.hold_release(HeldRelease(SendKey(T, 1), 1, all_consumers=False, since_s=5.0))
    assert table.expire(5.0) == []
    assert not table.empty
    table.expire(5.1)
    assert table.empty


def test_announcements_are_renewed_bounded_and_expire() -> None:
    table = Rendezvous(max_held=1)
    assert table.announced_s(T) is None
    assert table.announce(T, A, 1.0)
    assert table.announce(T, A, 4.0)
    assert not table.announce(TransferId("u"), A, 4.0)
    assert table.announced_s(T) == 4.0
    table.expire(4.0)
    assert not table.empty
    table.expire(4.1)
    assert table.empty


def test_the_announcement_of_a_known_request_stays() -> None:
    table = Rendezvous()
    table.add_local(local())
    table.announce(T, A, 1.0)
    table.expire(100.0)
    assert table.announced_s(T) == 1.0


def test_a_local_request_finishes_once() -> None:
    request = local()
    request.ready = 50
    assert request.computing
    assert not request.complete
    request.finish(7.0)
    request.finish(9.0)
    assert (request.ended_s, request.waiting_since_s, request.computing) == (7.0, 7.0, False)
