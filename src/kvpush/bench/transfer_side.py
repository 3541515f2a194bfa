"""One of the two processes of the raw transfer benchmark: a paged KV cache, a transport, and data to compare.

Both sides draw the same random bytes from the same seed, so the target knows what must have arrived without being sent
it any other way.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from kvpush.bench.staged_side import StagedSide
from kvpush.bench.tables import Blocks
from kvpush.plan.geometry import CacheGeometry
from kvpush.plan.runs import Runs, plan_runs
from kvpush.transfer.packing.base import PeerCache
from kvpush.transfer.packing.peer import PeerRegion, export_regions, open_peer
from kvpush.transfer.staging import StagingArea
from kvpush.transport.base import Region
from kvpush.transport.nixl import NixlTransport

HEAD_DIM = 128
ITEM_BYTES = 2
# Between polls: bare spinning takes the cores away from UCX's own threads.
POLL_S = 20e-6
ARRIVAL_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class CacheShape:
    """`regions` tensors of [num_blocks, kv_heads, block_size, width] each, in pages of `page_bytes`.

    single_bytes: length of one more buffer, for the same bytes as a single write.
    """

    regions: int
    page_bytes: int
    block_size: int
    num_blocks: int
    single_bytes: int
    kv_heads: int = 8

    @property
    def content_bytes(self) -> int:
        """Of one token and head: K and V together, or one of them where they lie apart."""
        return self.page_bytes // (self.block_size * self.kv_heads)

    @property
    def block_bytes(self) -> int:
        """Of one block over all regions."""
        return self.regions * self.page_bytes


@dataclass(frozen=True, slots=True)
class Introduction:
    """What the other side needs: the transport's metadata, where the cache lies, and the single buffer's address."""

    metadata: bytes
    geometry: CacheGeometry
    single_address: int
    area: StagingArea
    peer: tuple[PeerRegion, ...]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one write on the source: planning, posting, until done. started_s: `time.monotonic()` of posting."""

    plan_s: float
    post_s: float
    done_s: float
    started_s: float
    runs: int
    bytes: int
    path: str


