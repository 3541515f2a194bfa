"""Tombstones: what has ended stays ended, in bounded memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_cases import address

from kvpush.protocol.ids import AgentName, SendKey, TransferId
from kvpush.protocol.messages import Quiet
from kvpush.protocol.tombstones import Tombstone, Tombstones

pytestmark = pytest.mark.unit

A, B = AgentName("a"), AgentName("b")
T = TransferId("t")
KEY = SendKey(T, 0)


# Tombstones


def stone(attempt: int, key: SendKey = KEY, agent: AgentName = A, since_s: float = 0.0) -> Tombstone:
    return Tombstone(key, attempt, agent, address(), "cancelled", Quiet(key, attempt), since_s)


def test_the_highest_attempt_that_ended_is_remembered() -> None:
    stones = Tombstones()
    stones.put(stone(3))
    stones.put(stone(2))
    assert stones.get(KEY, A) == stone(3)
    assert stones.covers(KEY, A, 3)
    assert stones.covers(KEY, A, 1)
    assert not stones.covers(KEY, A, 4)
    stones.put(stone(5))
    assert stones.get(KEY, A) == stone(5)
    assert len(stones) == 1


def test_what_one_peer_did_does_not_replace_the_memory_of_another() -> None:
    stones = Tombstones()
    stones.put(stone(3))
    stones.put(stone(9, agent=B))
    assert stones.covers(KEY, A, 3)
    assert not stones.covers(KEY, A, 4)
    assert stones.covers(KEY, B, 9)


def test_what_expires_raises_the_floor_of_its_peer() -> None:
    stones = Tombstones()
    stones.put(stone(7, since_s=1.0))
    stones.put(stone(4, SendKey(T, 1), since_s=2.0))
    stones.expire(1.5)
    assert stones.get(KEY, A) is None
    assert stones.floor(A) == 7
    assert stones.covers(SendKey(TransferId("never seen"), 0), A, 7)
    assert not stones.covers(KEY, A, 8)
    assert not stones.covers(KEY, B, 1)
    stones.expire(9.0)
    assert stones.floor(A) == 7  # a floor never sinks
    assert len(stones) == 0


def test_the_oldest_is_dropped_when_there_are_too_many() -> None:
    stones = Tombstones(max_count=2)
    for attempt in (1, 2, 3):
        stones.put(stone(attempt, SendKey(T, attempt)))
    assert len(stones) == 2
    assert stones.floor(A) == 1
    stones.put(stone(4, SendKey(T, 2)))  # a repeated key is the newest again
    stones.put(stone(5, SendKey(T, 5)))
    assert stones.get(SendKey(T, 2), A) is not None
    assert stones.floor(A) == 3


def test_floors_are_bounded() -> None:
    stones = Tombstones(max_count=2)
    for number in range(10):
        stones.put(stone(1, agent=AgentName(f"agent {number}"), since_s=float(number)))
        stones.expire(number + 1.0)
    assert [stones.floor(AgentName(f"agent {number}")) for number in (7, 8, 9)] == [0, 1, 1]


def test_a_closed_transfer_is_remembered_for_a_while_or_until_it_is_used_again() -> None:
    stones = Tombstones(max_count=2)
    stones.close(T, "unclaimed", 1.0)
    assert stones.closed(T) == "unclaimed"
    stones.reopen(T)
    stones.reopen(T)
    assert stones.closed(T) == ""
    stones.close(T, "aborted", 1.0)
    stones.expire(1.0)
    assert stones.closed(T) == "aborted"
    stones.expire(1.1)
    assert stones.closed(T) == ""
    for name in "abc":
        stones.close(TransferId(name), "aborted", 2.0)
    assert [stones.closed(TransferId(name)) for name in "abc"] == ["", "aborted", "aborted"]


def test_there_must_be_room_for_one() -> None:
    with pytest.raises(ValueError, match="max_count must be positive, got 0"):
        Tombstones(0)


@given(st.lists(st.tuples(st.integers(1, 30), st.sampled_from([A, B]), st.integers(0, 3), st.booleans()), max_size=40))
@settings(deadline=None)
def test_an_attempt_that_has_ended_stays_ended(course: list[tuple[int, AgentName, int, bool]]) -> None:
    """Whatever is dropped, replaced or expires: no ended attempt of a peer is ever taken for a new one."""
    stones = Tombstones(max_count=3)
    ended: set[tuple[int, AgentName, int]] = set()
    for now, (attempt, agent, consumer, expire) in enumerate(course):
        stones.put(stone(attempt, SendKey(T, consumer), agent, float(now)))
        ended.add((attempt, agent, consumer))
        if expire:
            stones.expire(now - 2.0)
        assert all(stones.covers(SendKey(T, consumer), agent, attempt) for attempt, agent, consumer in ended)
        assert len(stones) <= 3
