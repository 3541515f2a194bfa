"""Handshakes and proofs as the side channels give them: by whoever lives at an address, if it can be reached."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvpush.protocol.ids import AgentName, PeerAddress
from kvpush.sim.timing import DIAL_TIMEOUT_S
from kvpush.transfer.dialer import Dialed
from kvpush.transfer.sidechannel import ProcessIdentity

if TYPE_CHECKING:
    from kvpush.sim.world import World

ANSWER_S = (0.0005, 0.004)


class SimDialer:
    """The `Dialer` of one engine. wake: called when an answer waits."""

    def __init__(self, world: World, mine: AgentName, wake: Callable[[], None]) -> None:
        self._world, self._mine, self._wake = world, mine, wake
        self._ended: list[Dialed] = []

    def dial(self, address: PeerAddress) -> None:
        fabric = self._world.fabric
        fabric.after(fabric.draw_s(ANSWER_S), lambda: self._ask(address), self._mine)

    def take(self) -> list[Dialed]:
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        self._ended.clear()

    def _ask(self, address: PeerAddress) -> None:
        engine = self._world.reachable(self._mine, address.host)
        if engine is not None:
            self._end(Dialed(address, engine.workers[address.tp_rank].answer))
        elif self._world.refuses(address.host):
            self._end(Dialed(address, None, f"handshake unreachable: nobody listens at {address}"))
        else:
            timeout = Dialed(address, None, f"handshake timeout: {address} does not answer")
            self._world.fabric.after(DIAL_TIMEOUT_S, lambda: self._end(timeout), self._mine)

    def _end(self, dialed: Dialed) -> None:
        self._ended.append(dialed)
        self._wake()


class SimProver:
    """The `Prover` of one engine: tells the truth, if the machine of the writer can be asked."""

    def __init__(self, world: World, mine: AgentName, host: str) -> None:
        self._world, self._mine, self._host = world, mine, host
        self._asked: set[AgentName] = set()
        self._gone: list[AgentName] = []

    def ask(self, agent: AgentName, process: ProcessIdentity, address: PeerAddress) -> None:
        if agent not in self._asked:
            self._asked.add(agent)
            fabric = self._world.fabric
            fabric.after(fabric.draw_s(ANSWER_S), lambda: self._answer(agent, process, address), self._mine)

    def take(self) -> list[AgentName]:
        gone, self._gone = self._gone, []
        return gone

    def close(self) -> None:
        self._gone.clear()

    def _answer(self, agent: AgentName, process: ProcessIdentity, address: PeerAddress) -> None:
        self._asked.discard(agent)
        here = self._world.machine(self._host)
        asked = process.host_id == here or self._world.reachable(self._mine, address.host) is not None
        if asked and self._world.fabric.state(agent) == "killed":
            self._gone.append(agent)
