"""Which consumers of a transfer have come, and which need nothing more. Counts by name, never by number."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import PeerAddress, SendKey


@dataclass(slots=True)
class _Claim:
    """One consumer that has come. engine: whose it is; ended: its ranks that have registered -> need nothing more."""

    engine: tuple[str, int]
    targets: int
    ended: dict[tuple[int, int], bool] = field(default_factory=dict)

    @property
    def satisfied(self) -> bool:
        return len(self.ended) == self.targets and all(self.ended.values())


class Claims:
    """The consumers of one transfer at one rank of P.

    A consumer belongs to the engine that registers it first, and comes with `targets` ranks. It is satisfied when all
    of them have ended, or when it has said that it needs nothing.
    """

    def __init__(self, consumers: int) -> None:
        self.consumers = consumers
        self.closed = ""
        self._claims: dict[int, _Claim] = {}
        self._released: set[int] = set()

    @property
    def complete(self) -> bool:
        """No consumer needs anything any more."""
        if self.closed:
            return True
        served = {consumer for consumer, claim in self._claims.items() if claim.satisfied}
        return len(served | self._released) == self.consumers

    @property
    def keys_begun(self) -> set[int]:
        """The consumers that have registered."""
        return set(self._claims)

    def refusal(self, key: SendKey, address: PeerAddress, targets: int) -> str:
        """Why a registration gets nothing, or "" if it may begin."""
        if key.consumer >= self.consumers:
            return "duplicate"
        if self.closed:
            return self.closed
        if key.consumer in self._released:
            return "released"
        claim = self._claims.get(key.consumer)
        if claim is None:
            return ""
        if claim.engine != address.engine or (key.pp_rank, key.tp_rank) in claim.ended:
            return "duplicate"
        return "" if claim.targets == targets and len(claim.ended) < targets else "contradiction"

    def begin(self, key: SendKey, address: PeerAddress, targets: int) -> None:
        """A rank of a consumer is being served. Raises ProtocolError (local) if `refusal` has a reason."""
        reason = self.refusal(key, address, targets)
        if reason:
            raise ProtocolError("local", f"{key} begins although it is refused: {reason}")
        claim = self._claims.setdefault(key.consumer, _Claim(address.engine, targets))
        claim.ended[key.pp_rank, key.tp_rank] = False

    def end(self, key: SendKey) -> None:
        """A rank that had begun needs nothing more, whatever came of it."""
        self._claims[key.consumer].ended[key.pp_rank, key.tp_rank] = True

    def release(self, consumer: int) -> None:
        """A consumer needs nothing. Raises ProtocolError (peer) if it has registered, or is none of this transfer."""
        if not 0 <= consumer < self.consumers:
            raise ProtocolError("peer", f"consumer {consumer} of {self.consumers} is released")
        if consumer in self._claims:
            raise ProtocolError("peer", f"consumer {consumer} is released although it has registered")
        self._released.add(consumer)

    def release_others(self, but: set[int]) -> None:
        """Every consumer that has not registered, and is not in `but`, needs nothing."""
        self._released |= set(range(self.consumers)) - set(self._claims) - but

    def close(self, reason: str) -> None:
        """Nobody else will be served. The first reason stays."""
        self.closed = self.closed or reason
