"""Chooses how the blocks of a cache are packed. The only place that the rest needs; imports torch when called."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvpush.plan.geometry import CacheGeometry
from kvpush.transfer.packing.base import Packer, PackingError

if TYPE_CHECKING:
    import torch

    from kvpush.transfer.packing.buffer import StagingBuffer

_log = logging.getLogger(__name__)

NUM_PROGRAMS = 64
"""Multiprocessors that a copy may take at once: enough to keep memory busy, few enough to leave the engine its own."""


def make_buffer(num_bytes: int, device: int | None) -> StagingBuffer:
    """Memory to pack into and to unpack from, on the device of the cache. Raises PackingError if it cannot be had."""
    from kvpush.transfer.packing.buffer import StagingBuffer

    return StagingBuffer(num_bytes, device)


def make_packer(
    geometry: CacheGeometry,
    layers: Sequence[torch.Tensor],
    buffers: Sequence[StagingBuffer],
    num_programs: int = NUM_PROGRAMS,
) -> Packer:
    """The fastest packer for this cache; on a GPU without one for it, torch's, which is said once in the log.

    layers: the tensors behind `geometry.bases`, in that order. buffers: all memory that packed bytes may lie in.
    num_programs: see NUM_PROGRAMS. Raises ValueError if they do not belong together.
    """
    if geometry.device is None:
        from kvpush.transfer.packing.host_packer import HostPacker

        return HostPacker(geometry, layers, buffers)
    try:
        from kvpush.transfer.packing.copy_kernel import LaunchShape
        from kvpush.transfer.packing.triton_packer import TritonPacker

        return TritonPacker(geometry, layers, buffers, LaunchShape(num_programs))
    except (ImportError, PackingError) as error:
        _log.warning("kvpush: blocks are packed by torch, several times slower than by a kernel: %s", error)
    from kvpush.transfer.packing.streams import low_priority_stream
    from kvpush.transfer.packing.torch_packer import TorchPacker

    return TorchPacker(geometry, layers, buffers, low_priority_stream(geometry.device))
