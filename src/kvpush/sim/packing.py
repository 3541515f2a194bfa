"""Kernels over arrays, in virtual time: a launched copy ends later, whether its process is stopped or not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvpush.plan.geometry import CacheGeometry
from kvpush.plan.runs import plan_runs
from kvpush.transport.fabric import MemoryFabric
from kvpush.transport.memory import MemoryWrite

Bytes = npt.NDArray[np.uint8]


class Copying:
    """The event behind a copy."""

    __slots__ = ("passed",)

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


class ArrayPacker:
    """cache: uint8 [layers, blocks, page]. memory: the staging memory, at `address`. copy_s: how long a copy takes.

    A copy moves its bytes when it ends, which is the worst case for whoever gives blocks away too early.
    """

    def __init__(
        self,
        fabric: MemoryFabric,
        agent: str,
        cache: Bytes,
        memory: Bytes,
        address: int,
        copy_s: tuple[float, float],
    ) -> None:
        self._fabric = fabric
        self._agent = agent
        self._cache = cache
        self._memory = memory
        self._address = address
        self._copy_s = copy_s
        self._free_s = 0.0  # copies run one after the other, as on a stream

    @property
    def block_bytes(self) -> int:
        return int(self._cache.shape[0] * self._cache.shape[2])

    def pack(self, blocks: npt.NDArray[np.int64], address: int) -> Copying:
        place = self._place(blocks, address, distinct=False)

        def copy() -> None:
            place[:] = self._cache[:, blocks].reshape(-1)

        return self._launch(copy)

    def unpack(self, address: int, blocks: npt.NDArray[np.int64]) -> Copying:
        place = self._place(blocks, address, distinct=True)

        def copy() -> None:
            layers, _, page = self._cache.shape
            self._cache[:, blocks] = place.reshape(layers, len(blocks), page)

        return self._launch(copy)

    def _place(self, blocks: npt.NDArray[np.int64], address: int, *, distinct: bool) -> Bytes:
        if not all(0 <= block < self._cache.shape[1] for block in blocks.tolist()):
            raise ValueError(f"blocks {blocks.tolist()}, the cache has {self._cache.shape[1]}")
        if distinct and len(set(blocks.tolist())) < len(blocks):
            raise ValueError(f"blocks {blocks.tolist()} name one twice")
        first = address - self._address
        if not 0 <= first <= len(self._memory) - len(blocks) * self.block_bytes:
            raise ValueError(f"{len(blocks)} blocks at {address} do not lie in the staging memory")
        return self._memory[first : first + len(blocks) * self.block_bytes]

    def _launch(self, copy: Callable[[], None]) -> Copying:
        event, fabric = Copying(), self._fabric
        self._free_s = max(self._free_s, fabric.now_s) + fabric.draw_s(self._copy_s)

        def end() -> None:
            if fabric.state(self._agent) != "killed":
                copy()
                event.passed = True
                fabric.wake(self._agent)

        fabric.after(self._free_s - fabric.now_s, end)
        return event


class ArrayPeer:
    """Stores blocks of one agent's cache into another's. mine, theirs: where both caches are.

    on_copy(blocks, peer_blocks, handle): told of each launch; the handle says later that it has landed.
    """

    def __init__(
        self,
        fabric: MemoryFabric,
        agent: str,
        peer: str,
        mine: CacheGeometry,
        theirs: CacheGeometry,
        copy_s: tuple[float, float],
        on_copy: Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64], MemoryWrite], None] | None = None,
    ) -> None:
        self._fabric = fabric
        self._agent, self._peer = agent, peer
        self._mine, self._theirs = mine, theirs
        self._copy_s = copy_s
        self._on_copy = on_copy
        self.open = 0
        self.closed = False

    def copy(self, blocks: npt.NDArray[np.int64], peer_blocks: npt.NDArray[np.int64]) -> Copying:
        assert not self.closed
        tokens = len(blocks) * self._mine.block_size
        runs = plan_runs(self._mine, blocks, self._theirs, peer_blocks, 0, tokens)
        event, handle, fabric = Copying(), MemoryWrite(self._peer, b""), self._fabric
        if self._on_copy is not None:
            self._on_copy(blocks, peer_blocks, handle)
        self.open += 1

        def end() -> None:
            self.open -= 1
            if fabric.state(self._agent) == "killed":
                return
            if fabric.state(self._peer) != "killed":
                columns = (runs.src.tolist(), runs.dst.tolist(), runs.length.tolist())
                fabric.land(self._agent, self._peer, list(zip(*columns, strict=True)))
            handle._landed = event.passed = True
            fabric.wake(self._agent)

        fabric.after(fabric.draw_s(self._copy_s), end)
        return event

    def close(self) -> None:
        assert not self.open
        self.closed = True
