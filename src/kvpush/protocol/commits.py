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

    @property
    def expected(self) -> frozenset[PeerAddress]:
        return self._expected

    @property
    def pending(self) -> frozenset[PeerAddress]:
        """The ranks that have not committed."""
        return self._expected - self._committed

    @property
    def complete(self) -> bool:
        """Every expected rank has committed."""
        return self._committed == self._expected

    def commit(self, rank: PeerAddress) -> bool:
        """Books a commit; False if this rank had committed. Raises ProtocolError for a rank that owes nothing."""
        if rank not in self._expected:
            raise ProtocolError("peer", f"rank {rank} owes nothing to this transfer")
        if rank in self._committed:
            return False
        self._committed.add(rank)
        return True
