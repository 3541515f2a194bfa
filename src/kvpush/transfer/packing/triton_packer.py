"""Packing on CUDA: one launch over all bases, on a stream of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpush.plan.geometry import CacheGeometry
from kvpush.transfer.packing.base import BlockCheck, PackingError
from kvpush.transfer.packing.buffer import StagingBuffer, holder
from kvpush.transfer.packing.pages import VECTOR_BYTES, PageLayout
from kvpush.transfer.packing.streams import low_priority_stream
from kvpush.transfer.packing.torch_packer import check_parts
from kvpush.transfer.sources import Event

NUM_PROGRAMS = 64
"""Enough to keep the memory busy beside a forward, few enough to leave the forward its SMs."""
MAX_LISTS = 32
"""Launches whose block ids may be on their way to the device at a time."""


class TritonPacker:
    """For caches whose pages are multiples of 16 bytes; see `make_packer`. layers, buffers: as for `TorchPacker`."""

    def __init__(
        self,
        geometry: CacheGeometry,
        layers: Sequence[torch.Tensor],
        buffers: Sequence[StagingBuffer],
        num_programs: int = NUM_PROGRAMS,
    ) -> None:
        from kvpush.transfer.packing.kernels import copy_pages

        check_parts(geometry, layers, buffers)
        if geometry.device is None:
            raise ValueError("Triton packs on CUDA devices only")
        layout = PageLayout.of(geometry)
        if layout.alignment % VECTOR_BYTES or layout.content_bytes % VECTOR_BYTES:
            raise ValueError(f"pages are aligned to {layout.alignment} bytes, kernels need {VECTOR_BYTES}")
        self._kernel: Any = copy_pages
        self._device = torch.device("cuda", geometry.device)
        self._check = BlockCheck(geometry.num_blocks)
        self._num_bases = len(geometry.bases)
        self._block_bytes = self._num_bases * layout.page_bytes
        self._buffers = tuple(buffers)
        self._layers = tuple(layers)  # kept alive: the kernel knows addresses only
        self._bases = torch.tensor(geometry.bases, dtype=torch.int64, device=self._device)
        self._num_programs = num_programs
        self.stream = low_priority_stream(geometry.device)
        self._ids = _IdLists(self._device)
        words = layout.page_bytes // 8
        self._constants = {
            "SOURCE_STRIDE": layout.block_stride,
            "TARGET_STRIDE": layout.block_stride,
            "CONTIGUOUS": layout.contiguous,
            "TOKENS": layout.block_size,
            "CONTENT_WORDS": layout.content_bytes // 8,
            "HEAD_STRIDE": layout.head_stride // 8,
            "TOKEN_STRIDE": layout.token_stride // 8,
            "PAGE_WORDS": words,
            "CHUNK": min(4096, 1 << (words - 1).bit_length()),
            "num_warps": 8,
        }
        torch.cuda.synchronize(self._device)

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    def pack(self, blocks: npt.NDArray[np.int64], address: int) -> Event:
        self._check(blocks, "blocks", distinct=False)
        packed = holder(self._buffers, address, len(blocks) * self._block_bytes)
        start = address - packed.address
        return self._launch(blocks, packed.bytes[start:], paged_source=True)

    def unpack(self, address: int, blocks: npt.NDArray[np.int64]) -> Event:
        self._check(blocks, "blocks", distinct=True)
        packed = holder(self._buffers, address, len(blocks) * self._block_bytes)
        start = address - packed.address
        return self._launch(blocks, packed.bytes[start:], paged_source=False)

    def _launch(self, blocks: npt.NDArray[np.int64], packed: torch.Tensor, *, paged_source: bool) -> Event:
        try:
            with torch.cuda.stream(self.stream):
                ids, slot = self._ids.send(blocks)
                words = (
                    packed.view(torch.int64)
                    if packed.numel() % 8 == 0
                    else packed[: packed.numel() // 8 * 8].view(torch.int64)
                )
                source, target = (self._bases, words) if paged_source else (words, self._bases)
                self._kernel[(self._num_programs,)](
                    source, ids, target, ids, len(blocks), self._num_bases,
                    SOURCE_PAGED=paged_source, TARGET_PAGED=not paged_source, NUM_PROGRAMS=self._num_programs,
                    **self._constants,
                )  # fmt: skip
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(self.stream)
                self._ids.used(slot, event)
        except RuntimeError as error:
            raise PackingError(f"the copy of {len(blocks)} blocks could not be launched: {error}") from error
        return event


class _IdLists:
    """Block ids on their way to the device: pinned memory that is not written again before its launch is over."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = [torch.empty(0, dtype=torch.int32)] * MAX_LISTS
        self._there = [torch.empty(0, dtype=torch.int32)] * MAX_LISTS
        self._events: list[torch.cuda.Event | None] = [None] * MAX_LISTS
        self._device = device
        self._next = 0

    def send(self, blocks: npt.NDArray[np.int64]) -> tuple[torch.Tensor, int]:
        slot = self._next
        self._next = (slot + 1) % MAX_LISTS
        event = self._events[slot]
        if event is not None:
            event.synchronize()  # over long since, unless launches pile up
        count = len(blocks)
        if self._pinned[slot].numel() < count:
            size = max(1024, 1 << (count - 1).bit_length())
            self._pinned[slot] = torch.empty(size, dtype=torch.int32, pin_memory=True)
            self._there[slot] = torch.empty(size, dtype=torch.int32, device=self._device)
        self._pinned[slot].numpy()[:count] = blocks
        there = self._there[slot]
        there[:count].copy_(self._pinned[slot][:count], non_blocking=True)
        return there, slot

    def used(self, slot: int, event: torch.cuda.Event) -> None:
        self._events[slot] = event
