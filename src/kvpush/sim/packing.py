"""A packer over arrays, in virtual time: a launched copy ends later, whether its process is stopped or not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvpush.transport.fabric import MemoryFabric

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
