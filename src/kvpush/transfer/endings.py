"""Dead writers whose connection has not ended yet.

That a process is gone does not prove that its bytes are: what it had handed to its kernel goes on travelling without
it. Seen over TCP: 4 MB landed seconds after the writer was killed, when a cut link was mended. What ends a connection
comes behind everything that was sent over it; so memory is free when the writer's process is gone and the connection
has been found dead from here.
"""

from __future__ import annotations

from kvpush.protocol.ids import AgentName
from kvpush.transport.base import Transport, TransportError

PROBE_INTERVAL_S = 1.0
"""How often a connection is tried. What is sent over a silent link is kept for as long as it is silent."""


class Endings:
    """Owned by the transfer thread. probe: a message that means nothing to who gets it."""

    def __init__(self, transport: Transport, probe: bytes) -> None:
        self._transport = transport
        self._probe = probe
        self._probed_s: dict[AgentName, float] = {}

    def __len__(self) -> int:
        return len(self._probed_s)

    def add(self, agent: AgentName) -> None:
        """Its process is proven gone. Idempotent."""
        self._probed_s.setdefault(agent, float("-inf"))

    def take(self, now_s: float) -> list[AgentName]:
        """Those of which certainly nothing lands any more; each is named once."""
        over = []
        for agent, probed_s in list(self._probed_s.items()):
            if self._transport.connected(agent) and now_s - probed_s >= PROBE_INTERVAL_S:
                self._probed_s[agent] = now_s
                try:
                    self._transport.notify(agent, self._probe)
                except TransportError:
                    pass  # whether that has ended the connection is asked right away
            if not self._transport.connected(agent):
                del self._probed_s[agent]
                over.append(agent)
        return over
