"""The transport in memory, for simulation: one agent on a `MemoryFabric`.

It is as unkind as the real one: bytes land in pieces and in any order, source bytes are read when they land, a released
write goes on, and the notification of a write leaves only when its owner polls the handle (NIXL sends it from there).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import msgspec
import numpy as np

from kvpush.plan.runs import Addresses, Runs
from kvpush.transport.base import Region, TransportError, WriteHandle, check_agent_name
from kvpush.transport.fabric import Bytes, MemoryFabric
from kvpush.transport.faults import Faults

__all__ = ["Faults", "MemoryFabric", "MemoryTransport", "MemoryWrite"]

Piece = tuple[int, int, int]


class _Metadata(msgspec.Struct, frozen=True, tag="kvpush.memory.1"):
    name: str
    regions: list[tuple[int, int, int | None]]


@dataclass(slots=True)
class _Peer:
    metadata: bytes
    regions: list[Region]
    lost: bool = False


class MemoryWrite:
    """One posted write; belongs to the transport that made it."""

    __slots__ = ("_error", "_finished", "_landed", "_notification", "_peer", "_released")

    def __init__(self, peer: str, notification: bytes) -> None:
        self._peer = peer
        self._notification = notification
        self._landed = False
        self._finished = False
        self._released = False
        self._error: TransportError | None = None

    @property
    def peer(self) -> str:
        return self._peer


class MemoryTransport:
    """`Transport` over a `MemoryFabric`. See `kvpush.transport.base` for what each method promises."""

    def __init__(self, fabric: MemoryFabric, name: str) -> None:
        """Joins the fabric. Raises ValueError if an agent of that name lives there."""
        check_agent_name(name)
        self._fabric = fabric
        self._name = name
        self._regions: list[Region] = []
        self._peers: dict[str, _Peer] = {}
        self._in_flight: list[MemoryWrite] = []
        self._inbox: list[tuple[str, bytes]] = []
        self._fail_posts: list[str | None] = []
        self._fail_writes: list[tuple[str | None, float, bool]] = []
        self._closed = False
        fabric.join(self)

    @property
    def name(self) -> str:
        return self._name

    @property
    def in_flight(self) -> int:
        """Writes that have neither ended nor been released; for checks that nothing is left behind."""
        return len(self._in_flight)

    def map(self, memory: Bytes, address: int | None = None) -> int:
        """Gives an array of uint8 an address (no two agents overlap) and returns it. It must still be registered."""
        return self._fabric.map(self._name, memory, address)

    def fail_next_post(self, peer: str | None = None) -> None:
        """The next write (to that peer) cannot be posted."""
        self._fail_posts.append(peer)

    def fail_next_write(self, peer: str | None = None, after: float = 0.5, may_land: bool = False) -> None:
        """The next write (to that peer) fails when that share of its pieces has landed.

        may_land: the others land later, and the error says so.
        """
        self._fail_writes.append((peer, after, may_land))

    def register(self, regions: Sequence[Region]) -> None:
        self._check_open()
        for region in regions:
            if self._fabric.memory(self._name, region.address, region.length_bytes) is None:
                raise TransportError(f"{region} is no memory of {self._name}")
        self._regions += regions

    def metadata(self) -> bytes:
        self._check_open()
        rows = [(r.address, r.length_bytes, r.device) for r in self._regions]
        return msgspec.msgpack.encode(_Metadata(self._name, rows))

    def connect(self, metadata: bytes) -> str:
        self._check_open()
        try:
            given = msgspec.msgpack.decode(metadata, type=_Metadata)
        except msgspec.MsgspecError as error:
            raise TransportError(f"metadata is not of a memory transport: {error}") from error
        peer = given.name
        if peer == self._name:
            raise TransportError("metadata is this agent's own", peer)
        known = self._peers.get(peer)
        if known is not None and not known.lost:
            if known.metadata != metadata:
                raise TransportError(f"{peer} is connected with other metadata; disconnect it first", peer)
            return peer
        if self._fabric.state(peer) in ("unknown", "killed"):
            raise TransportError(f"{peer} does not exist", peer)
        self._peers[peer] = _Peer(metadata, [Region(*row) for row in given.regions])
        return peer

    def disconnect(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def connected(self, peer: str) -> bool:
        found = self._peers.get(peer)
        return found is not None and not found.lost

    def write(
        self, peer: str, runs: Runs, device: int | None, peer_device: int | None, notification: bytes
    ) -> MemoryWrite:
        if not len(runs):
            raise ValueError("a write needs at least one run")
        there = self._connected(peer)
        _check_inside(self._regions, runs.src, runs.length, device, f"source memory of {self._name}", peer)
        _check_inside(there.regions, runs.dst, runs.length, peer_device, f"registered memory of {peer}", peer)
        fabric, faults = self._fabric, self._fabric.faults(self._name, peer)
        if self._next_post_fails(peer) or fabric.chance(faults.fail_post):
            raise TransportError(f"could not post a write to {peer}: injected", peer)
        handle = MemoryWrite(peer, notification)
        self._in_flight.append(handle)
        self._launch(handle, runs, faults)
        if fabric.is_noticed(self._name, peer):
            fabric.notice(self._name, peer)
        return handle

    def done(self, handle: WriteHandle) -> bool:
        write = _own(handle)
        if write._error is not None:
            raise write._error
        if write._finished:
            return True
        if write._released:
            raise ValueError("this write was released before it was done")
        self._check_open()
        if write._landed and self._fabric.state(write._peer) == "running":
            write._finished = True
            self._ended(write)
            if write._notification:
                self._send(write._peer, write._notification)
        return write._finished

    def release(self, handle: WriteHandle) -> None:
        write = _own(handle)
        write._released = True
        self._ended(write)

    def notify(self, peer: str, payload: bytes) -> None:
        self._connected(peer)
        self._send(peer, payload)

    def notifications(self) -> list[tuple[str, bytes]]:
        self._check_open()
        arrived, self._inbox = self._inbox, []
        return arrived

    def close(self) -> None:
        for write in list(self._in_flight):
            self.release(write)
        self._peers.clear()
        self._regions.clear()
        self._closed = True

    def lose(self, peer: str) -> None:
        """The fabric's word that a peer is out of reach: its writes fail here, and nothing more goes there."""
        for write in [w for w in self._in_flight if w._peer == peer]:
            self._fail(write, TransportError(f"lost {peer}", peer))
        if peer in self._peers:
            self._peers[peer].lost = True

    def _check_open(self) -> None:
        self._fabric.check_running(self._name)
        if self._closed:
            raise TransportError(f"agent {self._name} is closed")

    def _connected(self, peer: str) -> _Peer:
        self._check_open()
        found = self._peers.get(peer)
        if found is None:
            raise TransportError(f"{peer} is not connected", peer)
        if found.lost:
            raise TransportError(f"lost {peer}", peer)
        return found

    def _launch(self, write: MemoryWrite, runs: Runs, faults: Faults) -> None:
        """Schedules the landing of each piece; the last one ends the write."""
        fabric, peer = self._fabric, write._peer
        duration_s = fabric.draw_s(faults.write_delay_s) + runs.num_bytes / faults.bytes_per_s
        pieces = _cut_up(runs, faults.pieces)
        fabric.random.shuffle(pieces)
        times_s = sorted(fabric.random.uniform(0.1, 1.0) * duration_s for _ in pieces)
        failing = self._next_failure(peer, faults)
        ends_at = len(pieces) if failing is None else min(int(failing[0] * len(pieces)), len(pieces) - 1)
        remaining = len(pieces)

        def land(piece: list[Piece]) -> None:
            nonlocal remaining
            gone = write._error is not None and not write._error.may_land
            if gone or fabric.hold(self._name, peer, partial(land, piece)):
                return
            remaining -= 1
            fabric.land(self._name, peer, piece)
            if not remaining and fabric.state(peer) != "killed":
                write._landed = True
                fabric.wake(self._name)

        for i, (at_s, piece) in enumerate(zip(times_s, pieces, strict=True)):
            if failing is not None and i == ends_at:
                error = TransportError(f"lost a write to {peer}: injected", peer, may_land=failing[1])
                fabric.after(at_s, partial(self._fail, write, error), self._name)
                if not failing[1]:
                    return
            late_s = duration_s if i >= ends_at else 0.0
            fabric.after(at_s + late_s, partial(land, piece), self._name)

    def _next_post_fails(self, peer: str) -> bool:
        for wanted in (peer, None):
            if wanted in self._fail_posts:
                self._fail_posts.remove(wanted)
                return True
        return False

    def _next_failure(self, peer: str, faults: Faults) -> tuple[float, bool] | None:
        """(share of the pieces that lands first, whether the others land later) of a write that is to fail."""
        for i, (wanted, after, may_land) in enumerate(self._fail_writes):
            if wanted in (None, peer):
                del self._fail_writes[i]
                return after, may_land
        if self._fabric.chance(faults.fail_write):
            return self._fabric.random.random(), False
        if self._fabric.chance(faults.fail_write_late):
            return self._fabric.random.random(), True
        return None

    def _fail(self, write: MemoryWrite, error: TransportError) -> None:
        if not write._finished and write._error is None:
            write._error = error
            self._ended(write)
            self._fabric.wake(self._name)

    def _ended(self, write: MemoryWrite) -> None:
        if write in self._in_flight:
            self._in_flight.remove(write)

    def _send(self, peer: str, payload: bytes) -> None:
        fabric, faults = self._fabric, self._fabric.faults(self._name, peer)
        target = fabric.agent(peer)

        def deliver() -> None:
            if not fabric.is_cut(self._name, peer) and fabric.state(peer) != "killed":
                target._inbox.append((self._name, payload))
                fabric.wake(peer)

        if fabric.is_noticed(self._name, peer):
            fabric.notice(self._name, peer)
        for _ in range(1 + fabric.chance(faults.duplicate)):
            # On the wire already: neither stopping nor killing the sender calls a message back.
            if not fabric.chance(faults.drop):
                fabric.after(fabric.draw_s(faults.message_delay_s), deliver)


