"""Asks for proof that silent writers are gone, away from the transfer thread."""

from __future__ import annotations

import logging
import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from kvpush.protocol.ids import AgentName, PeerAddress
from kvpush.transfer.addresses import AddressRefused, AllowList
from kvpush.transfer.proof import WriterProof
from kvpush.transfer.sidechannel import ProcessIdentity

_log = logging.getLogger(__name__)


class Prover(Protocol):
    """Starts questions and hands out the incarnations that are proven gone; the simulator has one of its own."""

    def ask(self, agent: AgentName, process: ProcessIdentity, address: PeerAddress) -> None:
        """Asks about an incarnation; a question about it that is still open is enough."""
        ...

    def take(self) -> list[AgentName]:
        """Incarnations proven gone since the last call. Never blocks."""
        ...

    def close(self) -> None: ...


class ProcessProver:
    """Asks this machine's process table, or the side channel of the writer's machine."""

    def __init__(self, proof: WriterProof, allowed: AllowList) -> None:
        self._proof = proof
        self._allowed = allowed
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvpush-proof")
        self._asked: set[AgentName] = set()
        self._ended: queue.SimpleQueue[tuple[AgentName, bool]] = queue.SimpleQueue()

    def ask(self, agent: AgentName, process: ProcessIdentity, address: PeerAddress) -> None:
        if agent not in self._asked:
            self._asked.add(agent)
            self._pool.submit(self._work, agent, process, address)

    def take(self) -> list[AgentName]:
        gone = []
        while not self._ended.empty():
            agent, proven = self._ended.get_nowait()
            self._asked.discard(agent)
            if proven:
                gone.append(agent)
        return gone

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _work(self, agent: AgentName, process: ProcessIdentity, address: PeerAddress) -> None:
        proven = False
        try:
            proven = self._proof.gone(process, None)  # of this machine's processes nobody else must be asked
            if not proven:
                host = self._allowed.check(address.host, address.port)
                proven = self._proof.gone(process, (host, address.port))
        except AddressRefused as error:
            _log.warning("kvpush: cannot ask about %s: %s", agent, error)
        except Exception:
            # No answer is no proof; the question is asked again.
            _log.exception("kvpush: asking about %s", agent)
        self._ended.put((agent, proven))
