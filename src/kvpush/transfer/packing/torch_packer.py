"""Packing with torch alone: any device, any layout. On the CPU as fast as memory; on a GPU the fallback."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import numpy.typing as npt
import torch

from kvpush.plan.geometry import CacheGeometry
from kvpush.transfer.packing.base import BlockCheck
from kvpush.transfer.packing.buffer import StagingBuffer, holder
from kvpush.transfer.packing.pages import PageLayout
from kvpush.transfer.sources import PASSED, Event

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class TorchPacker:
    """One `index_select` or indexed store per base.

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
        starts = [layer.untyped_storage().data_ptr() for layer in layers] + [buffer.address for buffer in buffers]
        self._word = math.gcd(8, self._layout.alignment, *starts)
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
                if self._device is None:
                    store(target, blocks, packed[base])
                else:
                    target.index_copy_(0, index, packed[base])
            return self._event()

    def _sides(self, address: int, count: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The pages of each base, and the packed bytes as [base, block, ...] of the same element."""
        length = count * self._block_bytes
        packed = holder(self._buffers, address, length).view(address, length)
        word = self._word if address % self._word == 0 else 1
        pages = self._pages[word]
        return pages, packed.view(_WORDS[word]).view(len(pages), count, *pages[0].shape[1:])

    def _index(self, blocks: npt.NDArray[np.int64]) -> torch.Tensor:
        index = torch.from_numpy(blocks.copy())  # a copy: torch takes no read-only array
        return index if self._device is None else index.to(f"cuda:{self._device}", non_blocking=True)

    def _launching(self) -> torch.cuda.StreamContext | nullcontext[None]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _event(self) -> Event:
        if self._device is None:
            return PASSED
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event


def check_parts(geometry: CacheGeometry, layers: Sequence[torch.Tensor], buffers: Sequence[StagingBuffer]) -> None:
    """Raises ValueError unless the layers are those of the geometry and all memory is on its device."""
    if tuple(layer.data_ptr() for layer in layers) != geometry.bases:
        raise ValueError(f"the {len(layers)} layers are not the {len(geometry.bases)} bases of the geometry")
    for layer in layers:
        device = layer.device.index if layer.is_cuda else None
        if device != geometry.device:
            raise ValueError(f"a layer is on {layer.device}, the geometry says {geometry.device}")
    for buffer in buffers:
        if buffer.device != geometry.device:
            raise ValueError(f"a staging buffer is on device {buffer.device}, the cache on {geometry.device}")


def page_view(geometry: CacheGeometry, layout: PageLayout, layer: torch.Tensor, word: int) -> torch.Tensor:
    """A layer's memory as [blocks, page] of elements of `word` bytes, or [blocks, head, token, content] if strided.

    Made from the storage: it may be written where the layer itself must not (tensors made for inference), and no dtype
    stands in the way.
    """
    storage = layer.untyped_storage()
    start = layer.data_ptr() - storage.data_ptr()
    if start + geometry.extent_bytes > storage.nbytes():
        raise ValueError(f"a layer of {storage.nbytes()} bytes is smaller than the geometry says")
    strides: tuple[int, ...] = (layout.block_stride, layout.head_stride, layout.token_stride, word)
    sizes: tuple[int, ...] = (geometry.num_blocks, layout.num_heads, layout.block_size, layout.content_bytes // word)
    if layout.contiguous:
        sizes, strides = (geometry.num_blocks, layout.page_bytes // word), (layout.block_stride, word)
    view = torch.empty(0, dtype=_WORDS[word], device=layer.device)
    return view.set_(storage, start // word, sizes, tuple(stride // word for stride in strides))


def store(target: torch.Tensor, blocks: npt.NDArray[np.int64], packed: torch.Tensor) -> None:
    """target[blocks] = packed, on the CPU."""
    # numpy copies page by page and without the interpreter lock; torch's indexed stores go element by element, at half
    # the speed.
    target.numpy()[blocks] = packed.numpy()
