"""A world: hosts, the lives of engines on them, the fabric between them, and the time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np

from kvpush.plan.runs import Addresses
from kvpush.sim.engine import Engine, EngineSpec
from kvpush.sim.referee import Referee
from kvpush.sim.step import Half
from kvpush.sim.worker import BLOCK_BYTES, Worker
from kvpush.transport.fabric import MemoryFabric
from kvpush.transport.faults import Faults

MakeHalf = Callable[[EngineSpec], Half]
"""Makes the connector's scheduler half for one engine."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a world's story. about_process: it is about a process or a link, not about a request."""

    at_s: float
    who: str
    what: str
    about_process: bool


class World:
    """Hosts by name. make_half: see `MakeHalf`. trace: what happened, if `traced`."""

    def __init__(self, seed: int, faults: Faults, make_half: MakeHalf, *, one_machine: bool, traced: bool) -> None:
        self.fabric = MemoryFabric(seed, faults)
        self.random: Random = self.fabric.random
        self.trace: list[Line] | None = [] if traced else None
        self.referee = Referee(self)
        self.engines: dict[str, Engine] = {}
        self.agents: dict[str, Worker] = {}
        self._make_half = make_half
        self._one_machine = one_machine
        self._lives: dict[str, int] = {}
        self._progress_s = 0.0
        self.fabric.on_land = self.referee.on_land
        self.fabric.on_wake = self._on_wake

    @property
    def now_s(self) -> float:
        return self.fabric.now_s

    def note(self, who: str, what: str, *, about_process: bool = False) -> None:
        if self.trace is not None:
            self.trace.append(Line(self.now_s, who, what, about_process))

    def start(self, host: str, spec: EngineSpec) -> Engine:
        """Starts an engine on a host, in place of the one that was there."""
        life = self._lives[host] = self._lives.get(host, -1) + 1
        engine = Engine(self, host, life, spec, self._make_half(spec))
        self.engines[host] = engine
        self.agents |= {worker.agent: worker for worker in engine.workers}
        self.note(engine.agent, "starts", about_process=True)
        self.referee.note_reachability()
        return engine

    # What the hosts know of each other

    def machine(self, host: str) -> str:
        return "machine" if self._one_machine else host

    def reachable(self, agent: str, host: str) -> Engine | None:
        """The engine that answers an agent at a host now."""
        engine = self.engines.get(host)
        if engine is None or self.fabric.state(engine.agent) != "running" or self.fabric.is_cut(agent, engine.agent):
            return None
        return engine

    def reachable_rank(self, agent: str, host: str, rank: int) -> bool:
        """Whether a rank at a host can hear an agent and answer."""
        engine = self.reachable(agent, host)
        if engine is None:
            return False
        worker = engine.workers[rank]
        return worker.running and not self.fabric.is_cut(agent, worker.agent)

    def refuses(self, host: str) -> bool:
        """Nobody lives there: connecting fails at once."""
        return host not in self.engines or self.engines[host].killed

    def blocks_at(self, agent: str, addresses: Addresses, lengths: Addresses) -> frozenset[int]:
        """The blocks of an agent's cache that hold these bytes; none for those in its staging memory."""
        worker = self.agents[agent]
        place = addresses.astype(np.int64) - worker.base
        inside = (place >= 0) & (place < worker.memory.nbytes)
        first = place[inside] % worker.layer_bytes
        last = (first + lengths[inside].astype(np.int64) - 1) // BLOCK_BYTES
        pairs = zip((first // BLOCK_BYTES).tolist(), last.tolist(), strict=True)
        return frozenset(block for low, high in pairs for block in range(low, high + 1))

    # Faults

    def stop(self, worker: Worker) -> None:
        if worker.running:
            self.note(worker.agent, "is stopped", about_process=True)
            self.fabric.stop(worker.agent)
            self.referee.note_reachability()

    def freeze(self, worker: Worker) -> None:
        """Stops a process whose transfer thread has just posted a write and has not gone on yet."""
        self.referee.seen["stopped at a post"] += 1
        self.stop(worker)
        worker.transport.thaw()

    def resume(self, worker: Worker) -> None:
        if self.fabric.state(worker.agent) == "stopped":
            self.note(worker.agent, "continues", about_process=True)
            self.fabric.resume(worker.agent)
            worker.resumed_s = self.now_s
            self.referee.note_reachability()
            self._look_all()

    def kill(self, engine: Engine) -> None:
        """All processes of an engine: vLLM ends with any one of them."""
        if engine.killed:
            return
        for worker in engine.workers:
            self.note(worker.agent, "is killed", about_process=True)
            self.fabric.kill(worker.agent)
            self.referee.on_killed(worker.agent)
        self.referee.note_reachability()

    def cut(self, a: Engine, b: Engine, *, noticed: bool) -> None:
        self.note(a.agent, f"is cut from {b.agent}{', and writers notice' if noticed else ''}", about_process=True)
        for one, other in self._pairs(a, b):
            self.fabric.cut(one, other, noticed_by_writers=noticed)
        self.referee.note_reachability()

    def heal(self, a: Engine, b: Engine) -> None:
        if self.fabric.is_cut(a.agent, b.agent):
            self.note(a.agent, f"reaches {b.agent} again", about_process=True)
            for one, other in self._pairs(a, b):
                self.fabric.heal(one, other)
            self.referee.note_reachability()

    def heal_all(self) -> None:
        for pair in list(self.fabric._cuts):
            one, other = sorted(pair)
            self.heal(self.agents[one].engine, self.agents[other].engine)

    @staticmethod
    def _pairs(a: Engine, b: Engine) -> list[tuple[str, str]]:
        return [(one.agent, other.agent) for one in a.workers for other in b.workers]

    def _on_wake(self, agent: str) -> None:
        if self.fabric.state(agent) != "killed":
            self.agents[agent].look()

    def _look_all(self) -> None:
        """A write to a process that was stopped can be seen to have ended now."""
        for engine in self.engines.values():
            for worker in engine.workers:
                self._on_wake(worker.agent)

    # Time

    def run_until(self, to_s: float) -> None:
        """Lets everything happen until then. Raises Violation."""
        self.fabric.advance(to_s)

    def run_to_rest(self, stall_s: float, bound_s: float) -> None:
        """Lets everything happen until nothing is left to do, nothing has come of it for so long, or time is up."""
        end_s = self.now_s + bound_s
        self.note_progress()
        while (next_s := self.fabric.next_event_s()) is not None:
            if self.now_s > min(self._progress_s + stall_s, end_s):
                break
            self.fabric.advance(next_s + 0.05)

    def note_progress(self) -> None:
        """A request has got further."""
        self._progress_s = self.now_s

    def suspects(self) -> list[Engine]:
        """Engines with writes that have failed and may land for ever: only their end makes memory safe."""
        return [
            engine
            for engine in self.engines.values()
            if engine.running and any(worker.core._producer_side.suspects for worker in engine.workers)
        ]
