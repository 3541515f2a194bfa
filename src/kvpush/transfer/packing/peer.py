"""Memory of a rank's cache that another process of the same host may map, and the mapping of it.

What is exported travels in the handshake. A mapping is not removed by the end of the process that it came from: what a
kernel stores there afterwards is lost, and harms nobody.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from kvpush.plan.geometry import MAX_ADDRESS, CacheGeometry
from kvpush.transfer.packing.base import PeerCache, PeerUnavailable
from kvpush.transfer.packing.driver import HANDLE_BYTES, UUID_BYTES, Driver, DriverError, cuda_driver
from kvpush.transfer.packing.pages import PageLayout
from kvpush.transport.base import Region

if TYPE_CHECKING:
    import torch

MAX_REGIONS = 1024
"""Of one cache; what comes from the network stays small."""

# Not the process id alone: in two containers both may be number 1.
_PROCESS = f"{os.getpid()}-{uuid.uuid4().hex}"


class PeerRegion(msgspec.Struct, frozen=True):
    """One range of a cache, as another process may map it.

    address, length_bytes: the range in the process that exports it. handle, offset: the allocation that it lies in, and
    where in it. device_uuid: the GPU. process: names one life of the process, so that it knows itself again.
    Raises ValueError naming the field that is out of range.
    """

    address: int
    length_bytes: int
    handle: bytes
    offset: int
    device_uuid: bytes
    process: str

    def __post_init__(self) -> None:
        if len(self.handle) != HANDLE_BYTES:
            raise ValueError(f"handle has {len(self.handle)} bytes, must have {HANDLE_BYTES}")
        if not 1 <= len(self.process) <= 64:
            raise ValueError(f"process has {len(self.process)} characters, must have 1 to 64")
        if len(self.device_uuid) != UUID_BYTES:
            raise ValueError(f"device_uuid has {len(self.device_uuid)} bytes, must have {UUID_BYTES}")
        for name, least in (("address", 1), ("length_bytes", 1), ("offset", 0)):
            if not least <= getattr(self, name) <= MAX_ADDRESS:
                raise ValueError(f"{name} is {getattr(self, name)}, must be {least} to {MAX_ADDRESS}")
        if max(self.address, self.offset) + self.length_bytes > MAX_ADDRESS:
            raise ValueError(f"{self.length_bytes} bytes at {self.address:#x} leave the address space")


def export_regions(regions: Sequence[Region], driver: Driver | None = None) -> list[PeerRegion]:
    """What a peer on this host needs to store into these ranges; it is given to those that may.

    Raises PeerUnavailable if the driver has no handles for this memory.
    """
    found, handles = [], dict[int, bytes]()
    for region in regions:
        if region.device is None:
            raise PeerUnavailable("the cache is in host memory, and only GPU memory can be mapped by a peer")
        try:
            driver = driver or cuda_driver()
            start, length = driver.allocation_of(region.device, region.address)
            if region.address + region.length_bytes > start + length:
                raise PeerUnavailable(
                    f"the {region.length_bytes} bytes at {region.address:#x} lie in several allocations{_EXPANDABLE}"
                )
            if not driver.exportable(region.device, region.address):
                raise PeerUnavailable(f"the allocation at {start:#x} has no IPC handle{_EXPANDABLE}")
            if start not in handles:
                handles[start] = driver.export(region.device, region.address)
            device_uuid = driver.device_uuid(region.device)
        except DriverError as error:
            raise PeerUnavailable(f"the cache cannot be exported: {error}{_EXPANDABLE}") from error
        offset = region.address - start
        found.append(PeerRegion(region.address, region.length_bytes, handles[start], offset, device_uuid, _PROCESS))
    return found


_EXPANDABLE = " (memory from torch's expandable segments has none: see PYTORCH_CUDA_ALLOC_CONF)"


@dataclass(slots=True)
class _Mapping:
    address: int
    length_bytes: int
    users: int


class Mappings:
    """Allocations of other processes that are mapped into this one, each once, however many regions lie in it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._open: dict[tuple[int, str, bytes], _Mapping] = {}
        self._lock = threading.Lock()  # handshakes run on a pool

    def __len__(self) -> int:
        return len(self._open)

    def acquire(self, device: int, region: PeerRegion) -> int:
        """The address here of the region's first byte. Raises PeerUnavailable if it cannot be mapped."""
        with self._lock:
            mapping = self._open.get((device, region.process, region.handle))
            if mapping is None:
                mapping = self._map(device, region)
            if region.offset + region.length_bytes > mapping.length_bytes:
                if mapping.users == 0:
                    self._close(device, region)
                raise PeerUnavailable(
                    f"the peer speaks of {region.length_bytes} bytes at {region.offset} of an allocation, which has "
                    f"{mapping.length_bytes}"
                )
            mapping.users += 1
            return mapping.address + region.offset

    def release(self, device: int, region: PeerRegion) -> None:
        """Gives one acquired region back; what nobody uses any more is unmapped."""
        with self._lock:
            mapping = self._open[device, region.process, region.handle]
            mapping.users -= 1
            if mapping.users == 0:
                self._close(device, region)

    def _map(self, device: int, region: PeerRegion) -> _Mapping:
        try:
            address = self._driver.open(device, region.handle)
        except DriverError as error:
            raise PeerUnavailable(f"memory of process {region.process} cannot be mapped: {error}") from error
        try:
            start, length = self._driver.allocation_of(device, address)
        except DriverError as error:
            self._driver.close(device, address)
            raise PeerUnavailable(f"the size of a mapping is not known: {error}") from error
        mapping = _Mapping(address, start + length - address, 0)
        self._open[device, region.process, region.handle] = mapping
        return mapping

    def _close(self, device: int, region: PeerRegion) -> None:
        mapping = self._open.pop((device, region.process, region.handle))
        try:
            self._driver.close(device, mapping.address)
        except DriverError:
            pass  # it stays mapped until this process ends, which costs addresses only


