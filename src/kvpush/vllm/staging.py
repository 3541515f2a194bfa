"""A worker's staging memory: allocated beside vLLM's cache when the engine starts, and kept."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvpush.transfer.packing.base import PackingError, packed_block_bytes
from kvpush.transfer.packing.buffer import StagingBuffer
from kvpush.transfer.packing.factory import make_packer
from kvpush.transfer.staging import Staging, StagingArea
from kvpush.transport.base import Region
from kvpush.vllm.cache import PagedCache
from kvpush.vllm.config import ConfigError, Options

_log = logging.getLogger(__name__)

GPU_STAGING_BYTES = 512 << 20
CPU_STAGING_BYTES = 64 << 20
_ALIGNMENT = 256


def build_staging(cache: PagedCache, options: Options, *, producer: bool, consumer: bool) -> Staging | None:
    """Allocates what an engine of these roles needs; None if the path is `direct` or, with `auto`, none can be had.

    Raises ConfigError with the path `staged` if there is no memory, or not enough for one block.
    """
    if options.path == "direct":
        return None
    num_bytes = options.staging_bytes
    if num_bytes is None:
        num_bytes = CPU_STAGING_BYTES if cache.device is None else GPU_STAGING_BYTES
    try:
        return _build(cache, num_bytes, options.staging_slots, producer=producer, consumer=consumer)
    except (PackingError, ValueError) as error:
        if options.path == "staged":
            raise ConfigError(f"path 'staged' is not possible: {error}") from error
        _log.warning("kvpush: transfers are not staged: %s", error)
        return None


def regions_of(staging: Staging | None) -> Sequence[Region]:
    """What of it the transport has to know."""
    areas = () if staging is None else (staging.send, staging.receive)
    return [Region(area.address, area.num_bytes, area.device) for area in areas if area is not None]


def _build(cache: PagedCache, num_bytes: int, num_slots: int, *, producer: bool, consumer: bool) -> Staging:
    block_bytes = packed_block_bytes(cache.geometry)
    # Few and large: each part costs the transfer threads some 0.4 ms in Python, whatever its size.
    num_slots = min(num_slots, num_bytes // (-(-block_bytes // _ALIGNMENT) * _ALIGNMENT))
    if num_slots < 2:
        raise ValueError(
            f"staging_bytes is {num_bytes}, a block has {block_bytes} bytes, and there must be room for two"
        )
    slot_bytes = num_bytes // num_slots // _ALIGNMENT * _ALIGNMENT
    # P packs one part while another one is written.
    counts = {"send": 2 if producer else 0, "receive": num_slots if consumer else 0}
    buffers = {name: StagingBuffer(count * slot_bytes, cache.device) for name, count in counts.items() if count}
    areas = {
        name: StagingArea(buffer.address, slot_bytes, counts[name], cache.device) for name, buffer in buffers.items()
    }
    packer = make_packer(cache.geometry, cache.layers, tuple(buffers.values()))
    return Staging(packer, areas.get("send"), areas.get("receive"))
