"""A fabric in memory with virtual time: what lies between `MemoryTransport`s.

Nothing happens but in `advance`, and everything random comes from one seed, so a run can be repeated to the byte. Time
is what the caller says it is. The faults are the ones that were seen on real machines: processes that stop and go on
writing when they continue, links that go silent, handles that fail half way, messages in any order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from kvpush.transport.faults import Faults

if TYPE_CHECKING:
    from kvpush.transport.memory import MemoryTransport

Action = Callable[[], None]
Bytes = npt.NDArray[np.uint8]
OnLand = Callable[[str, str, int, int], None]

_PAGE = 4096


@dataclass(slots=True)
class _Mapping:
    address: int
    memory: Bytes
    owner: str


@dataclass(slots=True)
class _Process:
    """The life of the process that an agent runs in."""

    agent: MemoryTransport
    state: Literal["running", "stopped", "killed"] = "running"
    lingers: bool = False  # killed, but what it had sent is still on its way
    held: list[Action] = field(default_factory=list)  # its own steps that came due while it was stopped


@dataclass(slots=True)
class _Cut:
    """A link on which nothing passes; writes on it wait."""

    noticed_by_writers: bool
    held: list[tuple[str, Action]] = field(default_factory=list)  # (writer, step)


class MemoryFabric:
    """Connects `MemoryTransport`s, which join by their constructor.

    on_land(writer, target, address, length): called right after bytes have landed; for checkers of ownership.
    on_wake(agent): called when something waits for the agent's next look: a message, or a write that has ended.
    """

    def __init__(self, seed: int = 0, faults: Faults | None = None) -> None:
        self.random = Random(seed)
        self.on_land: OnLand | None = None
        self.on_wake: Callable[[str], None] | None = None
        self._now_s = 0.0
        self._sequence = 0
        self._events: list[tuple[float, int, str | None, Action]] = []
        self._processes: dict[str, _Process] = {}
        self._mappings: list[_Mapping] = []
        self._next_address = 1 << 32
        self._faults: dict[tuple[str | None, str | None], Faults] = {(None, None): faults or Faults()}
        self._cuts: dict[frozenset[str], _Cut] = {}

    # Time

    @property
    def now_s(self) -> float:
        return self._now_s

    def next_event_s(self) -> float | None:
        """When something happens next, or None if nothing will unless somebody acts."""
        return self._events[0][0] if self._events else None

    def advance(self, to_s: float) -> None:
        """Lets everything happen that is due until `to_s`, in order. Raises ValueError if that is in the past."""
        if to_s < self._now_s:
            raise ValueError(f"cannot go back from {self._now_s} s to {to_s} s")
        while self._events and self._events[0][0] <= to_s:
            at_s, _, owner, action = heapq.heappop(self._events)
            self._now_s = at_s
            process = self._processes.get(owner) if owner is not None else None
            if process is None or process.state == "running":
                action()
            elif process.state == "stopped":
                process.held.append(action)
        self._now_s = to_s

    def after(self, delay_s: float, action: Action, owner: str | None = None) -> None:
        """Schedules a step. Steps of an owner wait while it is stopped and vanish if it is killed."""
        self._sequence += 1
        heapq.heappush(self._events, (self._now_s + delay_s, self._sequence, owner, action))

    # Faults

    def set_faults(self, faults: Faults | None, writer: str | None = None, target: str | None = None) -> None:
        """Sets what happens from writer to target; None stands for all. The most specific setting counts.

        faults=None removes a setting (the one for all agents cannot be removed).
        """
        if faults is not None:
            self._faults[(writer, target)] = faults
        elif (writer, target) != (None, None):
            self._faults.pop((writer, target), None)

    def faults(self, writer: str, target: str) -> Faults:
        for key in ((writer, target), (writer, None), (None, target)):
            if key in self._faults:
                return self._faults[key]
        return self._faults[(None, None)]

    def draw_s(self, span_s: tuple[float, float]) -> float:
        return self.random.uniform(*span_s)

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def cut(self, a: str, b: str, noticed_by_writers: bool = True) -> None:
        """Lets nothing pass between two agents. Messages are lost; writes in flight wait.

        noticed_by_writers: those writes fail after the link's `notice_s` and the two have lost each other. Otherwise
        they wait for `heal`, and messages vanish without an error.
        """
        self._cuts.setdefault(frozenset((a, b)), _Cut(noticed_by_writers)).noticed_by_writers = noticed_by_writers
        if noticed_by_writers:
            self.notice(a, b)
            self.notice(b, a)

    def heal(self, a: str, b: str) -> None:
        """Ends a cut: writes that wait go on. Agents that have lost each other must connect again."""
        cut = self._cuts.pop(frozenset((a, b)), None)
        for writer, action in cut.held if cut is not None else []:
            owner = None if self._processes[writer].lingers else writer
            self.after(self.draw_s(self.faults(a, b).message_delay_s), action, owner)
        for dead, other in ((a, b), (b, a)):
            if dead in self._processes and self._processes[dead].lingers:
                # The end of a connection comes behind what was sent over it.
                longest_s = self.faults(a, b).message_delay_s[1]
                self.after(longest_s, partial(self.notice, other, dead))

    def is_cut(self, a: str, b: str) -> bool:
        return frozenset((a, b)) in self._cuts

    def hold(self, writer: str, target: str, action: Action) -> bool:
        """Keeps a step of a write for `heal`; False if the link is whole."""
        cut = self._cuts.get(frozenset((writer, target)))
        if cut is not None:
            cut.held.append((writer, action))
        return cut is not None

    def notice(self, writer: str, target: str) -> None:
        """Has a writer learn after a while that its target is out of reach, if it still is then."""
        process = self._processes.get(writer)
        if process is None:
            return

        def learn() -> None:
            cut = self._cuts.get(frozenset((writer, target)))
            hidden = self._processes[target].lingers and cut is not None and not cut.noticed_by_writers
            if not hidden and (self.state(target) == "killed" or (cut is not None and cut.noticed_by_writers)):
                process.agent.lose(target)

        self.after(self.draw_s(self.faults(writer, target).notice_s), learn, writer)

    def is_noticed(self, writer: str, target: str) -> bool:
        """Whether what is sent now will be found undeliverable."""
        cut = self._cuts.get(frozenset((writer, target)))
        return self.state(target) == "killed" or (cut is not None and cut.noticed_by_writers)

    # Processes

    def stop(self, agent: str) -> None:
        """SIGSTOP: its writes in flight freeze. Bytes of others still land in its memory; they are not told so."""
        process = self._processes[agent]
        if process.state != "running":
            raise ValueError(f"agent {agent} is {process.state}, not running")
        process.state = "stopped"

    def resume(self, agent: str) -> None:
        """SIGCONT: its writes go on as if nothing had been."""
        process = self._processes[agent]
        if process.state != "stopped":
            raise ValueError(f"agent {agent} is {process.state}, not stopped")
        process.state = "running"
        held, process.held = process.held, []
        for action in held:
            self.after(self.draw_s(self.faults(agent, agent).message_delay_s), action, agent)

    def kill(self, agent: str, *, lingers: bool = False) -> None:
        """SIGKILL: nothing of it lands any more; writers to it learn of it after `notice_s`.

        lingers: what waits at a cut had been handed to the kernel, which sends it when the link is healed, and whoever
        is behind the cut learns of the end after that.
        """
        process = self._processes[agent]
        process.state = "killed"
        process.lingers = lingers
        process.held.clear()
        if not lingers:
            for cut in self._cuts.values():
                cut.held = [(writer, action) for writer, action in cut.held if writer != agent]
            self._mappings = [m for m in self._mappings if m.owner != agent]
        for name, other in self._processes.items():
            if name != agent and other.state != "killed":
                self.notice(name, agent)

    def state(self, agent: str) -> Literal["running", "stopped", "killed", "unknown"]:
        process = self._processes.get(agent)
        return process.state if process is not None else "unknown"

    # For the transports

    def join(self, agent: MemoryTransport) -> None:
        if agent.name in self._processes:
            raise ValueError(f"an agent {agent.name} was here already; a new life needs a new name")
        self._processes[agent.name] = _Process(agent)

    def agent(self, name: str) -> MemoryTransport:
        return self._processes[name].agent

    def check_running(self, name: str) -> None:
        """A stopped or dead process makes no calls; one that does is a defect of the simulation."""
        if self.state(name) != "running":
            raise RuntimeError(f"agent {name} makes a call although it is {self.state(name)}")

    def map(self, owner: str, memory: Bytes, address: int | None) -> int:
        if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous or not len(memory):
            raise ValueError("memory must be a contiguous, not empty array of bytes")
        if address is None:
            address = self._next_address
        for other in self._mappings:
            if address < other.address + len(other.memory) and other.address < address + len(memory):
                raise ValueError(f"{len(memory)} bytes at {address:#x} overlap memory of {other.owner}")
        self._mappings.append(_Mapping(address, memory, owner))
        # A page lies free between any two, so that no run can reach from one into the next.
        end = max(m.address + len(m.memory) for m in self._mappings)
        self._next_address = max(self._next_address, (end + 2 * _PAGE - 1) // _PAGE * _PAGE)
        return address

    def memory(self, owner: str, address: int, length: int) -> Bytes | None:
        """The bytes that an agent has mapped there, as a view; None if it has not."""
        for m in self._mappings:
            if m.owner == owner and m.address <= address and address + length <= m.address + len(m.memory):
                return m.memory[address - m.address : address - m.address + length]
        return None

    def wake(self, agent: str) -> None:
        if self.on_wake is not None:
            self.on_wake(agent)

    def land(self, writer: str, target: str, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Copies (src, dst, length) pieces as they are now. Memory of a process that is gone takes nothing."""
        for src, dst, length in pieces:
            source, there = self.memory(writer, src, length), self.memory(target, dst, length)
            if source is None or there is None:
                continue
            there[:] = source
            if self.on_land is not None:
                self.on_land(writer, target, dst, length)