def _own(handle: WriteHandle) -> MemoryWrite:
    if not isinstance(handle, MemoryWrite):
        raise TypeError(f"not a write of this transport: {handle!r}")
    return handle


def _check_inside(
    regions: Sequence[Region], addresses: Addresses, lengths: Addresses, device: int | None, what: str, peer: str
) -> None:
    """Every range must lie inside one region of that device."""
    good = np.zeros(len(addresses), dtype=bool)
    ends = addresses + lengths
    for region in regions:
        if region.device == device:
            good |= (addresses >= region.address) & (ends <= region.address + region.length_bytes) & (ends >= addresses)
    outside = np.flatnonzero(~good)
    if len(outside):
        at = int(outside[0])
        raise TransportError(f"{int(lengths[at])} bytes at {int(addresses[at]):#x} are not in {what}", peer)


def _cut_up(runs: Runs, pieces: int) -> list[list[Piece]]:
    """Cuts runs into at most so many pieces of about as many bytes; a run may be cut anywhere."""
    total = runs.num_bytes
    count = max(1, min(pieces, total))
    borders = [total * i // count for i in range(count + 1)]
    cut: list[list[Piece]] = [[] for _ in range(count)]
    at = place = 0
    spans = list(pairwise(borders))
    for src, dst, length in zip(runs.src.tolist(), runs.dst.tolist(), runs.length.tolist(), strict=True):
        done = 0
        while done < length:
            while at >= spans[place][1]:
                place += 1
            step = min(length - done, spans[place][1] - at)
            cut[place].append((src + done, dst + done, step))
            done += step
            at += step
    return cut
