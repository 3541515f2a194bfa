"""Block ids on their way to a GPU: from memory that the copy may read while the host goes on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvpush.transfer.sources import Event

_SLOTS = 8
"""Launches that may be under way before more memory is taken."""


class IdSlot:
    """Room for `num_lists` lists of up to `capacity` ids, at the host (pinned) and on the device.

    event: of the launch that reads them; the slot is free again when it has passed.
    """

    def __init__(self, num_lists: int, capacity: int, device: torch.device) -> None:
        self._host = torch.empty(num_lists, capacity, dtype=torch.int32, pin_memory=True)
        self._array = self._host.numpy()
        self.device = torch.empty(num_lists, capacity, dtype=torch.int32, device=device)
        self.event: Event | None = None

    def send(self, lists: Sequence[npt.NDArray[np.int64]]) -> list[torch.Tensor]:
        """Launches the copy of the ids on the current stream; returns them as they will stand on the device."""
        for i, ids in enumerate(lists):
            self._array[i, : len(ids)] = ids
            if len(ids):
                self.device[i, : len(ids)].copy_(self._host[i, : len(ids)], non_blocking=True)
        return [self.device[i] for i in range(len(lists))]


class IdSlots:
    """A ring of slots. Pinned memory is taken at the start, because taking it may stop the device."""

    def __init__(self, num_lists: int, capacity: int, device: torch.device) -> None:
        self._shape = (num_lists, max(1, -(-capacity // 4)) * 4, device)  # each list at a multiple of 16 bytes
        self._slots = [IdSlot(*self._shape) for _ in range(_SLOTS)]
        self._next = 0
        self._dropped: list[IdSlot] = []

    def take(self) -> IdSlot:
        """A slot that no launch reads. The caller sets its event, or drops it if the launch has failed."""
        slot = self._slots[self._next]
        if slot.event is not None and not slot.event.query():
            slot = IdSlot(*self._shape)  # the oldest is still read, so all are
            self._slots.insert(self._next, slot)
        self._next = (self._next + 1) % len(self._slots)
        slot.event = None
        return slot

    def drop(self, slot: IdSlot) -> None:
        """What was launched with it is unknown: it is never written again, nor is its memory given to anybody."""
        self._dropped.append(slot)
        self._slots[self._slots.index(slot)] = IdSlot(*self._shape)
