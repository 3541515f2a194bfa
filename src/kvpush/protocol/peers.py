"""The incarnations of D ranks that P has to do with: who is connected, who is being connected to, who is silent."""

from __future__ import annotations

from kvpush.protocol.actions import Action, Connect
from kvpush.protocol.ids import AgentName
from kvpush.protocol.liveness import Liveness
from kvpush.protocol.registration import Registration
from kvpush.protocol.timing import Timing


class Peers:
    """D asks, P answers: P pings nobody and calls a peer lost when its pings stay away."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._liveness: Liveness[AgentName] = Liveness(timing.peer_timeout_s, timing.ping_interval_s)
        self._connected: set[AgentName] = set()
        self._connecting: dict[AgentName, float] = {}

    @property
    def num_watched(self) -> int:
        return len(self._liveness)

    def connected(self, agent: AgentName) -> bool:
        return agent in self._connected

    def connect(self, registration: Registration, now_s: float) -> list[Action]:
        """Asks for a connection to who has registered, once, unless there is one."""
        agent = registration.agent
        if agent in self._connected or agent in self._connecting:
            return []
        self._connecting[agent] = now_s
        return [Connect(registration.address, agent)]

    def on_connected(self, agent: AgentName) -> None:
        self._connecting.pop(agent, None)
        self._connected.add(agent)

    def drop(self, agent: AgentName) -> None:
        """There is no connection to this incarnation (any more)."""
        self._connecting.pop(agent, None)
        self._connected.discard(agent)

    def watch(self, agent: AgentName, now_s: float) -> None:
        self._liveness.watch(agent, now_s)

    def heard(self, agent: AgentName, now_s: float) -> None:
        self._liveness.heard(agent, now_s)

    def lost(self, sharing: set[AgentName], now_s: float) -> list[AgentName]:
        """Who became silent among those that share something with us; nobody else is watched any longer."""
        self._liveness.keep(sharing)
        return self._liveness.lost(now_s)

    def overdue(self, now_s: float) -> list[AgentName]:
        """Those to whom no connection was made in time."""
        bound_s = self._timing.rendezvous_timeout_s
        return [agent for agent, since_s in self._connecting.items() if now_s - since_s > bound_s]
