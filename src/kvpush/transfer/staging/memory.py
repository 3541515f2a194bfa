"""A rank's own staging memory: what it packs into, and what peers may write into."""

from __future__ import annotations

from dataclasses import dataclass

from kvpush.transfer.packing.base import Packer
from kvpush.transfer.staging.area import StagingArea

SEND_SLOTS = 4
"""Slots that P packs into: one is packed while others are written; more would only wait."""


@dataclass(frozen=True, slots=True)
class Staging:
    """packer: copies between the cache and this memory. send: what this rank packs into, as a producer; receive: what
    peers write into, as a consumer; None for a half that the engine does not have."""

    packer: Packer
    send: StagingArea | None
    receive: StagingArea | None

    def __post_init__(self) -> None:
        for area in (self.send, self.receive):
            if area is not None and area.slot_bytes < self.packer.block_bytes:
                needed = self.packer.block_bytes
                raise ValueError(f"a staging slot of {area.slot_bytes} bytes cannot hold a block of {needed} bytes")
