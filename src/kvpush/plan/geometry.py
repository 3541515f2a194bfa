"""Where one rank's paged KV cache lies in memory, as an affine map.

A vLLM KV cache of one group is, per layer, a tensor with the logical shape [num_blocks, kv_heads, block_size, width].
What differs between layouts (HND, NHD, layers interleaved inside a block) is only the strides, so this keeps strides:

    address(base, block, head, token) = bases[base] + block * block_stride + head * head_stride + token * token_stride

and `content_bytes` contiguous bytes stand at each such address (K and V of a token and head side by side, or the latent
vector of MLA). A layout that keeps K and V in separate planes has one base per (layer, plane), in the same order at
both sides; nothing else changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec
import numpy as np

# What may come from the network stays small enough to be checked in some 20 ms.
MAX_BASES = 512
MAX_BLOCKS = 2**31 - 1
MAX_ADDRESS = 2**63 - 1


class CacheGeometry(msgspec.Struct, frozen=True):
    """The affine map of one rank's KV cache for one KV cache group. Hashable; travels by msgspec as it is.

    bases: byte address of (block 0, head 0, token 0) of each (layer, plane), layers in model order.
    block_stride, head_stride, token_stride: bytes between neighbours on that axis.
    content_bytes: contiguous bytes of one (base, block, head, token).
    num_blocks, num_heads, block_size: sizes of the axes; num_heads counts the KV heads of this rank (1 with MLA).
    device: CUDA ordinal, or None for host memory.

    Raises ValueError naming the field if a value is out of range or if two contents would overlap. Decoding raises
    msgspec.ValidationError with the same text.
    """

    bases: tuple[int, ...]
    block_stride: int
    head_stride: int
    token_stride: int
    content_bytes: int
    num_blocks: int
    num_heads: int
    block_size: int
    device: int | None = None

    def __post_init__(self) -> None:
        for name in ("content_bytes", "block_size", "num_heads", "num_blocks"):
            _check_int(name, getattr(self, name), 1, MAX_BLOCKS)
        for name in ("token_stride", "head_stride", "block_stride"):
            _check_int(name, getattr(self, name), 1, MAX_ADDRESS)
        if self.device is not None:
            _check_int("device", self.device, 0, 1023)
        if not isinstance(self.bases, tuple) or not 1 <= len(self.bases) <= MAX_BASES:
            raise ValueError(f"bases must be a tuple of 1 to {MAX_BASES} addresses")
        extent = self._checked_extent()
        for i, base in enumerate(self.bases):
            _check_int(f"bases[{i}]", base, 1, MAX_ADDRESS)
            if base + extent > MAX_ADDRESS:
                raise ValueError(f"bases[{i}]: {base} plus an extent of {extent} bytes leaves the address space")
        self._check_bases_apart(extent)

    @classmethod
    def from_strides(
        cls,
        pointers: Sequence[int],
        shape: Sequence[int],
        strides: Sequence[int],
        itemsize: int,
        device: int | None = None,
    ) -> CacheGeometry:
        """Builds the map from what a tensor says about itself.

        pointers: `data_ptr()` of each layer (or of each plane of each layer), in bytes.
        shape: logical [num_blocks, kv_heads, block_size, width], or [num_blocks, block_size, width] for MLA; the
        physical order is in `strides` alone.
        strides: in elements of `itemsize` bytes, one per entry of shape, equal for all layers.

        Raises ValueError if the innermost axis is not contiguous or the result is no valid geometry.
        """
        if len(shape) not in (3, 4):
            raise ValueError(f"shape {tuple(shape)} has {len(shape)} axes, expected 3 (MLA) or 4")
        if len(strides) != len(shape):
            raise ValueError(f"strides {tuple(strides)} and shape {tuple(shape)} differ in length")
        _check_int("itemsize", itemsize, 1, 64)
        width = int(shape[-1])
        if int(strides[-1]) != 1 and width != 1:
            raise ValueError(f"strides[-1] is {strides[-1]}: the innermost axis must be contiguous")
        content = width * itemsize
        step = [int(stride) * itemsize for stride in strides]
        mla = len(shape) == 3
        return cls(
            bases=tuple(int(pointer) for pointer in pointers),
            block_stride=step[0],
            head_stride=content if mla else step[1],
            token_stride=step[-2],
            content_bytes=content,
            num_blocks=int(shape[0]),
            num_heads=1 if mla else int(shape[1]),
            block_size=int(shape[-2]),
            device=device,
        )

    @property
    def extent_bytes(self) -> int:
        """Bytes from the first to the last byte that one base reaches, gaps included."""
        return (
            (self.num_blocks - 1) * self.block_stride
            + (self.num_heads - 1) * self.head_stride
            + (self.block_size - 1) * self.token_stride
            + self.content_bytes
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all bases and heads."""
        return len(self.bases) * self.num_heads * self.content_bytes

    @property
    def num_tokens(self) -> int:
        """Token slots of the whole cache."""
        return self.num_blocks * self.block_size

    def address(self, base: int, block: int, head: int, token: int) -> int:
        """Byte address of one content; base is an index into `bases`, token a slot inside the block."""
        return self.bases[base] + block * self.block_stride + head * self.head_stride + token * self.token_stride

    def region_of_bases(self) -> tuple[int, ...]:
        """For each base the index of its range in `regions()`. Bases share one only if they are interleaved."""
        order = sorted(range(len(self.bases)), key=self.bases.__getitem__)
        extent, region, end = self.extent_bytes, -1, -1
        found = [0] * len(order)
        for i in order:
            # Ranges that only touch may be two allocations, so they stay apart.
            if self.bases[i] >= end:
                region += 1
            end = self.bases[i] + extent
            found[i] = region
        return tuple(found)

    def regions(self, storages: Iterable[tuple[int, int]] | None = None) -> tuple[tuple[int, int], ...]:
        """The (address, length in bytes) ranges to register with a transport, ascending, none inside another.

        storages: (address, length) of the allocations behind the layers, repeats allowed; each base must lie inside
        one, else ValueError. Without it the ranges that the bases reach are taken.
        """
        extent = self.extent_bytes
        if storages is None:
            first: dict[int, int] = {}
            last: dict[int, int] = {}
            for base, region in zip(self.bases, self.region_of_bases(), strict=True):
                first[region] = min(base, first.get(region, base))
                last[region] = max(base, last.get(region, base))
            return tuple((first[region], last[region] + extent - first[region]) for region in sorted(first))
        unique = sorted(set(storages))
        for (address, length), (following, _) in pairwise(unique):
            if address + length > following:
                raise ValueError(f"storages: {length} bytes at {address:#x} overlap the one at {following:#x}")
        used: set[tuple[int, int]] = set()
        for i, base in enumerate(self.bases):
            home = [s for s in unique if s[0] <= base and base + extent <= s[0] + s[1]]
            if not home:
                raise ValueError(f"storages: none holds bases[{i}], {extent} bytes at {base:#x}")
            used.add(home[0])
        return tuple(sorted(used))

    def _axes(self) -> list[tuple[int, int, str]]:
        """(stride, size, name) of the axes that have more than one entry, innermost first."""
        axes = [
            (self.token_stride, self.block_size, "token_stride"),
            (self.head_stride, self.num_heads, "head_stride"),
            (self.block_stride, self.num_blocks, "block_stride"),
        ]
        return sorted(axis for axis in axes if axis[1] > 1)

    def _checked_extent(self) -> int:
        extent = self.content_bytes
        for stride, size, name in self._axes():
            if stride < extent:
                raise ValueError(f"{name} is {stride}, but what it steps over takes {extent} bytes")
            extent += stride * (size - 1)
        return extent

    def _check_bases_apart(self, extent: int) -> None:
        """Two bases overlap if their distance is a sum of steps that both can take, give or take one content."""
        bases = np.sort(np.array(self.bases, dtype=np.int64))
        if bool((np.diff(bases) >= extent).all()):
            return
        distance = bases[None, :] - bases[:, None]
        left, right = np.nonzero(np.triu(np.ones(distance.shape, dtype=bool), 1))
        rest = [(distance[left, right], np.ones(len(left), dtype=bool))]
        for stride, size, _ in reversed(self._axes()):
            taken = []
            for value, possible in rest:
                for steps in (value // stride, value // stride + 1):
                    taken.append((value - steps * stride, possible & (np.abs(steps) < size)))
            rest = taken
        for value, possible in rest:
            hit = np.nonzero(possible & (np.abs(value) < self.content_bytes))[0]
            if len(hit):
                a, b = int(bases[left[hit[0]]]), int(bases[right[hit[0]]])
                raise ValueError(f"bases: the contents of {a:#x} and {b:#x} overlap")


def _check_int(name: str, value: object, least: int, most: int) -> None:
    if type(value) is not int:
        raise ValueError(f"{name} must be an int, not {type(value).__name__}")
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}, must be {least} to {most}")
