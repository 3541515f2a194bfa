"""Where D's staging slots lie, as P has to know it."""

from __future__ import annotations

import msgspec

from kvpush.plan.geometry import MAX_ADDRESS
from kvpush.protocol.messages import MAX_SLOTS


class StagingArea(msgspec.Struct, frozen=True):
    """Equal slots, one behind the other, in memory registered with the transport. Travels in the handshake.

    address: of slot 0; slot_bytes: size of each; device: CUDA ordinal at D, or None for host memory.
    Raises ValueError naming the field that is out of range.
    """

    address: int
    slot_bytes: int
    num_slots: int
    device: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_slots <= MAX_SLOTS:
            raise ValueError(f"num_slots is {self.num_slots}, must be 1 to {MAX_SLOTS}")
        if self.slot_bytes < 1 or self.address < 1 or self.address + self.num_bytes > MAX_ADDRESS:
            raise ValueError(f"{self.num_slots} slots of {self.slot_bytes} bytes at {self.address} are no memory")
        if self.device is not None and not 0 <= self.device < 1024:
            raise ValueError(f"device is {self.device}, must be 0 to 1023")

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.slot_bytes

    def slot(self, index: int) -> int:
        """The byte address of a slot. Raises ValueError if there is no such slot."""
        if not 0 <= index < self.num_slots:
            raise ValueError(f"slot {index} of {self.num_slots}")
        return self.address + index * self.slot_bytes
