"""D: unpacks what has landed in its staging slots, if it is still wanted, and gives the slots back to the writer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import AgentName, PeerAddress, RequestId
from kvpush.protocol.messages import Credit, Staged
from kvpush.transfer.packing.base import Packer, PackingError
from kvpush.transfer.sources import Event
from kvpush.transfer.staging.area import StagingArea
from kvpush.transfer.staging.leases import SlotLeases

_log = logging.getLogger(__name__)

LINGER_S = 0.005
"""So long after a part the next one is expected: whoever waits for it looks often."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a part belongs. blocks: the request's block table; first, end: the entries that D lacks."""

    request_id: RequestId
    blocks: Sequence[int]
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class _Unpacking:
    agent: AgentName
    message: Staged
    request_id: RequestId
    event: Event


class Unstager:
    """Owned by the transfer thread. Only this rank writes into its own blocks, so a late or stray part is harmless: it
    stays in its slot."""

    def __init__(self, packer: Packer, area: StagingArea, sender: PeerAddress) -> None:
        self._packer = packer
        self._area = area
        self._sender = sender
        self.leases = SlotLeases(area.num_slots)
        self._done: dict[int, int] = {}  # slot -> its last use that is over
        self._unpacking: list[_Unpacking] = []
        self._unpacked: dict[tuple[RequestId, AgentName, int], int] = {}  # blocks, by attempt
        self._busy_until_s = 0.0

    def active(self, now_s: float) -> bool:
        """Parts are being unpacked, or more may come soon."""
        return bool(self._unpacking) or now_s < self._busy_until_s

    def receive(
        self, agent: AgentName, message: Staged, target: Target | None, now_s: float
    ) -> list[tuple[AgentName, Credit]]:
        """A part stands in a slot. target: where it belongs, or None if nobody wants it. Returns credits to be given.

        Raises ProtocolError (peer) if the slot is not this writer's, or the part not what it registered for.
        """
        if not self.leases.holds(agent, message.slot):
            raise ProtocolError("peer", f"{agent} has written to slot {message.slot}, which is not its own")
        if message.use <= self._done.get(message.slot, 0):
            return [(agent, self._credit(message))]  # the same again
        if any(part.message.slot == message.slot for part in self._unpacking):
            return []  # the same again; credit follows
        if target is None:
            return [self._end(agent, message)]
        last = message.first_block + message.num_blocks
        if not target.first <= message.first_block < last <= target.end:
            raise ProtocolError(
                "peer",
                f"blocks {message.first_block} to {last} of {message.key}; {target.first} to {target.end} are due",
            )
        if message.num_blocks * self._packer.block_bytes > self._area.slot_bytes:
            raise ProtocolError("peer", f"{message.num_blocks} blocks do not fit into a slot")
        blocks = np.asarray(target.blocks[message.first_block : last], dtype=np.int64)
        try:
            event = self._packer.unpack(self._area.slot(message.slot), blocks)
        except (ValueError, PackingError) as error:
            # The commit will speak of blocks that were not unpacked, and fail the load.
            _log.error("kvpush: staged blocks of %s cannot be unpacked: %s", target.request_id, error)
            return [self._end(agent, message)]
        self._unpacking.append(_Unpacking(agent, message, target.request_id, event))
        self._busy_until_s = now_s + LINGER_S
        return self.poll()

    def poll(self) -> list[tuple[AgentName, Credit]]:
        """Credits for what has been unpacked since the last call."""
        if not self._unpacking:
            return []
        credits, waiting = [], []
        for part in self._unpacking:
            if not part.event.query():
                waiting.append(part)
                continue
            of = (part.request_id, part.agent, part.message.attempt)
            self._unpacked[of] = self._unpacked.get(of, 0) + part.message.num_blocks
            credits.append(self._end(part.agent, part.message))
        self._unpacking = waiting
        return credits

    def busy(self, request_id: RequestId) -> bool:
        """Something is being written into the request's blocks."""
        return any(part.request_id == request_id for part in self._unpacking)

    def num_unpacked(self, request_id: RequestId, agent: AgentName, attempt: int) -> int:
        """Blocks that a writer has brought for an attempt by way of slots, each counted as often as it came."""
        return self._unpacked.get((request_id, agent, attempt), 0)

    def forget(self, request_id: RequestId) -> None:
        """The request's load has ended."""
        self._unpacked = {of: count for of, count in self._unpacked.items() if of[0] != request_id}

    def gone(self, agent: AgentName) -> None:
        """A writer is proven gone: nothing lands in its slots any more."""
        for slot in self.leases.revoke(agent):
            self._done.pop(slot, None)

    def _end(self, agent: AgentName, message: Staged) -> tuple[AgentName, Credit]:
        if self.leases.holds(agent, message.slot):
            self._done[message.slot] = message.use
        return agent, self._credit(message)

    def _credit(self, message: Staged) -> Credit:
        return Credit(self._sender, message.slot, message.use)
