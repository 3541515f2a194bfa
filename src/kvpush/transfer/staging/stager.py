"""P: takes pieces apart, packs each part, writes it into a slot of D's, and waits until D has unpacked it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvpush.plan.runs import Ints, Runs
from kvpush.protocol.actions import WritePiece
from kvpush.protocol.ids import AgentName, PeerAddress, RequestId
from kvpush.protocol.messages import PieceDigest, Staged, encode
from kvpush.transfer.integrity import PieceHashing
from kvpush.transfer.packing.base import Packer, PackingError
from kvpush.transfer.sources import Event
from kvpush.transfer.staging.area import StagingArea
from kvpush.transfer.staging.outcomes import Cut, Ended, NotPosted, Outcome, Read
from kvpush.transfer.staging.peer_slots import PeerSlots
from kvpush.transport.base import Transport, TransportError, WriteHandle

_log = logging.getLogger(__name__)

GRANT_WAIT_S = 2.0
"""How long a piece that may go no other way waits for word of its slots."""

REPEAT_S = 1.0
"""After so long without credit D is told again what stands in a slot: the message, or the credit, may be lost."""


Digest = Callable[[int, int], PieceHashing | None]
"""Begins to digest tokens [first_token, end_token) of a piece's request, if digests are wanted."""


@dataclass(slots=True, eq=False)
class _Job:
    """One piece. first, next, end: positions in D's block table; [first, next) are packed or being packed."""

    piece: WritePiece
    blocks: Ints
    area: StagingArea
    address: PeerAddress
    digest: Digest
    block_size: int
    first: int
    next: int
    end: int
    started_s: float
    packing: int = 0
    open: int = 0
    read: bool = False
    error: str = ""
    num_bytes: int = 0
    num_parts: int = 0
    hashings: list[tuple[float, PieceHashing]] = field(default_factory=list)
    digests: list[PieceDigest] = field(default_factory=list)

    @property
    def reading(self) -> bool:
        """Something reads the request's blocks: a pack, or the digest of one."""
        return bool(self.packing or self.hashings)


@dataclass(slots=True, eq=False)
class _Part:
    job: _Job
    message: Staged
    local: int
    num_bytes: int
    event: Event
    handle: WriteHandle | None = None


