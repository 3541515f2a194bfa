"""D's pings: what was asked of whom, so that an answer can be held against what was true when the question left."""

from __future__ import annotations

from dataclasses import dataclass

from kvpush.protocol.ids import PeerAddress, TransferId
from kvpush.protocol.messages import Lease, Ping, Pong

MAX_NAMES = 100
"""Leases, and likewise announced ids, in one ping: with the longest ids it stays below the size of a message."""

MAX_OPEN = 1024
"""Pings that wait for their answer; older ones are forgotten, and their answers ignored."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A lease as it stood when the ping left. accepted: P had accepted it by then."""

    lease: Lease
    accepted: bool


class Pings:
    """Numbers pings and remembers the open ones."""

    def __init__(self, sender: PeerAddress) -> None:
        self._sender = sender
        self._open: dict[int, tuple[PeerAddress, list[Asked]]] = {}
        self._last = 0

    def ask(self, address: PeerAddress, leases: list[Asked], announced: list[TransferId]) -> list[Ping]:
        """The pings to one rank; at least one, and as many as the names need."""
        pings = []
        for start in range(0, max(len(leases), len(announced), 1), MAX_NAMES):
            window = slice(start, start + MAX_NAMES)
            self._last += 1
            self._open[self._last] = (address, leases[window])
            while len(self._open) > MAX_OPEN:
                del self._open[next(iter(self._open))]
            names = [asked.lease for asked in leases[window]]
            pings.append(Ping(self._last, self._sender, names, announced[window]))
        return pings

    def answered(self, pong: Pong) -> tuple[PeerAddress, list[Asked]] | None:
        """What an answer speaks of; None if it was answered before, or was never asked."""
        return self._open.pop(pong.seq, None)
