"""A worker's cache for kernels of other processes on this host, and theirs for its own."""

from __future__ import annotations

import logging

import msgspec

from kvpush.transfer.dialer import Answer
from kvpush.transfer.packing.base import PeerCache, PeerUnavailable
from kvpush.transfer.packing.peer import export_regions, open_peer
from kvpush.transfer.peer_caches import OpenPeer
from kvpush.transfer.sidechannel import ProcessIdentity
from kvpush.transport.base import Region
from kvpush.vllm.cache import PagedCache
from kvpush.vllm.config import Options

_log = logging.getLogger(__name__)
_PATHS = ("auto", "peer")


def exported(cache: PagedCache, options: Options, *, consumer: bool) -> bytes:
    """How this cache can be mapped, for the handshake; empty if it cannot, or if nobody shall."""
    if not consumer or options.path not in _PATHS or cache.device is None:
        return b""
    try:
        regions = export_regions([Region(address, length, cache.device) for address, length in cache.regions])
    except PeerUnavailable as error:
        level = logging.WARNING if options.path == "peer" else logging.INFO
        _log.log(level, "kvpush: this cache cannot be mapped by others: %s", error.reason)
        return b""
    return msgspec.msgpack.encode(regions)


def opener(cache: PagedCache, options: Options, mine: ProcessIdentity, *, producer: bool) -> OpenPeer | None:
    """Maps the caches of consumers; None where no kernel shall store into them."""
    if not producer or options.path not in _PATHS or cache.device is None:
        return None

    def map_cache(answer: Answer) -> PeerCache:
        if answer.process.host_id != mine.host_id:
            raise PeerUnavailable("it is on another host")
        cache.select_device()
        return open_peer(cache.geometry, cache.layers, answer.geometry, answer.peer)

    return map_cache