class Side:
    """Owns the memory and the agent of one process until `close`. device: CUDA ordinal or None for host memory."""

    def __init__(self, role: str, shape: CacheShape, device: int | None, threads: int, staging_bytes: int) -> None:
        self.shape = shape
        self.device = device
        self.torch_device = torch.device("cpu") if device is None else torch.device("cuda", device)
        words = shape.page_bytes // 8
        make: Callable[..., torch.Tensor] = torch.zeros
        self.cache = [
            make((shape.num_blocks, words), dtype=torch.int64, device=self.torch_device) for _ in range(shape.regions)
        ]
        self.single = make(shape.single_bytes // 8, dtype=torch.int64, device=self.torch_device)
        self.transport = NixlTransport(f"bench-{role}-{uuid.uuid4().hex[:8]}", num_threads=threads)
        self.transport.register(
            [Region(each.data_ptr(), each.nbytes, device) for each in (*self.cache, self.single)],
        )
        self.geometry = CacheGeometry.from_strides(
            [each.data_ptr() for each in self.cache],
            (shape.num_blocks, shape.kv_heads, shape.block_size, shape.content_bytes // ITEM_BYTES),
            self._strides(),
            ITEM_BYTES,
            device,
        )
        self.staged = StagedSide(role, self.transport, self.geometry, self.cache, staging_bytes)
        self.mapped: PeerCache | None = None
        self.peer = ""
        self.other: Introduction | None = None

    def _strides(self) -> tuple[int, int, int, int]:
        """HND: within a page all tokens of a head, then the next head."""
        width = self.shape.content_bytes // ITEM_BYTES
        token, head = width, width * self.shape.block_size
        return head * self.shape.kv_heads, head, token, 1

    def introduce(self) -> Introduction:
        peer: tuple[PeerRegion, ...] = ()
        if self.device is not None:
            peer = tuple(export_regions([Region(each.data_ptr(), each.nbytes, self.device) for each in self.cache]))
        return Introduction(self.transport.metadata(), self.geometry, self.single.data_ptr(), self.staged.area, peer)

    def connect(self, other: Introduction) -> None:
        self.peer = self.transport.connect(other.metadata)
        self.other = other

    def grant(self) -> tuple[int, ...]:
        """Target: the staging slots of the source."""
        return self.staged.grant(self.peer)

    def take(self, slots: tuple[int, ...]) -> None:
        """Source: these slots are ours."""
        assert self.other is not None
        self.staged.take(self.peer, slots, self.other.area)

    def _draw(self, generator: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device=self.torch_device).random_(generator=generator)

    def _generator(self, seed: int) -> torch.Generator:
        generator = torch.Generator(device=self.torch_device)
        generator.manual_seed(seed)
        return generator

    def _settle(self) -> None:
        if self.device is not None:
            torch.cuda.synchronize(self.device)

    def fill(self, blocks: Blocks | None, seed: int) -> None:
        """Source: fresh random bytes in these blocks, or in the single buffer for None."""
        generator = self._generator(seed)
        if blocks is None:
            self.single.copy_(self._draw(generator, *self.single.shape))
        else:
            index = torch.from_numpy(blocks).to(self.torch_device)
            for region in self.cache:
                region.index_copy_(0, index, self._draw(generator, len(blocks), region.shape[1]))
        self._settle()

    def wipe(self, seed: int) -> None:
        """Target: the seed's number everywhere, so that what does not arrive, or arrives elsewhere, shows."""
        for each in (*self.cache, self.single):
            each.fill_(seed)
        self._settle()

    def write(self, tables: tuple[Blocks, Blocks] | None, tokens: int, path: str, message: bytes) -> Timing:
        """Source: the tables' blocks by a path, or the single buffer in one write for None."""
        if self.other is None:
            raise RuntimeError("not connected")
        began_s = time.monotonic()
        if tables is None:
            runs = Runs.of((self.single.data_ptr(), self.other.single_address, self.single.nbytes))
        elif path == "peer" or (path == "auto" and self.other.peer):
            return self._store(tables, message)
        elif path == "staged":
            return self._stage(tables[0], began_s, began_s)
        else:
            runs = plan_runs(self.geometry, tables[0], self.other.geometry, tables[1], 0, tokens)
        planned_s = time.monotonic()
        if tables is not None and path == "auto" and self.staged.pays(runs):
            return self._stage(tables[0], began_s, planned_s)
        handle = self.transport.write(self.peer, runs, self.device, self.other.geometry.device, message)
        posted_s = time.monotonic()
        while not self.transport.done(handle):
            time.sleep(POLL_S)
        done_s = time.monotonic()
        self.transport.release(handle)
        return Timing(
            plan_s=planned_s - began_s,
            post_s=posted_s - planned_s,
            done_s=done_s - planned_s,
            started_s=planned_s,
            runs=len(runs),
            bytes=runs.num_bytes,
            path="direct",
        )

    def _store(self, tables: tuple[Blocks, Blocks], message: bytes) -> Timing:
        """Source: one kernel stores into the target's cache, which is mapped at the first time."""
        assert self.other is not None
        if self.mapped is None:
            self.mapped = open_peer(self.geometry, self.cache, self.other.geometry, self.other.peer)
        began_s = time.monotonic()
        event = self.mapped.copy(*tables)
        posted_s = time.monotonic()
        while not event.query():
            time.sleep(POLL_S)
        self.transport.notify(self.peer, message)
        return Timing(
            plan_s=0.0,
            post_s=posted_s - began_s,
            done_s=time.monotonic() - began_s,
            started_s=began_s,
            runs=1,
            bytes=len(tables[0]) * self.shape.block_bytes,
            path="peer",
        )

    def _stage(self, blocks: Blocks, began_s: float, planned_s: float) -> Timing:
        assert self.other is not None
        self.staged.start(self.peer, blocks, self.other.area)
        posted_s = time.monotonic()
        ended = None
        while ended is None:
            ended = self.staged.push(self.transport.notifications())
            if time.monotonic() > planned_s + ARRIVAL_TIMEOUT_S:
                raise TimeoutError(f"no credit within {ARRIVAL_TIMEOUT_S:g} s")
            time.sleep(POLL_S)
        if ended.error:
            raise RuntimeError(ended.error)
        return Timing(
            plan_s=planned_s - began_s,
            post_s=posted_s - planned_s,
            done_s=time.monotonic() - planned_s,
            started_s=planned_s,
            runs=ended.num_parts,
            bytes=ended.num_bytes,
            path="staged",
        )

    def await_arrival(self, blocks: Blocks | None, message: bytes) -> float:
        """Target: `time.monotonic()` at which the write's message was seen, or the last staged block was unpacked.

        Raises TimeoutError.
        """
        deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
        while time.monotonic() < deadline:
            arrived = self.transport.notifications()
            if any(payload == message for _, payload in arrived):
                return time.monotonic()
            if blocks is not None and self.staged.unpack(arrived, blocks):
                return time.monotonic()
            time.sleep(POLL_S)
        raise TimeoutError(f"{message!r} has not arrived within {ARRIVAL_TIMEOUT_S:g} s")

    def verify(self, blocks: Blocks | None, seed: int) -> str | None:
        """Target: None if exactly the expected bytes changed since `wipe(seed)`, else what is wrong."""
        self._settle()
        generator = self._generator(seed)
        if blocks is None:
            same = torch.equal(self.single, self._draw(generator, *self.single.shape))
            return None if same else "the single buffer differs"
        index = torch.from_numpy(blocks).to(self.torch_device)
        unused = np.setdiff1d(np.arange(self.shape.num_blocks), blocks)
        for number, region in enumerate(self.cache):
            expected = self._draw(generator, len(blocks), region.shape[1])
            bad = (region.index_select(0, index) != expected).any(dim=1)
            if bool(bad.any()):
                return f"region {number}: {int(bad.sum())} of {len(blocks)} blocks differ"
            stray = _touched(region, torch.from_numpy(unused).to(self.torch_device), seed)
            if stray:
                return f"region {number}: {stray} blocks outside the table were written"
        return None

    def close(self) -> None:
        if self.mapped is not None:
            self.mapped.close()
        self.transport.close()


def _touched(region: torch.Tensor, blocks: torch.Tensor, value: int) -> int:
    """How many of these blocks hold anything but `value`. In pieces, to need little memory beside the cache."""
    count = torch.zeros((), dtype=torch.int64, device=region.device)
    for first in range(0, len(blocks), 1024):
        piece = region.index_select(0, blocks[first : first + 1024])
        count += (piece != value).any(dim=1).sum()
    return int(count)


def serve(pipe: Connection, role: str, shape: CacheShape, cuda: bool, threads: int, staging_bytes: int) -> None:
    """Body of a child process: answers (method name, arguments) with ("ok", result) or ("error", text) until None."""
    side: Side | None = None
    # Two of these share the machine with UCX's threads; torch's pool would spin on what cores are left.
    torch.set_num_threads(1)
    try:
        side = Side(role, shape, 0 if cuda else None, threads, staging_bytes)
        pipe.send(("ok", side.introduce()))
        while (request := pipe.recv()) is not None:
            name, arguments = request
            result: Any = getattr(side, name)(*arguments)
            pipe.send(("ok", result))
    except EOFError:
        pass
    except Exception as error:
        pipe.send(("error", f"{role}: {type(error).__name__}: {error}"))
    finally:
        if side is not None:
            side.close()
