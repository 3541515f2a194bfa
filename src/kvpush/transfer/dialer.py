"""Handshakes on a small pool of threads: one slow peer never delays another, nor the transfer thread."""

from __future__ import annotations

import logging
import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvpush.plan.geometry import CacheGeometry
from kvpush.protocol.ids import PeerAddress
from kvpush.transfer.addresses import AddressRefused, AllowList
from kvpush.transfer.packing.peer import PeerRegion
from kvpush.transfer.sidechannel import EngineInfo, HandshakeError, ProcessIdentity, check_compatible, query_peer
from kvpush.transfer.sight import Sight
from kvpush.transfer.staging.area import StagingArea

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """A peer rank that may be connected to."""

    engine_id: str
    agent: str
    metadata: bytes
    geometry: CacheGeometry
    process: ProcessIdentity
    staging: StagingArea | None = None
    peer: tuple[PeerRegion, ...] = ()


@dataclass(frozen=True, slots=True)
class Dialed:
    """How a handshake ended: an answer, or why there is none."""

    address: PeerAddress
    answer: Answer | None
    error: str = ""


class Dialer(Protocol):
    """Starts handshakes and hands out how they ended; the simulator has one of its own."""

    def dial(self, address: PeerAddress) -> None:
        """Starts a handshake with whoever answers there."""
        ...

    def take(self) -> list[Dialed]:
        """The handshakes that have ended since the last call. Never blocks."""
        ...

    def close(self) -> None: ...


class SideChannelDialer:
    """Asks real side channels. The allow list is checked here, on the pool, because names may have to be resolved.

    sight: shown the process of every rank that has answered.
    """

    def __init__(
        self,
        mine: EngineInfo,
        allowed: AllowList,
        secret: bytes | None,
        timeout_s: float,
        *,
        sight: Sight | None = None,
        num_threads: int = 16,
    ) -> None:
        self._sight = sight
        self._mine = mine
        self._allowed = allowed
        self._secret = secret
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="kvpush-dial")
        self._ended: queue.SimpleQueue[Dialed] = queue.SimpleQueue()

    def dial(self, address: PeerAddress) -> None:
        self._pool.submit(self._work, address)

    def take(self) -> list[Dialed]:
        ended = []
        while not self._ended.empty():
            ended.append(self._ended.get_nowait())
        return ended

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _work(self, address: PeerAddress) -> None:
        try:
            ended = Dialed(address, self._ask(address))
        except HandshakeError as error:
            ended = Dialed(address, None, f"handshake {error.code}: {error.message}")
        except msgspec.MsgspecError as error:
            ended = Dialed(address, None, f"handshake malformed: the geometry of {address}: {error}")
        except (AddressRefused, ValueError) as error:
            ended = Dialed(address, None, f"handshake refused: {error}")
        except Exception as error:
            # Whatever happens on the pool must come back as an answer, or the transfers that wait for it hang.
            _log.exception("kvpush: handshake with %s", address)
            ended = Dialed(address, None, f"handshake failed: {error!r}")
        self._ended.put(ended)

    def _ask(self, address: PeerAddress) -> Answer:
        # What was checked is what is connected to: asking the resolver again could give another answer.
        host = self._allowed.check(address.host, address.port)
        found = query_peer(host, address.port, address.pp_rank, address.tp_rank, None, self._secret, self._timeout_s)
        differences = check_compatible(self._mine, found.engine.of(found.rank))
        for name in ("tp_size", "pp_size"):
            here, there = getattr(self._mine, name), getattr(found.engine, name)
            if here != there:
                differences.append(f"{name}: {here} here, {there} there (this version needs equal sizes)")
        if differences:
            raise ValueError(f"{address} does not fit: {'; '.join(dict.fromkeys(differences))}")
        geometry = msgspec.msgpack.decode(found.rank.geometry, type=CacheGeometry)
        staging = msgspec.msgpack.decode(found.rank.staging, type=StagingArea) if found.rank.staging else None
        if self._sight is not None:
            self._sight.see(found.rank.process)
        peer = msgspec.msgpack.decode(found.rank.peer, type=tuple[PeerRegion, ...]) if found.rank.peer else ()
        return Answer(
            found.engine.engine_id, found.rank.agent, found.rank.metadata, geometry, found.rank.process, staging, peer
        )
