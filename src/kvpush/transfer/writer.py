"""P: turns a piece (tokens of a request) into one WRITE, and watches the writes in flight."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvpush.plan.block_table import decode_blocks
from kvpush.plan.geometry import CacheGeometry
from kvpush.plan.runs import Ints, Runs, plan_runs
from kvpush.protocol.actions import WritePiece
from kvpush.protocol.ids import AgentName
from kvpush.protocol.messages import PieceDigest
from kvpush.protocol.rendezvous import Registration
from kvpush.transfer.integrity import PieceHashing
from kvpush.transfer.sources import PASSED, Event
from kvpush.transport.base import Transport, TransportError, WriteHandle


class PieceRefused(Exception):
    """The piece cannot be written: the registration does not fit, or the transport refuses. Nothing was posted."""


class PieceLost(Exception):
    """The piece could not be posted as a whole, and bytes of it may land all the same."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one piece takes: its runs, and the seconds and processor seconds of finding them."""

    runs: Runs
    took_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class PieceCost:
    """What it took to post a piece: descriptors, and the seconds of planning and of the transport's call.

    cpu_s: processor time of both; what the wall clock has beyond it went to waiting (for the interpreter lock, mostly).
    """

    num_runs: int
    plan_s: float
    post_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Landed:
    """A piece that has ended. error: why it failed, or "" if every byte has landed.

    may_land: it has failed, but bytes of it may still land: nobody may be told that all is quiet. landed_s: when the
    write had ended; its digest may have taken longer.
    """

    piece: WritePiece
    num_bytes: int
    digest: PieceDigest | None
    error: str
    may_land: bool
    cost: PieceCost
    took_s: float
    landed_s: float


@dataclass(slots=True)
class _InFlight:
    """A write of the transport's (handle), or a kernel's stores (event)."""

    piece: WritePiece
    handle: WriteHandle | None
    num_bytes: int
    cost: PieceCost
    posted_s: float
    event: Event = PASSED
    hashing: PieceHashing | None = None
    landed_s: float | None = None


def whole_blocks(first_token: int, end_token: int, block_size: int) -> tuple[int, int]:
    """The token range of the blocks that hold [first_token, end_token).

    Raises ValueError if it would begin inside a block: what stands before first_token there is not ours to write.
    """
    if first_token % block_size:
        raise ValueError(f"first_token {first_token} is not at a block border (block size {block_size})")
    return first_token, -(-end_token // block_size) * block_size


class PieceWriter:
    """Owned by the transfer thread."""

    def __init__(self, transport: Transport, cache: CacheGeometry) -> None:
        self._transport = transport
        self._cache = cache
        self._in_flight: list[_InFlight] = []

    def __len__(self) -> int:
        return len(self._in_flight)

    def target_blocks(self, registration: Registration, target: CacheGeometry) -> Ints:
        """The consumer's block table of group 0, shape [n], int64. Raises PieceRefused if it is none for its cache."""
        if len(registration.blocks) != 1:
            raise PieceRefused(f"{len(registration.blocks)} KV cache groups are registered, this side has 1")
        try:
            parts = [decode_blocks(part, target.num_blocks) for part in registration.blocks[0]]
        except ValueError as error:
            raise PieceRefused(str(error)) from None
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def plan(self, piece: WritePiece, source: Sequence[int], target: CacheGeometry, target_table: Ints) -> Plan:
        """The runs of one piece. source: block ids of the request at P. Raises PieceRefused.

        Whole blocks travel: how a backend arranges the tokens inside a block is its own business (vLLM's CPU attention
        packs the keys of a block), so bytes of single tokens mean nothing by themselves. The slots behind the last
        token are D's to overwrite.
        """
        try:
            first, end = whole_blocks(piece.first_token, piece.end_token, self._cache.block_size)
            if target.block_size != self._cache.block_size:
                raise ValueError(f"block sizes differ: {self._cache.block_size} here, {target.block_size} there")
            start_s, start_cpu_s = time.perf_counter(), time.thread_time()
            runs = plan_runs(self._cache, source, target, target_table, first, end)
        except ValueError as error:
            raise PieceRefused(str(error)) from None
        return Plan(runs, time.perf_counter() - start_s, time.thread_time() - start_cpu_s)

    def post(
        self,
        piece: WritePiece,
        plan: Plan,
        target: CacheGeometry,
        now_s: float,
        digest: Callable[[], PieceHashing | None] = lambda: None,
    ) -> None:
        """Posts one piece. digest: begins to digest what was posted. Raises PieceRefused or PieceLost."""
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        try:
            handle = self._transport.write(piece.agent, plan.runs, self._cache.device, target.device, b"")
        except TransportError as error:
            raise (PieceLost if error.may_land else PieceRefused)(str(error)) from None
        except ValueError as error:
            raise PieceRefused(str(error)) from None
        cpu_s = plan.cpu_s + time.thread_time() - start_cpu_s
        cost = PieceCost(len(plan.runs), plan.took_s, time.perf_counter() - start_s, cpu_s)
        write = _InFlight(piece, handle, plan.runs.num_bytes, cost, now_s)
        self._in_flight.append(write)
        # Behind the post: the bytes are the same, and they leave first.
        write.hashing = digest()

    def follow(
        self,
        piece: WritePiece,
        event: Event,
        num_bytes: int,
        cost: PieceCost,
        now_s: float,
        digest: Callable[[], PieceHashing | None] = lambda: None,
    ) -> None:
        """Watches a piece that a kernel stores. event: passes when every byte is in place; digest: as for `post`."""
        write = _InFlight(piece, None, num_bytes, cost, now_s, event=event)
        self._in_flight.append(write)
        write.hashing = digest()

    def writes_to(self, agent: AgentName) -> bool:
        """Something is in flight to this incarnation."""
        return any(write.piece.agent == agent for write in self._in_flight)

    def _landed(self, write: _InFlight) -> bool:
        """Whether every byte is in place. Raises TransportError as `Transport.done`."""
        if write.handle is not None:
            return self._transport.done(write.handle)
        try:
            return write.event.query()
        except RuntimeError as error:
            raise TransportError(f"the device has failed: {error}", may_land=True) from error

    def poll(self, now_s: float, awaited: Callable[[WritePiece, float], bool] = lambda _, __: True) -> list[Landed]:
        """The pieces that have ended since the last call; their handles are released.

        A piece ends with its digest, if it has one: until then its blocks are read. awaited: whether a piece that was
        posted so many seconds ago should wait for its digest still; otherwise the digest is given up.
        """
        if not self._in_flight:
            return []
        ended, open_writes = [], []
        for write in self._in_flight:
            error, may_land = "", False
            if write.landed_s is None:
                try:
                    if not self._landed(write):
                        open_writes.append(write)
                        continue
                except TransportError as failure:
                    error, may_land = str(failure) or "write failed", failure.may_land
                if write.handle is not None:
                    self._transport.release(write.handle)
                write.landed_s = now_s
            digest, hashing = None, write.hashing
            if hashing is not None and hashing.done() and not error:
                digest = hashing.take()
            elif hashing is not None:
                if not error and awaited(write.piece, now_s - write.posted_s):
                    open_writes.append(write)
                    continue
                hashing.cancel()
            landed_s = write.landed_s
            took_s = landed_s - write.posted_s
            ended.append(Landed(write.piece, write.num_bytes, digest, error, may_land, write.cost, took_s, landed_s))
        self._in_flight = open_writes
        return ended
