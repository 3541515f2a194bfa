"""Exporting and mapping a cache, with a driver that keeps books instead of a GPU. The real one: tests/gpu."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from kvpush.plan.geometry import CacheGeometry
from kvpush.transfer.packing import peer
from kvpush.transfer.packing.base import PeerUnavailable
from kvpush.transfer.packing.driver import HANDLE_BYTES, UUID_BYTES, DriverError
from kvpush.transfer.packing.peer import Mappings, PeerRegion, export_regions, incompatible, mapped_bases, open_peer
from kvpush.transport.base import Region

pytestmark = pytest.mark.unit

MIB = 1 << 20
MAPPED = 1 << 40
"""Where the driver maps what it opens, one GiB for each."""


@dataclass
class BookKeeper:
    """A driver. allocations: start -> length, of this process; broken: calls that fail. Opening a handle twice without
    closing it is an error, as it is for some drivers."""

    allocations: dict[int, int]
    broken: set[str] = field(default_factory=set)
    legacy: bool = True
    exports: int = 0
    opened: dict[bytes, int] = field(default_factory=dict)
    num_opens: int = 0

    def device_uuid(self, device: int) -> bytes:
        return bytes([device]) * UUID_BYTES

    def allocation_of(self, device: int, address: int) -> tuple[int, int]:
        self._check("allocation_of")
        if address >= MAPPED:
            return address - address % (1 << 30), 64 * MIB
        for start, length in self.allocations.items():
            if start <= address < start + length:
                return start, length
        raise DriverError("cuMemGetAddressRange_v2: invalid argument (1)")

    def exportable(self, device: int, address: int) -> bool:
        return self.legacy

    def export(self, device: int, address: int) -> bytes:
        self._check("export")
        self.exports += 1
        return self.allocation_of(device, address)[0].to_bytes(HANDLE_BYTES, "little")

    def open(self, device: int, handle: bytes) -> int:
        self._check("open")
        if handle in self.opened:
            raise DriverError("cuIpcOpenMemHandle_v2: already mapped (208)")
        self.num_opens += 1
        self.opened[handle] = MAPPED + (self.num_opens << 30)
        return self.opened[handle]

    def close(self, device: int, address: int) -> None:
        self._check("close")
        [handle] = [handle for handle, where in self.opened.items() if where == address]
        del self.opened[handle]

    def _check(self, call: str) -> None:
        if call in self.broken:
            raise DriverError(f"{call}: broken (999)")


def region(**changes: Any) -> PeerRegion:
    values = {
        "address": 5 * MIB, "length_bytes": MIB, "handle": b"h" * HANDLE_BYTES, "offset": 2 * MIB,
        "device_uuid": b"u" * UUID_BYTES, "process": "another",
    }  # fmt: skip
    return PeerRegion(**{**values, **changes})


def geometry(*bases: int, **changes: Any) -> CacheGeometry:
    values = {
        "block_stride": 4096, "head_stride": 1024, "token_stride": 64, "content_bytes": 64, "num_blocks": 8,
        "num_heads": 4, "block_size": 16, "device": 0,
    }  # fmt: skip
    return CacheGeometry(bases=bases, **{**values, **changes})


def test_regions_of_one_allocation_share_its_handle_and_keep_their_places() -> None:
    driver = BookKeeper({4 * MIB: 32 * MIB, 64 * MIB: 2 * MIB})
    one, two, three = export_regions(
        [Region(5 * MIB, MIB, 3), Region(8 * MIB, 2 * MIB, 3), Region(64 * MIB, 2 * MIB, 3)], driver
    )
    assert (one.address, one.length_bytes, one.offset) == (5 * MIB, MIB, MIB)
    assert (two.address, two.length_bytes, two.offset) == (8 * MIB, 2 * MIB, 4 * MIB)
    assert (three.address, three.length_bytes, three.offset) == (64 * MIB, 2 * MIB, 0)
    assert one.handle == two.handle != three.handle
    assert driver.exports == 2
    assert one.device_uuid == bytes([3]) * UUID_BYTES
    assert one.process == three.process != ""
    assert str(os.getpid()) in one.process
    sent = msgspec.msgpack.encode([one, two, three])
    assert msgspec.msgpack.decode(sent, type=list[PeerRegion]) == [one, two, three]


@pytest.mark.parametrize(
    ("found", "driver", "complaint"),
    [
        (Region(5 * MIB, MIB, None), BookKeeper({}), "host memory"),
        (Region(5 * MIB, MIB, 0), BookKeeper({5 * MIB: MIB - 1}), "several allocations.*expandable segments"),
        (Region(5 * MIB, MIB, 0), BookKeeper({5 * MIB: MIB}, legacy=False), "no IPC handle.*expandable segments"),
        (Region(5 * MIB, MIB, 0), BookKeeper({}), "cannot be exported: cuMemGetAddressRange_v2.*expandable segments"),
        (Region(5 * MIB, MIB, 0), BookKeeper({5 * MIB: MIB}, {"export"}), "cannot be exported: export: broken"),
    ],
)
def test_memory_that_cannot_be_exported_is_a_reason(found: Region, driver: BookKeeper, complaint: str) -> None:
    with pytest.raises(PeerUnavailable, match=complaint) as caught:
        export_regions([found], driver)
    assert caught.value.reason == str(caught.value)


def test_an_allocation_is_mapped_once_and_unmapped_after_its_last_user() -> None:
    driver = BookKeeper({})
    mappings = Mappings(driver)
    first, second = region(), region(address=9 * MIB, offset=6 * MIB)
    here = mappings.acquire(0, first)
    assert mappings.acquire(0, second) - here == 4 * MIB
    assert mappings.acquire(0, first) == here
    assert (driver.num_opens, len(mappings)) == (1, 1)
    mappings.release(0, first)
    mappings.release(0, second)
    assert driver.opened
    mappings.release(0, first)
    assert not driver.opened
    assert len(mappings) == 0
    assert mappings.acquire(0, first) != here


@pytest.mark.parametrize("broken", ["open", "allocation_of"])
def test_what_cannot_be_mapped_leaves_nothing_behind(broken: str) -> None:
    driver = BookKeeper({}, {broken})
    mappings = Mappings(driver)
    with pytest.raises(PeerUnavailable, match="broken"):
        mappings.acquire(0, region())
    assert len(mappings) == 0
    assert not driver.opened


def test_a_region_outside_of_its_allocation_is_refused() -> None:
    driver = BookKeeper({})
    mappings = Mappings(driver)
    for wrong in (region(offset=64 * MIB - MIB + 1), region(length_bytes=63 * MIB)):
        with pytest.raises(PeerUnavailable, match="allocation, which has 67108864"):
            mappings.acquire(0, wrong)
    assert not driver.opened
    held = region()
    mappings.acquire(0, held)
    with pytest.raises(PeerUnavailable):
        mappings.acquire(0, region(length_bytes=63 * MIB))
    assert driver.opened, "a user of the allocation has lost it"
    mappings.release(0, held)
    assert not driver.opened


def test_an_unmapping_that_fails_is_no_error() -> None:
    driver = BookKeeper({}, {"close"})
    mappings = Mappings(driver)
    mappings.acquire(0, region())
    mappings.release(0, region())
    assert len(mappings) == 0


@pytest.mark.parametrize(
    ("field_name", "value"),
    [
        ("handle", b"short"), ("device_uuid", b""), ("process", ""), ("process", "x" * 65), ("address", 0),
        ("length_bytes", 0), ("offset", -1), ("address", 2**63), ("length_bytes", 2**63 - 1),
    ],
)  # fmt: skip
def test_regions_from_the_network_are_checked(field_name: str, value: object) -> None:
    with pytest.raises(ValueError, match="length_bytes|address space" if value == 2**63 - 1 else field_name):
        region(**{field_name: value})
    raw = msgspec.to_builtins(region(), builtin_types=(bytes,)) | {field_name: value}
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(raw), type=PeerRegion)


@pytest.mark.parametrize(
    ("theirs", "complaint"),
    [
        (geometry(MIB, device=None), "host memory"),
        (geometry(MIB, 3 * MIB), "1 layers, the peer's 2"),
        (geometry(MIB, content_bytes=32), "content_bytes is 64 here and 32"),
        (geometry(MIB, num_heads=2), "num_heads is 4 here and 2"),
        (geometry(MIB, block_size=8), "block_size is 16 here and 8"),
        (geometry(MIB, head_stride=64, token_stride=256), "head_stride is 1024 here and 64"),
        (geometry(MIB, num_blocks=99, block_stride=8192), None),
    ],
)
def test_layouts_that_differ_inside_a_block_are_refused(theirs: CacheGeometry, complaint: str | None) -> None:
    reason = incompatible(geometry(MIB), theirs)
    assert reason == complaint if complaint is None else complaint in str(reason)


def test_the_peers_layers_are_found_where_they_are_mapped() -> None:
    one, two = region(address=MIB), region(address=4 * MIB)
    there = geometry(MIB + 4096, 4 * MIB, MIB + 40960)
    found = mapped_bases(there, [one, two], [1000 * MIB, 2000 * MIB])
    assert found == (1000 * MIB + 4096, 2000 * MIB, 1000 * MIB + 40960)
    beyond = 5 * MIB - there.extent_bytes
    assert mapped_bases(geometry(beyond), [two], [MAPPED]) == (MAPPED + MIB - there.extent_bytes,)
    for base in (beyond + 1, 4 * MIB - 1):
        with pytest.raises(PeerUnavailable, match="no memory that holds its layer 0"):
            mapped_bases(geometry(base), [two], [MAPPED])


def test_opening_says_why_not() -> None:
    mine = geometry(MIB)
    with pytest.raises(PeerUnavailable, match="layers"):
        open_peer(mine, [], geometry(MIB, 3 * MIB), [region()])
    with pytest.raises(PeerUnavailable, match="this very process"):
        open_peer(mine, [], geometry(MIB), [region(process=peer._PROCESS)])
    with pytest.raises(PeerUnavailable, match="1025 regions"):
        open_peer(mine, [], geometry(MIB), [region()] * 1025)


def test_without_a_driver_that_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise DriverError("the CUDA driver cannot be loaded: libcuda.so.1 is missing")

    monkeypatch.setattr(peer, "cuda_driver", none)
    monkeypatch.setattr(peer, "_mappings", None)
    with pytest.raises(PeerUnavailable, match="cannot be loaded"):
        open_peer(geometry(MIB), [], geometry(MIB), [region()])
    with pytest.raises(PeerUnavailable, match="cannot be loaded"):
        export_regions([Region(MIB, MIB, 0)])


@pytest.mark.parametrize("broken", [False, True])
def test_what_was_mapped_is_unmapped_if_no_kernel_can_be_made(monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    """Without a GPU none can."""
    driver = BookKeeper({})
    monkeypatch.setattr(peer, "_mappings", Mappings(driver))
    there = region(length_bytes=MIB if not broken else 4096)
    with pytest.raises((PeerUnavailable, ValueError)):
        open_peer(geometry(5 * MIB), [], geometry(5 * MIB), [there])
    assert driver.num_opens == 1
    assert not driver.opened
