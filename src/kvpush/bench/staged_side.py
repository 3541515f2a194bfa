"""Staged transfers of the raw benchmark: the parts that production uses, without protocol and engine around them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from kvpush.bench.tables import Blocks
from kvpush.plan.geometry import CacheGeometry
from kvpush.plan.paths import CPU_COSTS, GPU_COSTS
from kvpush.plan.runs import Runs
from kvpush.protocol.actions import WritePiece
from kvpush.protocol.ids import AgentName, PeerAddress, RequestId, SendKey, TransferId
from kvpush.protocol.messages import Credit, Staged, decode, encode
from kvpush.transfer.integrity import PieceHashing
from kvpush.transfer.packing.buffer import StagingBuffer
from kvpush.transfer.packing.factory import make_packer
from kvpush.transfer.staging import Stager, StagingArea, Unstager
from kvpush.transfer.staging.outcomes import Ended
from kvpush.transfer.staging.unstager import Target
from kvpush.transport.base import Region, Transport

NUM_SLOTS = 4
_KEY = SendKey(TransferId("bench"), 0, 0, 0)
_REQUEST = RequestId("bench")
Arrived = Sequence[tuple[str, bytes]]


class StagedSide:
    """One side's staging memory, registered with its transport, and what works with it.

    staging_bytes: for the slots of a target; a source packs into half as many. Raises ValueError if two blocks do not
    fit.
    """

    def __init__(
        self,
        role: str,
        transport: Transport,
        geometry: CacheGeometry,
        layers: Sequence[torch.Tensor],
        staging_bytes: int,
    ) -> None:
        block_bytes = len(geometry.bases) * geometry.num_heads * geometry.block_size * geometry.content_bytes
        num_slots = min(NUM_SLOTS, staging_bytes // block_bytes)
        if num_slots < 2:
            raise ValueError(f"{staging_bytes} bytes of staging do not hold two blocks of {block_bytes}")
        slot_bytes = staging_bytes // num_slots // 256 * 256
        num_slots = num_slots if role == "target" else num_slots // 2
        self._buffer = StagingBuffer(num_slots * slot_bytes, geometry.device)
        transport.register([Region(self._buffer.address, self._buffer.num_bytes, geometry.device)])
        self.area = StagingArea(self._buffer.address, slot_bytes, num_slots, geometry.device)
        packer = make_packer(geometry, layers, (self._buffer,))
        self._transport = transport
        self._block_bytes, self._block_size = block_bytes, geometry.block_size
        self._costs = CPU_COSTS if geometry.device is None else GPU_COSTS
        self._address = PeerAddress(role, 1)
        self._stager = Stager(transport, packer, self.area, _always, _never)
        self._unstager = Unstager(packer, self.area, self._address)
        self._number = 0

    # Source

    def take(self, peer: str, slots: Sequence[int], area: StagingArea) -> None:
        self._stager.grant(AgentName(peer), slots, area)

    def pays(self, runs: Runs) -> bool:
        """What `auto` would decide."""
        part_bytes = self.area.slot_bytes // self._block_bytes * self._block_bytes
        parts = -(-runs.num_bytes // part_bytes)
        return self._costs.staged(runs.num_bytes, parts, 0) < self._costs.direct(len(runs), runs.num_bytes)

    def start(self, peer: str, blocks: Blocks, area: StagingArea) -> None:
        self._number += 1
        end_token = len(blocks) * self._block_size
        piece = WritePiece(_KEY, self._number, self._number, _REQUEST, AgentName(peer), 0, end_token)
        self._stager.start(piece, blocks, area, self._address, self._block_size, _no_digest, time.monotonic())

    def push(self, arrived: Arrived) -> Ended | None:
        """Goes on; returns how the piece has ended once it has."""
        for sender, payload in arrived:
            message = decode(payload)
            if isinstance(message, Credit):
                self._stager.credit(AgentName(sender), message.slot, message.use)
        outcomes = self._stager.poll(time.monotonic())
        return next((outcome for outcome in outcomes if isinstance(outcome, Ended)), None)

    # Target

    def grant(self, peer: str) -> tuple[int, ...]:
        return self._unstager.leases.grant(AgentName(peer))

    def unpack(self, arrived: Arrived, blocks: Blocks) -> bool:
        """Takes what has arrived; True once all blocks are in place."""
        target = Target(_REQUEST, blocks.tolist(), 0, len(blocks)) if arrived else None
        credits = self._unstager.poll()
        for sender, payload in arrived:
            message = decode(payload)
            if isinstance(message, Staged):
                self._number = message.attempt
                credits += self._unstager.receive(AgentName(sender), message, target, time.monotonic())
        for agent, credit in credits:
            self._transport.notify(agent, encode(credit))
        done = bool(credits) and self._unstager.num_unpacked(_REQUEST, credits[0][0], self._number) == len(blocks)
        if done:
            self._unstager.forget(_REQUEST)
        return done


def _always(piece: WritePiece) -> bool:
    del piece
    return True


def _never(request_id: RequestId) -> bool:
    del request_id
    return False


def _no_digest(first_token: int, end_token: int) -> PieceHashing | None:
    del first_token, end_token
    return None
