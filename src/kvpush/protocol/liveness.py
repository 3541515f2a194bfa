"""Who is alive: when to ping a peer and when to call it lost. Time is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

PeerT = TypeVar("PeerT")


@dataclass(slots=True)
class _Peer:
    last_heard_s: float
    last_ping_s: float
    lost: bool = False


class Liveness(Generic[PeerT]):
    """Peers are watched only while something is shared with them; an unwatched peer is neither alive nor lost."""

    def __init__(self, peer_timeout_s: float, ping_interval_s: float) -> None:
        if not 0 < ping_interval_s < peer_timeout_s:
            raise ValueError(f"0 < ping_interval_s ({ping_interval_s}) < peer_timeout_s ({peer_timeout_s}) must hold")
        self._peer_timeout_s = peer_timeout_s
        self._ping_interval_s = ping_interval_s
        self._peers: dict[PeerT, _Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def __contains__(self, peer: PeerT) -> bool:
        return peer in self._peers

    def watch(self, peer: PeerT, now_s: float) -> None:
        """Starts to watch a peer (idempotent)."""
        self._peers.setdefault(peer, _Peer(last_heard_s=now_s, last_ping_s=now_s))

    def forget(self, peer: PeerT) -> None:
        self._peers.pop(peer, None)

    def keep(self, peers: set[PeerT]) -> None:
        """Stops watching everybody else."""
        for peer in [peer for peer in self._peers if peer not in peers]:
            del self._peers[peer]

    def heard(self, peer: PeerT, now_s: float) -> None:
        """Anything from a peer proves that it lived then."""
        entry = self._peers.get(peer)
        if entry is not None:
            entry.last_heard_s = max(entry.last_heard_s, now_s)
            entry.lost = False

    def silent_s(self, peer: PeerT, now_s: float) -> float:
        """How long a watched peer has said nothing; 0 for one that is not watched."""
        entry = self._peers.get(peer)
        return 0.0 if entry is None else now_s - entry.last_heard_s

    def lost(self, now_s: float) -> list[PeerT]:
        """Peers that became silent for longer than the timeout; each is named once until it is heard again."""
        newly = []
        for peer, entry in self._peers.items():
            if not entry.lost and now_s - entry.last_heard_s > self._peer_timeout_s:
                entry.lost = True
                newly.append(peer)
        return newly

    def due(self, now_s: float) -> list[PeerT]:
        """Peers that must be pinged now; each is booked as pinged. Lost peers are pinged too: they may come back."""
        due = []
        for peer, entry in self._peers.items():
            if now_s - entry.last_ping_s >= self._ping_interval_s:
                entry.last_ping_s = now_s
                due.append(peer)
        return due
