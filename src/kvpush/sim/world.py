"""A world: hosts, the lives of engines on them, the fabric between them, and the time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np

from kvpush.plan.runs import Addresses
from kvpush.sim.engine import BLOCK_BYTES, Engine, EngineSpec
from kvpush.sim.referee import Referee
from kvpush.sim.scheduler import Half
from kvpush.transport.fabric import MemoryFabric
from kvpush.transport.faults import Faults

MakeHalf = Callable[[EngineSpec], Half]
"""Makes the connector's scheduler half for one engine."""

logging.getLogger("kvpush").setLevel(logging.CRITICAL + 1)


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
        self.agents: dict[str, Engine] = {}
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
        self.engines[host] = self.agents[engine.agent] = engine
        self.note(engine.agent, "starts", about_process=True)
        self.referee.note_reachability()
        return engine

    # What the hosts know of each other

    def machine(self, host: str) -> str:
        return "machine" if self._one_machine else host

    def reachable(self, agent: str, host: str) -> Engine | None:
        """The engine that answers an agent at a host now."""
        engine = self.engines.get(host)
        if engine is None or not engine.running or self.fabric.is_cut(agent, engine.agent):
            return None
        return engine

    def refuses(self, host: str) -> bool:
        """Nobody lives there: connecting fails at once."""
        return host not in self.engines or self.fabric.state(self.engines[host].agent) == "killed"

    def blocks_at(self, agent: str, addresses: Addresses, lengths: Addresses) -> frozenset[int]:
        """The blocks of an agent's cache that hold these bytes."""
        engine = self.agents[agent]
        first = (addresses.astype(np.int64) - engine.base) % engine.layer_bytes
        last = (first + lengths.astype(np.int64) - 1) // BLOCK_BYTES
        pairs = zip((first // BLOCK_BYTES).tolist(), last.tolist(), strict=True)
        return frozenset(block for low, high in pairs for block in range(low, high + 1))

    # Faults

    def stop(self, engine: Engine) -> None:
        if engine.running:
            self.note(engine.agent, "is stopped", about_process=True)
            self.fabric.stop(engine.agent)
            self.referee.note_reachability()

    def freeze(self, engine: Engine) -> None:
        """Stops an engine whose transfer thread has just posted a write and has not gone on yet."""
        self.referee.seen["stopped at a post"] += 1
        self.stop(engine)
        engine.transport.thaw()

    def resume(self, engine: Engine) -> None:
        if self.fabric.state(engine.agent) == "stopped":
            self.note(engine.agent, "continues", about_process=True)
            self.fabric.resume(engine.agent)
            engine.resumed_s = self.now_s
            self.referee.note_reachability()
            self._look_all()

    def kill(self, engine: Engine) -> None:
        if self.fabric.state(engine.agent) != "killed":
            self.note(engine.agent, "is killed", about_process=True)
            self.fabric.kill(engine.agent)
            self.referee.on_killed(engine.agent)
            self.referee.note_reachability()

    def cut(self, a: Engine, b: Engine, *, noticed: bool) -> None:
        self.note(a.agent, f"is cut from {b.agent}{', and writers notice' if noticed else ''}", about_process=True)
        self.fabric.cut(a.agent, b.agent, noticed_by_writers=noticed)
        self.referee.note_reachability()

    def heal(self, a: Engine, b: Engine) -> None:
        if self.fabric.is_cut(a.agent, b.agent):
            self.note(a.agent, f"reaches {b.agent} again", about_process=True)
            self.fabric.heal(a.agent, b.agent)
            self.referee.note_reachability()

    def heal_all(self) -> None:
        for a in self.agents.values():
            for b in self.agents.values():
                if a.agent < b.agent:
                    self.heal(a, b)

    def _on_wake(self, agent: str) -> None:
        if self.fabric.state(agent) != "killed":
            self.agents[agent].look()

    def _look_all(self) -> None:
        """A write to a process that was stopped can be seen to have ended now."""
        for engine in self.engines.values():
            if self.fabric.state(engine.agent) != "killed":
                engine.look()

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
        return [e for e in self.engines.values() if e.running and e.core._producer_side.suspects]