_mappings: Mappings | None = None
_mappings_lock = threading.Lock()


def process_mappings() -> Mappings:
    """Those of this process: the driver knows one mapping of an allocation, whoever asks. Raises PeerUnavailable."""
    global _mappings
    with _mappings_lock:
        if _mappings is None:
            try:
                _mappings = Mappings(cuda_driver())
            except DriverError as error:
                raise PeerUnavailable(str(error)) from error
        return _mappings


def incompatible(mine: CacheGeometry, theirs: CacheGeometry) -> str | None:
    """Why blocks of one cache cannot be stored into the other as they are; None if they can.

    The distance between blocks and their number may differ.
    """
    if mine.device is None or theirs.device is None:
        return "a cache in host memory is not reached by a kernel"
    if len(mine.bases) != len(theirs.bases):
        return f"this cache has {len(mine.bases)} layers, the peer's {len(theirs.bases)}"
    left, right = PageLayout.of(mine), PageLayout.of(theirs)
    for name in ("content_bytes", "num_heads", "block_size", "head_stride", "token_stride"):
        if getattr(left, name) != getattr(right, name):
            return f"{name} is {getattr(left, name)} here and {getattr(right, name)} at the peer"
    return None


def mapped_bases(geometry: CacheGeometry, regions: Sequence[PeerRegion], addresses: Sequence[int]) -> tuple[int, ...]:
    """The peer's bases in this process. addresses: where each region begins here.

    Raises PeerUnavailable if a layer does not lie inside one region.
    """
    extent, found = geometry.extent_bytes, []
    for i, base in enumerate(geometry.bases):
        for region, address in zip(regions, addresses, strict=True):
            if region.address <= base and base + extent <= region.address + region.length_bytes:
                found.append(address + base - region.address)
                break
        else:
            raise PeerUnavailable(f"the peer has exported no memory that holds its layer {i}")
    return tuple(found)


def open_peer(
    geometry: CacheGeometry,
    layers: Sequence[torch.Tensor],
    peer_geometry: CacheGeometry,
    peer_regions: Sequence[PeerRegion],
    num_programs: int | None = None,
) -> PeerCache:
    """Maps the peer's cache and makes the kernel that stores this cache's blocks into it. Takes tens of milliseconds.

    layers: the tensors behind `geometry.bases`. num_programs: as with `make_packer`. May be called in any thread.
    Raises PeerUnavailable if it cannot be had; nothing is mapped then. ValueError if geometry and layers do not belong
    together.
    """
    reason = incompatible(geometry, peer_geometry)
    if reason is not None:
        raise PeerUnavailable(reason)
    if len(peer_regions) > MAX_REGIONS:
        raise PeerUnavailable(f"the peer has {len(peer_regions)} regions, at most {MAX_REGIONS} are mapped")
    if any(region.process == _PROCESS for region in peer_regions):
        raise PeerUnavailable("the peer says that it is this very process")
    try:
        from kvpush.transfer.packing.peer_kernel import MappedPeer
    except ImportError as error:
        raise PeerUnavailable(f"no kernel can be built: {error}") from error
    assert geometry.device is not None
    device, mappings, held = geometry.device, process_mappings(), list[PeerRegion]()
    try:
        addresses = []
        for region in peer_regions:
            addresses.append(mappings.acquire(device, region))
            held.append(region)
        bases = mapped_bases(peer_geometry, peer_regions, addresses)
        return MappedPeer(
            geometry, layers, peer_geometry, bases, num_programs, lambda: _release(mappings, device, held)
        )
    except Exception as error:
        _release(mappings, device, held)
        if isinstance(error, (PeerUnavailable, ValueError)):
            raise
        raise PeerUnavailable(f"the peer's cache cannot be stored into: {error}") from error


def _release(mappings: Mappings, device: int, regions: Sequence[PeerRegion]) -> None:
    for region in regions:
        mappings.release(device, region)
