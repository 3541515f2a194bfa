"""Commit counting: which ranks must write, and which have said that they are done."""

from __future__ import annotations

from collections.abc import Iterable

from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import PeerAddress


class CommitSet:
    """Counts by the set of ranks, never by a number: one rank that commits twice does not stand in for another."""

    def __init__(self, expected: Iterable[PeerAddress]) -> None:
        self._expected = frozenset(expected)
        if not self._expected:
            raise ProtocolError("local", "no rank is expected to write")
        self._committed: set[PeerAddress] = set()
        self._quiet: set[PeerAddress] = set()

    @property
    def expected(self) -> frozenset[PeerAddress]:
        return self._expected

    @property
    def complete(self) -> bool:
        """Every expected rank has committed."""
        return self._committed == self._expected

    @property
    def quiet(self) -> bool:
        """No expected rank has anything in flight: each has committed, or said quiet, or is gone."""
        return self._committed | self._quiet == self._expected

    @property
    def not_quiet(self) -> frozenset[PeerAddress]:
        return self._expected - self._committed - self._quiet

    def commit(self, rank: PeerAddress) -> bool:
        """Books a commit; False if this rank had committed. Raises ProtocolError for a rank that owes nothing."""
        self._check(rank)
        if rank in self._committed:
            return False
        self._committed.add(rank)
        return True

    def hush(self, rank: PeerAddress) -> None:
        """Books that a rank has nothing in flight. Raises ProtocolError for a rank that owes nothing."""
        self._check(rank)
        self._quiet.add(rank)

    def restart(self) -> None:
        """Forgets commits and quiets: a new attempt begins."""
        self._committed.clear()
        self._quiet.clear()

    def _check(self, rank: PeerAddress) -> None:
        if rank not in self._expected:
            raise ProtocolError("peer", f"rank {rank} owes nothing to this transfer")
