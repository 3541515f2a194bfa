"""Packing with torch alone: any device, any layout. What GPUs fall back to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import numpy.typing as npt
import torch

from kvpush.plan.geometry import CacheGeometry
from kvpush.transfer.packing.base import BlockCheck
from kvpush.transfer.packing.buffer import StagingBuffer, holder
from kvpush.transfer.packing.layers import WORDS, check_parts, page_view, word_bytes
from kvpush.transfer.packing.pages import PageLayout
from kvpush.transfer.sources import PASSED, Event


class TorchPacker:
    """One `index_select` or `index_copy_` per base.

    layers: the tensors behind `geometry.bases`, in that order; any dtype, only their memory is used. buffers: where
    packed bytes may lie. stream: where copies are launched (CUDA); without it, the current one.

    Raises ValueError if geometry, layers and buffers do not belong together.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        layers: Sequence[torch.Tensor],
        buffers: Sequence[StagingBuffer],
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        check_parts(geometry, layers, buffers)
        self._layout = PageLayout.of(geometry)
        self._check = BlockCheck(geometry.num_blocks)
        self._block_bytes = len(geometry.bases) * self._layout.page_bytes
        self._buffers = tuple(buffers)
        self._device = geometry.device
        self._stream = stream
        # Wide elements make a copy on the GPU several times faster; an odd address needs single bytes.
        self._word = word_bytes(self._layout, layers, buffers)
        self._pages = {
            word: [page_view(geometry, self._layout, layer, word) for layer in layers] for word in {self._word, 1}
        }

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    def pack(self, blocks: npt.NDArray[np.int64], address: int) -> Event:
        self._check(blocks, "blocks", distinct=False)
        pages, packed = self._sides(address, len(blocks))
        with self._launching():
            index = self._index(blocks)
            for base, source in enumerate(pages):
                torch.index_select(source, 0, index, out=packed[base])
            return self._event()

    def unpack(self, address: int, blocks: npt.NDArray[np.int64]) -> Event:
        self._check(blocks, "blocks", distinct=True)
        pages, packed = self._sides(address, len(blocks))
        with self._launching():
            index = self._index(blocks)
            for base, target in enumerate(pages):
                target.index_copy_(0, index, packed[base])
            return self._event()

    def _sides(self, address: int, count: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The pages of each base, and the packed bytes as [base, block, ...] of the same element."""
        length = count * self._block_bytes
        packed = holder(self._buffers, address, length).view(address, length)
        word = self._word if address % self._word == 0 else 1
        pages = self._pages[word]
        return pages, packed.view(WORDS[word]).view(len(pages), count, *pages[0].shape[1:])

    def _index(self, blocks: npt.NDArray[np.int64]) -> torch.Tensor:
        index = torch.from_numpy(blocks.copy())  # a copy: torch takes no read-only array
        return index if self._device is None else index.to(f"cuda:{self._device}", non_blocking=True)

    def _launching(self) -> torch.cuda.StreamContext | nullcontext[None]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _event(self) -> Event:
        if self._device is None:
            return PASSED
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream or torch.cuda.current_stream(self._device))
        return event
