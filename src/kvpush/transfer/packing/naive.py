"""The packed form, byte by byte: what every packer must agree with. For tests; slow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvpush.plan.geometry import CacheGeometry


class Memory:
    """A copy of some ranges of memory, found by the addresses that they were copied from.

    ranges: (address, bytes); repeats of an address are dropped.
    """

    def __init__(self, ranges: Iterable[tuple[int, npt.NDArray[np.uint8]]]) -> None:
        self._ranges = dict(ranges)

    def at(self, address: int, length: int) -> npt.NDArray[np.uint8]:
        """The bytes as a view that may be written. Raises ValueError if they are not part of one range."""
        for start, content in self._ranges.items():
            if start <= address and address + length <= start + len(content):
                return content[address - start : address - start + length]
        raise ValueError(f"{length} bytes at {address:#x} were not copied")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Memory):
            return NotImplemented
        return self._ranges.keys() == other._ranges.keys() and all(
            np.array_equal(content, other._ranges[start]) for start, content in self._ranges.items()
        )

    __hash__ = None  # type: ignore[assignment]


def naive_pack(geometry: CacheGeometry, memory: Memory, blocks: Sequence[int]) -> bytes:
    """The blocks of all bases in the packed form."""
    return b"".join(memory.at(place, geometry.content_bytes).tobytes() for place in _contents(geometry, blocks))


def naive_unpack(geometry: CacheGeometry, memory: Memory, blocks: Sequence[int], packed: bytes) -> None:
    """The inverse, into the copy."""
    size = geometry.content_bytes
    for i, place in enumerate(_contents(geometry, blocks)):
        memory.at(place, size)[:] = np.frombuffer(packed[i * size : (i + 1) * size], dtype=np.uint8)


def _contents(geometry: CacheGeometry, blocks: Sequence[int]) -> Iterator[int]:
    for base in range(len(geometry.bases)):
        for block in blocks:
            for head in range(geometry.num_heads):
                for token in range(geometry.block_size):
                    yield geometry.address(base, block, head, token)
