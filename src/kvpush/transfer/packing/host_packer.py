"""Packing in host memory: plain copies of pages by the calling thread, without the interpreter lock.

torch would spread each copy over the threads that the engine computes with. While these are busy, it then waits for a
turn of each of them at every layer, and a copy of 5 ms takes 100.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpush.plan.geometry import CacheGeometry
from kvpush.transfer.packing.base import BlockCheck
from kvpush.transfer.packing.buffer import StagingBuffer, holder
from kvpush.transfer.packing.layers import check_parts, page_view, word_bytes
from kvpush.transfer.packing.pages import PageLayout
from kvpush.transfer.sources import PASSED, Event

_GROUP_BYTES = 256 * 1024
"""Pages with gaps between them are gathered in groups that stay in a core's cache on the way."""

_WORDS = {8: np.int64, 4: np.int32, 2: np.int16, 1: np.uint8}


class HostPacker:
    """Any layout. A copy is done when the call returns.

    layers: the tensors behind `geometry.bases`, in that order; any dtype, only their memory is used. buffers: where
    packed bytes may lie. Raises ValueError if geometry, layers and buffers do not belong together.
    """

    def __init__(
        self, geometry: CacheGeometry, layers: Sequence[torch.Tensor], buffers: Sequence[StagingBuffer]
    ) -> None:
        if geometry.device is not None:
            raise ValueError("the cache is not in host memory")
        check_parts(geometry, layers, buffers)
        layout = PageLayout.of(geometry)
        self._check = BlockCheck(geometry.num_blocks)
        self._page_bytes = layout.page_bytes
        self._block_bytes = len(geometry.bases) * layout.page_bytes
        self._buffers = tuple(buffers)
        self._word = word_bytes(layout, layers, buffers)
        self._pages: dict[int, list[npt.NDArray[Any]]] = {
            word: [page_view(geometry, layout, layer, word).numpy() for layer in layers] for word in {self._word, 1}
        }

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    def pack(self, blocks: npt.NDArray[np.int64], address: int) -> Event:
        self._check(blocks, "blocks", distinct=False)
        pages, packed = self._sides(address, len(blocks))
        group = max(1, _GROUP_BYTES // self._page_bytes)
        for source, target in zip(pages, packed, strict=True):
            if source.flags.c_contiguous:
                np.take(source, blocks, axis=0, out=target, mode="clip")  # the ids are checked; "raise" would buffer
                continue
            for i in range(0, len(blocks), group):
                target[i : i + group] = source[blocks[i : i + group]]
        return PASSED

    def unpack(self, address: int, blocks: npt.NDArray[np.int64]) -> Event:
        self._check(blocks, "blocks", distinct=True)
        pages, packed = self._sides(address, len(blocks))
        for target, source in zip(pages, packed, strict=True):
            target[blocks] = source
        return PASSED

    def _sides(self, address: int, count: int) -> tuple[list[npt.NDArray[Any]], npt.NDArray[Any]]:
        """The pages of each base, and the packed bytes as [base, block, ...] of the same element."""
        length = count * self._block_bytes
        packed = holder(self._buffers, address, length).view(address, length).numpy()
        word = self._word if address % self._word == 0 else 1  # an odd address needs single bytes
        pages = self._pages[word]
        return pages, packed.view(_WORDS[word]).reshape(len(pages), count, *pages[0].shape[1:])
