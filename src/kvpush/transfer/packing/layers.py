"""The layer tensors of a cache, as memory that pages are copied from and to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvpush.plan.geometry import CacheGeometry
from kvpush.transfer.packing.buffer import StagingBuffer
from kvpush.transfer.packing.pages import PageLayout

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def word_bytes(layout: PageLayout, layers: Sequence[torch.Tensor], buffers: Sequence[StagingBuffer]) -> int:
    """The widest element, of 1 to 8 bytes, that all of this memory can be seen as."""
    starts = [layer.untyped_storage().data_ptr() for layer in layers] + [buffer.address for buffer in buffers]
    return math.gcd(8, layout.alignment, *starts)


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
    view = torch.empty(0, dtype=WORDS[word], device=layer.device)
    return view.set_(storage, start // word, sizes, tuple(stride // word for stride in strides))
