"""The interface of packing: what the transfer thread needs, whatever the device and the layout.

All calls come from one thread. They return once the copy has been launched (on a CPU: once it is done); the memory at
both ends stays as it is, and belongs to the copy, until the event has passed.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpush.plan.geometry import CacheGeometry
from kvpush.transfer.sources import Event


class PackingError(Exception):
    """A buffer, a stream or a kernel cannot be had; the message says which and why."""


class PeerUnavailable(PackingError):
    """A peer's cache cannot be stored into from here. `reason` is for people: the transfer takes another path."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Packer(Protocol):
    """Whole blocks of this rank's cache to and from contiguous memory on the same device.

    The packed form: for each base of the geometry, for each block in the order given, the block's bytes in logical
    order [head, token, content]. It does not depend on the layout of the cache, so P and D may differ in it.
    """

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all bases, packed: len(bases) * num_heads * block_size * content_bytes."""
        ...

    def pack(self, blocks: npt.NDArray[np.int64], address: int) -> Event:
        """Copies blocks to the byte address `address`; the event passes when len(blocks) * block_bytes stand there.

        Blocks may repeat. Raises ValueError, with nothing launched, for a block that the cache does not have or if the
        bytes would not lie inside memory that the packer's owner gave it. A kernel asks for addresses that are
        multiples of 16 (ValueError); slots of whole blocks are. PackingError if the launch failed.
        """
        ...

    def unpack(self, address: int, blocks: npt.NDArray[np.int64]) -> Event:
        """The inverse: the packed bytes at `address` into these blocks, of which none may come twice (ValueError)."""
        ...


class PeerCache(Protocol):
    """The cache of a process on the same host, mapped into this one."""

    def copy(self, blocks: npt.NDArray[np.int64], peer_blocks: npt.NDArray[np.int64]) -> Event:
        """Stores blocks[i] of this rank's cache into peer_blocks[i] of the peer's, all bases in one launch.

        Once launched it ends by itself: the passed event proves that nothing is written any more. Raises ValueError,
        with nothing launched, for blocks that one of the caches does not have, for lists of different length or longer
        than the smaller cache, or for a target that comes twice. PackingError if the launch failed.
        """
        ...

    def close(self) -> None:
        """Waits for what was launched, then unmaps. A second time does nothing."""
        ...


def packed_block_bytes(geometry: CacheGeometry) -> int:
    """Bytes of one block over all bases in the packed form."""
    return len(geometry.bases) * page_bytes(geometry)


def page_bytes(geometry: CacheGeometry) -> int:
    """Bytes of one block of one base in the packed form."""
    return geometry.num_heads * geometry.block_size * geometry.content_bytes


class BlockCheck:
    """Tells whether block ids are ones that a cache has. Called for every copy, so it must take microseconds."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._place: npt.NDArray[np.int64] | None = None  # where a list holds each block; what lists before left stays

    def __call__(self, blocks: npt.NDArray[np.int64], name: str, *, distinct: bool) -> None:
        """Raises ValueError unless blocks is a one-dimensional int64 array of ids in [0, num_blocks).

        distinct: none may come twice, since two writers of one block leave a mixture.
        """
        if not isinstance(blocks, np.ndarray) or blocks.dtype != np.int64 or blocks.ndim != 1:
            raise ValueError(f"{name} must be a one-dimensional int64 array")
        if len(blocks) == 0:
            return
        least, most = int(blocks.min()), int(blocks.max())
        if least < 0 or most >= self._num_blocks:
            raise ValueError(
                f"{name} holds {least if least < 0 else most}, the cache has blocks 0 to {self._num_blocks - 1}"
            )
        if not distinct:
            return
        if self._place is None:
            self._place = np.zeros(self._num_blocks, dtype=np.int64)
        order = np.arange(len(blocks))
        self._place[blocks] = order
        twice = np.nonzero(self._place[blocks] != order)[0]
        if len(twice):
            raise ValueError(f"{name} holds block {int(blocks[twice[0]])} twice")


def checked_blocks(name: str, blocks: npt.NDArray[np.int64], num_blocks: int, *, distinct: bool) -> None:
    """The same for one list."""
    BlockCheck(num_blocks)(blocks, name, distinct=distinct)
