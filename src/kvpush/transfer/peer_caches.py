"""P: the caches of consumers on the same host that are mapped here, so that one kernel can store a piece."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from kvpush.plan.runs import Ints
from kvpush.protocol.ids import AgentName
from kvpush.transfer.dialer import Answer
from kvpush.transfer.packing.base import PackingError, PeerCache, PeerUnavailable
from kvpush.transfer.sources import Event

_log = logging.getLogger(__name__)

OpenPeer = Callable[[Answer], PeerCache]
"""Maps a consumer's cache; takes tens of milliseconds. Raises PeerUnavailable with the reason if it cannot be had."""


class PeerCaches:
    """Owned by the transfer thread. background: map on a thread of its own (False where time is virtual).

    A launched kernel ends by itself, whatever becomes of either process, so its event says truly that nothing is
    written any more. A mapping outlives the consumer that it leads to; it is given up when the connection is, and
    nothing is under way.
    """

    def __init__(self, open_peer: OpenPeer, *, background: bool = True) -> None:
        self._open_peer = open_peer
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvpush-peer") if background else None
        self._opening: dict[AgentName, Future[PeerCache]] = {}
        self._caches: dict[AgentName, PeerCache | None] = {}  # None: cannot be had
        self._leaving: list[tuple[AgentName, PeerCache]] = []

    def meet(self, agent: AgentName, answer: Answer) -> None:
        """A consumer is connected: begins to map its cache, if it has said where that is."""
        if agent in self._caches or agent in self._opening:
            return
        if not answer.peer:
            self._caches[agent] = None
        elif self._pool is not None:
            self._opening[agent] = self._pool.submit(self._open_peer, answer)
        else:
            opened: Future[PeerCache] = Future()
            try:
                opened.set_result(self._open_peer(answer))
            except Exception as error:
                opened.set_exception(error)
            self._opening[agent] = opened

    def ready(self, agent: AgentName) -> bool:
        """Its cache is mapped."""
        opening = self._opening.get(agent)
        if opening is not None and opening.done():
            del self._opening[agent]
            self._caches[agent] = self._opened(agent, opening)
        return self._caches.get(agent) is not None

    def copy(self, agent: AgentName, blocks: Ints, targets: Ints) -> Event:
        """Stores blocks[i] into targets[i] of a consumer's cache. Raises PackingError or ValueError if it does not."""
        cache = self._caches.get(agent)
        if cache is None:
            raise PackingError("the consumer's cache is not mapped")
        return cache.copy(blocks, targets)

    def drop(self, agent: AgentName) -> None:
        """The connection is gone: the mapping goes as soon as nothing is under way over it."""
        opening = self._opening.pop(agent, None)
        cache = self._caches.pop(agent, None)
        if opening is not None:
            opening.add_done_callback(lambda opened: self._forget(agent, opened))
        if cache is not None:
            self._leaving.append((agent, cache))

    def sweep(self, busy: Callable[[AgentName], bool]) -> None:
        """Unmaps what was dropped. busy: whether kernels still store into it."""
        if not self._leaving:
            return
        leaving, self._leaving = self._leaving, []
        for agent, cache in leaving:
            if busy(agent):
                self._leaving.append((agent, cache))
            elif self._pool is not None:
                self._pool.submit(cache.close)
            else:
                cache.close()

    def close(self) -> None:
        """Unmaps everything; waits for what is under way."""
        for cache in [*self._caches.values(), *(cache for _, cache in self._leaving)]:
            if cache is not None:
                cache.close()
        self._leaving.clear()
        self._caches.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _opened(self, agent: AgentName, opening: Future[PeerCache]) -> PeerCache | None:
        try:
            cache = opening.result()
        except PeerUnavailable as error:
            _log.info("kvpush: no kernel stores into the cache of %s: %s", agent, error.reason)
            return None
        except Exception:
            # Whatever goes wrong on the way to a faster path leaves the others.
            _log.exception("kvpush: the cache of %s cannot be mapped", agent)
            return None
        _log.info("kvpush: the cache of %s is mapped: kernels store into it", agent)
        return cache

    def _forget(self, agent: AgentName, opened: Future[PeerCache]) -> None:
        cache = None if opened.cancelled() else self._opened(agent, opened)
        if cache is not None:
            cache.close()
