"""One kernel that reads this rank's cache and stores into a peer's, over NVLink or on the same GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvpush.plan.geometry import CacheGeometry
from kvpush.transfer.packing.base import BlockCheck, PackingError
from kvpush.transfer.packing.copy_kernel import CopyStream, LaunchShape, PageCopy, Side, unsuitable
from kvpush.transfer.packing.layers import check_parts
from kvpush.transfer.packing.pages import PageLayout
from kvpush.transfer.sources import Event

_log = logging.getLogger(__name__)


class MappedPeer:
    """A PeerCache. peer_bases: the peer's bases as they are mapped here. unmap: called once, when nothing runs.

    Raises PackingError if there is no kernel for these caches or on this machine; `unmap` stays with the caller then.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        layers: Sequence[torch.Tensor],
        peer_geometry: CacheGeometry,
        peer_bases: tuple[int, ...],
        num_programs: int | None,
        unmap: Callable[[], None],
    ) -> None:
        check_parts(geometry, layers, [])
        assert geometry.device is not None
        layout = PageLayout.of(geometry)
        try:
            there = PageLayout.of(msgspec.structs.replace(peer_geometry, bases=peer_bases))
        except ValueError as error:
            raise PackingError(f"at the peer: {error}") from None
        reason = unsuitable(there)
        if reason is not None:
            raise PackingError(f"at the peer: {reason}")
        self._layers = list(layers)  # the kernel knows their addresses only
        self._check = BlockCheck(geometry.num_blocks)
        self._check_peer = BlockCheck(peer_geometry.num_blocks)
        self._stream = CopyStream(geometry.device)
        tables = [
            Side(torch.tensor(bases, dtype=torch.int64, device=self._stream.device), stride)
            for bases, stride in ((geometry.bases, layout.block_stride), (peer_bases, there.block_stride))
        ]
        shape = LaunchShape() if num_programs is None else LaunchShape(num_programs)
        self._most = min(geometry.num_blocks, peer_geometry.num_blocks)
        self._copy: PageCopy | None = PageCopy(
            self._stream, tables[0], tables[1], layout, len(geometry.bases), self._most, shape
        )
        self._unmap = unmap

    def copy(self, blocks: npt.NDArray[np.int64], peer_blocks: npt.NDArray[np.int64]) -> Event:
        if self._copy is None:
            raise PackingError("the peer's cache is not mapped any more")
        self._check(blocks, "blocks", distinct=False)
        self._check_peer(peer_blocks, "peer_blocks", distinct=True)
        if len(blocks) != len(peer_blocks):
            raise ValueError(f"{len(blocks)} blocks cannot go to {len(peer_blocks)}")
        if len(blocks) > self._most:
            raise ValueError(f"{len(blocks)} blocks are more than the smaller cache has")
        return self._copy([blocks, peer_blocks])

    def close(self) -> None:
        if self._copy is None:
            return
        self._copy = None
        try:
            self._stream.wait()
        except RuntimeError as error:  # the device has failed: nothing runs on it any more
            _log.error("kvpush: the copies into a peer's cache have not ended well: %s", error)
        self._unmap()
