"""Counting by name: which ranks of P have committed, and which consumers of a transfer have been served."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_cases import address

from kvpush.protocol.claims import Claims
from kvpush.protocol.commits import CommitSet
from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import PeerAddress, SendKey, TransferId

pytestmark = pytest.mark.unit

RANKS = [PeerAddress("p", 1, 0, rank) for rank in range(3)]


def test_one_rank_that_commits_twice_does_not_stand_in_for_another() -> None:
    commits = CommitSet(RANKS[:2])
    assert commits.commit(RANKS[0])
    assert not commits.commit(RANKS[0])
    assert not commits.complete
    assert commits.pending == {RANKS[1]}
    assert commits.commit(RANKS[1])
    assert commits.complete
    assert not commits.pending


def test_a_rank_that_owes_nothing_cannot_commit() -> None:
    commits = CommitSet(RANKS[:2])
    with pytest.raises(ProtocolError, match="pp0tp2 owes nothing") as caught:
        commits.commit(RANKS[2])
    assert caught.value.fault == "peer"
    assert commits.pending == set(RANKS[:2])


def test_somebody_must_be_expected() -> None:
    with pytest.raises(ProtocolError, match="no rank is expected") as caught:
        CommitSet([])
    assert caught.value.fault == "local"


@given(st.sets(st.sampled_from(RANKS), min_size=1), st.lists(st.sampled_from(RANKS), max_size=12))
@settings(deadline=None)
def test_complete_means_that_every_expected_rank_has_committed(
    expected: set[PeerAddress], come: list[PeerAddress]
) -> None:
    commits = CommitSet(expected)
    seen: set[PeerAddress] = set()
    for rank in come:
        if rank in expected:
            assert commits.commit(rank) == (rank not in seen)
            seen.add(rank)
        assert commits.complete == (seen == expected)
        assert commits.pending == expected - seen


# Claims: ranks of D, by consumer


def key(consumer: int = 0, rank: int = 0) -> SendKey:
    return SendKey(TransferId("t"), consumer, 0, rank)


def serve(claims: Claims, consumer: int = 0, rank: int = 0, targets: int = 1) -> None:
    claims.begin(key(consumer, rank), address(rank), targets)
    claims.end(key(consumer, rank))


def test_a_consumer_is_satisfied_when_all_its_ranks_have_ended() -> None:
    claims = Claims(1)
    claims.begin(key(rank=0), address(0), 2)
    claims.begin(key(rank=1), address(1), 2)
    claims.end(key(rank=1))
    assert not claims.complete
    claims.end(key(rank=0))
    assert claims.complete


def test_a_rank_that_has_not_come_is_waited_for() -> None:
    claims = Claims(1)
    serve(claims, rank=0, targets=2)
    assert not claims.complete
    serve(claims, rank=1, targets=2)
    assert claims.complete


def test_every_consumer_is_waited_for() -> None:
    claims = Claims(3)
    serve(claims, 0)
    claims.release(2)
    assert not claims.complete
    serve(claims, 1)
    assert claims.complete


@pytest.mark.parametrize(
    ("consumer", "rank", "host", "targets", "reason"),
    [
        (2, 0, "d", 2, "duplicate"),  # there are two consumers
        (0, 0, "d", 2, "duplicate"),  # this rank has come
        (0, 1, "other", 2, "duplicate"),  # the consumer is another engine's
        (0, 1, "d", 3, "contradiction"),
        (0, 1, "d", 2, ""),
        (1, 0, "other", 1, ""),
    ],
)
def test_who_may_not_begin(consumer: int, rank: int, host: str, targets: int, reason: str) -> None:
    claims = Claims(2)
    claims.begin(key(0, 0), address(0), 2)
    assert claims.refusal(key(consumer, rank), address(rank, host), targets) == reason
    if reason:
        with pytest.raises(ProtocolError, match="although it is refused"):
            claims.begin(key(consumer, rank), address(rank, host), targets)


def test_more_ranks_than_were_named_are_a_contradiction() -> None:
    claims = Claims(1)
    serve(claims, rank=0, targets=1)
    assert claims.refusal(key(rank=1), address(1), 1) == "contradiction"
    assert claims.refusal(key(rank=0), address(0), 1) == "duplicate"  # ended or not, it has come


def test_a_released_consumer_gets_nothing_any_more() -> None:
    claims = Claims(2)
    claims.release(0)
    claims.release(0)
    assert claims.refusal(key(0), address(), 1) == "released"
    assert claims.refusal(key(1), address(), 1) == ""


def test_a_consumer_that_has_registered_cannot_be_released() -> None:
    claims = Claims(2)
    claims.begin(key(0), address(), 1)
    for consumer, says in ((0, "has registered"), (2, "consumer 2 of 2"), (-1, "consumer -1")):
        with pytest.raises(ProtocolError, match=says) as caught:
            claims.release(consumer)
        assert caught.value.fault == "peer"
    claims.release(1)
    claims.end(key(0))
    assert claims.complete


def test_the_others_are_released_except_who_has_come_or_is_coming() -> None:
    claims = Claims(4)
    claims.begin(key(0), address(), 1)
    claims.release_others(but={2})
    assert claims.refusal(key(1), address(), 1) == "released"
    assert claims.refusal(key(2), address(), 1) == ""
    assert claims.keys_begun == {0}
    claims.end(key(0))
    serve(claims, 2)
    assert claims.complete


def test_a_closed_transfer_serves_nobody_and_keeps_its_first_reason() -> None:
    claims = Claims(2)
    claims.close("unclaimed")
    claims.close("aborted")
    assert claims.complete
    assert claims.refusal(key(0), address(), 1) == "unclaimed"
    assert claims.refusal(key(5), address(), 1) == "duplicate"


comings = st.tuples(st.sampled_from(["begin", "end", "release"]), st.integers(0, 2), st.integers(0, 2))


@given(st.integers(1, 3), st.integers(1, 2), st.lists(comings, max_size=30))
@settings(deadline=None)
def test_complete_means_that_nobody_is_left(consumers: int, targets: int, course: list[tuple[str, int, int]]) -> None:
    claims = Claims(consumers)
    begun: set[SendKey] = set()
    ended: set[SendKey] = set()
    released: set[int] = set()
    for what, consumer, rank in course:
        name = key(consumer, rank)
        if what == "begin":
            try:
                claims.begin(name, address(rank), targets)
            except ProtocolError:
                continue
            begun.add(name)
        elif what == "end" and name in begun:
            claims.end(name)
            ended.add(name)
        elif what == "release":
            try:
                claims.release(consumer)
            except ProtocolError:
                continue
            released.add(consumer)
        served = {c for c in range(consumers) if len([name for name in ended if name.consumer == c]) == targets}
        assert claims.complete == (served | released == set(range(consumers)))
        assert all(len([name for name in begun if name.consumer == c]) <= targets for c in range(consumers))