class Stager:
    """Owned by the transfer thread. Parts of a piece leave in order, and pieces of a transfer one behind the other.

    wanted: whether the protocol still wants a piece. closed: whether a request's blocks are about to be taken. awaited:
    whether a digest of a piece that began so many seconds ago is waited for still.
    """

    def __init__(
        self,
        transport: Transport,
        packer: Packer,
        area: StagingArea,
        wanted: Callable[[WritePiece], bool],
        closed: Callable[[RequestId], bool],
        awaited: Callable[[WritePiece, float], bool] = lambda _, __: True,
    ) -> None:
        self._transport = transport
        self._packer = packer
        self._area = area
        self._wanted = wanted
        self._closed = closed
        self._awaited = awaited
        self._peers = PeerSlots()
        self._local = list(range(area.num_slots))
        self._jobs: list[_Job] = []
        self._packing: list[_Part] = []
        self._writing: list[_Part] = []
        self._landed: dict[tuple[AgentName, int, int], _Part] = {}

    def __len__(self) -> int:
        """Pieces that have not ended."""
        return len(self._jobs)

    @property
    def busy(self) -> bool:
        """There is something to look at soon."""
        return bool(self._jobs or self._packing or self._writing)

    @property
    def queued_bytes(self) -> int:
        """What has not been packed yet of the pieces that have been started."""
        return sum(job.end - job.next for job in self._jobs if not job.error) * self._packer.block_bytes

    def granted(self, agent: AgentName) -> bool:
        """A consumer has granted slots."""
        return self._peers.granted(agent)

    def grant(self, agent: AgentName, slots: Iterable[int], area: StagingArea | None) -> None:
        """A consumer has named our slots. area: what its handshake says; slots outside of it are ignored."""
        if area is not None:
            self._peers.grant(agent, [slot for slot in slots if slot < area.num_slots])

    def credit(self, agent: AgentName, slot: int, use: int) -> bool:
        """D has unpacked a part, or does not want it. False if that is old news."""
        part = self._landed.pop((agent, slot, use), None)
        if part is not None:
            part.job.open -= 1
        return self._peers.free(agent, slot, use)

    def forget(self, agent: AgentName) -> None:
        """This incarnation of a consumer is gone for good."""
        self._peers.forget(agent)
        self._landed = {key: part for key, part in self._landed.items() if key[0] != agent}

    def start(
        self,
        piece: WritePiece,
        blocks: Ints,
        area: StagingArea,
        address: PeerAddress,
        block_size: int,
        digest: Digest,
        now_s: float,
    ) -> None:
        """Takes a piece on. blocks: the blocks at P that hold its tokens, in order; address: where D answers.

        Raises ValueError if a block does not fit into a slot of D's.
        """
        if area.slot_bytes < self._packer.block_bytes:
            raise ValueError(
                f"a block of {self._packer.block_bytes} bytes does not fit into D's slots of {area.slot_bytes}"
            )
        first, end = piece.first_token // block_size, -(-piece.end_token // block_size)
        job = _Job(piece, blocks, area, address, digest, block_size, first, first, end, now_s)
        self._jobs.append(job)
        self._begin(now_s)

    def poll(self, now_s: float) -> list[Outcome]:
        """Moves everything on, and says what has come of it, in the order in which the protocol has to hear it."""
        self._poll_packs()
        self._poll_writes(now_s)
        self._begin(now_s)
        for job in self._jobs:
            self._poll_digests(job, now_s)
        outcomes: list[Outcome] = []
        # What was posted last is held back first.
        for job in reversed(self._jobs):
            self._cut(job, outcomes)
        for job in list(self._jobs):
            self._settle(job, outcomes, now_s)
        return outcomes

    def overdue(self, now_s: float) -> list[tuple[AgentName, PeerAddress, Staged]]:
        """What has to be said again."""
        return self._peers.overdue(now_s - REPEAT_S, now_s)

    # Parts

    def _begin(self, now_s: float) -> None:
        """Packs as many parts as there are slots for at both sides."""
        behind: set[object] = set()
        for job in self._jobs:
            if job.piece.key in behind:
                continue  # a transfer's pieces keep their order, so that a preemption leaves no hole
            while self._goes_on(job, now_s) and self._local:
                taken = self._peers.take(job.piece.agent, job.address)
                if taken is None:
                    break
                self._pack(job, *taken, now_s)
            if job.next < job.end:
                behind.add(job.piece.key)

    def _goes_on(self, job: _Job, now_s: float) -> bool:
        if job.error or job.next >= job.end or self._closed(job.piece.request_id):
            return False
        if not self._wanted(job.piece):
            job.error = "stopped"
        elif self._peers.denied(job.piece.agent):
            job.error = "D has no staging slot for this producer (staging_bytes sets how many there are)"
        elif not self._peers.granted(job.piece.agent) and now_s - job.started_s > GRANT_WAIT_S:
            job.error = "D has not said which staging slots it grants"
        return not job.error

    def _pack(self, job: _Job, slot: int, use: int, now_s: float) -> None:
        piece, packer = job.piece, self._packer
        most = min(self._area.slot_bytes, job.area.slot_bytes) // packer.block_bytes
        count = min(job.end - job.next, most)
        first, last = job.next, job.next + count
        local = self._local.pop()
        try:
            event = packer.pack(job.blocks[first - job.first : last - job.first], self._area.slot(local))
        except (ValueError, PackingError) as error:
            self._local.append(local)
            self._peers.free(piece.agent, slot, use)
            job.error = f"packing failed: {error}"
            return
        message = Staged(piece.key, piece.attempt, slot, use, first, count)
        self._packing.append(_Part(job, message, local, count * packer.block_bytes, event))
        job.next = last
        job.packing += 1
        job.open += 1
        job.num_parts += 1
        job.num_bytes += count * packer.block_bytes
        # Behind the pack, which is in a hurry.
        tokens = (max(first * job.block_size, piece.first_token), min(last * job.block_size, piece.end_token))
        hashing = job.digest(*tokens)
        if hashing is not None:
            job.hashings.append((now_s, hashing))

    def _poll_digests(self, job: _Job, now_s: float) -> None:
        waiting = []
        for started_s, hashing in job.hashings:
            if hashing.done():
                digest = hashing.take()
                if digest is not None:
                    job.digests.append(digest)
            elif not job.error and self._awaited(job.piece, now_s - started_s):
                waiting.append((started_s, hashing))
            else:
                hashing.cancel()
        job.hashings = waiting

    def _poll_packs(self) -> None:
        """Writes what has been packed."""
        waiting = []
        for part in self._packing:
            try:
                if not part.event.query():
                    waiting.append(part)
                    continue
                part.job.packing -= 1
                self._write(part)
            except TransportError as error:
                self._end_write(part, error)
        self._packing = waiting

    def _write(self, part: _Part) -> None:
        job, message = part.job, part.message
        agent, source = job.piece.agent, self._area.slot(part.local)
        runs = Runs.of((source, job.area.slot(message.slot), part.num_bytes))
        part.handle = self._transport.write(agent, runs, self._area.device, job.area.device, encode(message))
        self._writing.append(part)

    def _poll_writes(self, now_s: float) -> None:
        writing = []
        for part in self._writing:
            assert part.handle is not None
            try:
                if not self._transport.done(part.handle):
                    writing.append(part)
                    continue
            except TransportError as error:
                self._end_write(part, error)
                continue
            self._transport.release(part.handle)
            self._local.append(part.local)
            agent, message = part.job.piece.agent, part.message
            self._landed[agent, message.slot, message.use] = part
            self._peers.told(agent, message, now_s)
        self._writing = writing

    def _end_write(self, part: _Part, error: TransportError) -> None:
        """A part was not posted, or has failed. What may land all the same can only reach its slot."""
        if part.handle is not None:
            self._transport.release(part.handle)
        self._local.append(part.local)
        agent, message = part.job.piece.agent, part.message
        if error.may_land:
            self._peers.lose(agent, message.slot, message.use)
        else:
            self._peers.free(agent, message.slot, message.use)
        part.job.error = part.job.error or str(error) or "write failed"

    # Pieces

    def _cut(self, job: _Job, outcomes: list[Outcome]) -> None:
        """The blocks are about to be taken: what is not packed yet is held back."""
        if job.read or job.error or job.reading or job.next >= job.end or not self._closed(job.piece.request_id):
            return
        if job.next == job.first:
            self._jobs.remove(job)
            outcomes.append(NotPosted(job.piece))
            return
        job.end, job.read = job.next, True
        outcomes.append(Cut(job.piece, job.end * job.block_size))

    def _settle(self, job: _Job, outcomes: list[Outcome], now_s: float) -> None:
        if not job.error and not self._wanted(job.piece):
            job.error = "stopped"
        if not job.read and not job.reading and (job.error or job.next == job.end):
            job.read = True
            outcomes.append(Read(job.piece))
        if job.read and (job.error or (not job.open and job.next == job.end)):
            self._jobs.remove(job)
            num_blocks = job.next - job.first
            outcomes.append(
                Ended(
                    job.piece, job.num_bytes, num_blocks, job.num_parts, tuple(job.digests), job.error,
                    now_s - job.started_s,
                )
            )  # fmt: skip
