"""Chooses how the blocks of a cache are packed. The only place that the rest needs; imports torch when called."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvpush.plan.geometry import CacheGeometry
from kvpush.transfer.packing.base import Packer

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    import torch

    from kvpush.transfer.packing.buffer import StagingBuffer


def make_buffer(num_bytes: int, device: int | None) -> StagingBuffer:
    """Memory to pack into and to unpack from, on the device of the cache. Raises PackingError if it cannot be had."""
    from kvpush.transfer.packing.buffer import StagingBuffer

    return StagingBuffer(num_bytes, device)


def make_packer(geometry: CacheGeometry, layers: Sequence[torch.Tensor], buffers: Sequence[StagingBuffer]) -> Packer:
    """The fastest packer for this cache.

    layers: the tensors behind `geometry.bases`, in that order. buffers: all memory that packed bytes may lie in.
    Raises ValueError if they do not belong together.
    """
    from kvpush.transfer.packing.torch_packer import TorchPacker

    if geometry.device is None:
        return TorchPacker(geometry, layers, buffers)
    try:
        from kvpush.transfer.packing.triton_packer import TritonPacker

        return TritonPacker(geometry, layers, buffers)
    except (ImportError, ValueError) as error:
        from kvpush.transfer.packing.streams import low_priority_stream

        _log.info("kvpush: blocks are packed by torch: %s", error)
        return TorchPacker(geometry, layers, buffers, low_priority_stream(geometry.device))
