"""Memory of ended transfers: late messages meet a tombstone instead of starting something new. Bounded; it expires."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvpush.protocol.ids import AgentName, PeerAddress, SendKey
from kvpush.protocol.messages import Message


@dataclass(frozen=True, slots=True)
class Tombstone:
    """How a (transfer, consumer) ended. attempt: the highest that has ended, 0 if
    none was made. last: the message that told the peer, to be repeated if it asks again."""

    key: SendKey
    attempt: int
    agent: AgentName | None
    address: PeerAddress | None
    reason: str
    last: Message | None
    since_s: float


class Tombstones:
    """Newest `max_count` ends. What is dropped raises its peer's floor: registrations up to it are stale.

    So a registration that was overtaken by its own cancellation is refused however late it comes, without
    remembering every transfer for ever.
    """

    def __init__(self, max_count: int = 16_384) -> None:
        self._max_count = max_count
        self._stones: OrderedDict[SendKey, Tombstone] = OrderedDict()
        self._floors: OrderedDict[AgentName, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stones)

    def get(self, key: SendKey) -> Tombstone | None:
        return self._stones.get(key)

    def put(self, stone: Tombstone) -> None:
        """Keeps the newer end of a key."""
        self._stones[stone.key] = stone
        self._stones.move_to_end(stone.key)
        while len(self._stones) > self._max_count:
            self._drop(next(iter(self._stones)))

    def floor(self, agent: AgentName) -> int:
        """Attempts of this peer up to this one are stale."""
        return self._floors.get(agent, -1)

    def expire(self, before_s: float) -> None:
        for key in [key for key, stone in self._stones.items() if stone.since_s < before_s]:
            self._drop(key)

    def _drop(self, key: SendKey) -> None:
        stone = self._stones.pop(key)
        if stone.agent is not None:
            self._floors[stone.agent] = max(self.floor(stone.agent), stone.attempt)
            self._floors.move_to_end(stone.agent)
            # One number for each incarnation that was ever seen: bound it, the oldest are long gone.
            while len(self._floors) > self._max_count:
                self._floors.popitem(last=False)
