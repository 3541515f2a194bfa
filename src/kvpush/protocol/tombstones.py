"""Memory of ended transfers: late messages meet a tombstone instead of starting something new. Bounded; it expires."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvpush.protocol.ids import AgentName, PeerAddress, SendKey, TransferId
from kvpush.protocol.messages import Message


@dataclass(frozen=True, slots=True)
class Tombstone:
    """How a consumer's registration from one incarnation ended.

    attempt: the highest that has ended. last: the message that told the peer, to be repeated if it asks again; None
    after a release, which has no answer.
    """

    key: SendKey
    attempt: int
    agent: AgentName
    address: PeerAddress
    reason: str
    last: Message | None
    since_s: float


class Tombstones:
    """Newest `max_count` ends. What is dropped raises its peer's floor: attempts up to it are stale.

    So a registration that was overtaken by its own cancellation is refused however late it comes, without
    remembering every transfer for ever. Ends are kept by key and incarnation: what one peer did never replaces the
    memory of what was promised to another.
    """

    def __init__(self, max_count: int = 16_384) -> None:
        if max_count < 1:
            raise ValueError(f"max_count must be positive, got {max_count}")
        self._max_count = max_count
        self._stones: OrderedDict[tuple[SendKey, AgentName], Tombstone] = OrderedDict()
        self._floors: OrderedDict[AgentName, int] = OrderedDict()
        self._closed: OrderedDict[TransferId, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        """Everything that is remembered, the floors of peers left out."""
        return len(self._stones) + len(self._closed)

    def get(self, key: SendKey, agent: AgentName) -> Tombstone | None:
        return self._stones.get((key, agent))

    def put(self, stone: Tombstone) -> None:
        """Keeps the end of the highest attempt of a key and incarnation; of two equal ones the later."""
        name = (stone.key, stone.agent)
        old = self._stones.get(name)
        if old is not None and old.attempt > stone.attempt:
            return
        self._stones[name] = stone
        self._stones.move_to_end(name)
        while len(self._stones) > self._max_count:
            self._drop(next(iter(self._stones)))

    def covers(self, key: SendKey, agent: AgentName, attempt: int) -> bool:
        """This attempt has ended, as far as is remembered."""
        stone = self.get(key, agent)
        return attempt <= (stone.attempt if stone is not None else 0) or attempt <= self.floor(agent)

    def floor(self, agent: AgentName) -> int:
        """Attempts of this peer up to this one are stale."""
        return self._floors.get(agent, 0)

    def close(self, transfer_id: TransferId, reason: str, now_s: float) -> None:
        """A local request has ended before all its consumers came; who comes late is told why at once."""
        self._closed[transfer_id] = (reason, now_s)
        self._closed.move_to_end(transfer_id)
        while len(self._closed) > self._max_count:
            self._closed.popitem(last=False)

    def closed(self, transfer_id: TransferId) -> str:
        """Why a transfer was closed, or ""."""
        return self._closed.get(transfer_id, ("", 0.0))[0]

    def reopen(self, transfer_id: TransferId) -> None:
        """The transfer id is used again."""
        self._closed.pop(transfer_id, None)

    def expire(self, before_s: float) -> None:
        """Drops what ended before `before_s`. Both tables are in order of time."""
        while self._stones and next(iter(self._stones.values())).since_s < before_s:
            self._drop(next(iter(self._stones)))
        while self._closed and next(iter(self._closed.values()))[1] < before_s:
            self._closed.popitem(last=False)

    def _drop(self, name: tuple[SendKey, AgentName]) -> None:
        stone = self._stones.pop(name)
        self._floors[stone.agent] = max(self.floor(stone.agent), stone.attempt)
        self._floors.move_to_end(stone.agent)
        # One number for each incarnation that was ever seen: bound it, the oldest are long gone.
        while len(self._floors) > self._max_count:
            self._floors.popitem(last=False)
