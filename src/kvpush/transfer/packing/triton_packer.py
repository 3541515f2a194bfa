"""Packing on a GPU: one kernel over all bases, a few multiprocessors, a stream of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvpush.plan.geometry import CacheGeometry
from kvpush.transfer.packing.base import BlockCheck, PackingError
from kvpush.transfer.packing.buffer import StagingBuffer, holder
from kvpush.transfer.packing.copy_kernel import PACKED, CopyStream, LaunchShape, PageCopy, Side
from kvpush.transfer.packing.layers import check_parts
from kvpush.transfer.packing.pages import VECTOR_BYTES, PageLayout
from kvpush.transfer.sources import Event


class TritonPacker:
    """Any layout whose contents, strides and addresses are multiples of 16 bytes.

    Arguments as those of TorchPacker. Packed addresses must be multiples of 16 as well (ValueError). Raises
    PackingError if the kernel cannot be had for this cache or on this machine.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        layers: Sequence[torch.Tensor],
        buffers: Sequence[StagingBuffer],
        shape: LaunchShape | None = None,
        stream: CopyStream | None = None,
    ) -> None:
        check_parts(geometry, layers, buffers)
        if geometry.device is None:
            raise PackingError("the cache is in host memory")
        layout = PageLayout.of(geometry)
        self._layers = list(layers)  # the kernel knows their addresses only
        self._buffers = tuple(buffers)
        self._check = BlockCheck(geometry.num_blocks)
        self._block_bytes = len(geometry.bases) * layout.page_bytes
        self._stream = stream or CopyStream(geometry.device)
        table = torch.tensor(geometry.bases, dtype=torch.int64, device=self._stream.device)
        paged = Side(table, layout.block_stride)
        most = max((buffer.num_bytes // self._block_bytes for buffer in buffers), default=0)
        shape = shape or LaunchShape()
        count = len(geometry.bases)
        self._pack = PageCopy(self._stream, paged, PACKED, layout, count, most, shape)
        self._unpack = PageCopy(self._stream, PACKED, paged, layout, count, most, shape)

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    def pack(self, blocks: npt.NDArray[np.int64], address: int) -> Event:
        self._check(blocks, "blocks", distinct=False)
        return self._pack([blocks], self._packed(address, len(blocks)))

    def unpack(self, address: int, blocks: npt.NDArray[np.int64]) -> Event:
        self._check(blocks, "blocks", distinct=True)
        return self._unpack([blocks], self._packed(address, len(blocks)))

    def _packed(self, address: int, count: int) -> torch.Tensor:
        """The packed side as int64 words, from `address` on."""
        buffer = holder(self._buffers, address, count * self._block_bytes)
        if address % VECTOR_BYTES:
            raise ValueError(f"address {address:#x} is no multiple of {VECTOR_BYTES}")
        return buffer.words[(address - buffer.address) // 8 :]
