"""P: the staging slots that its consumers have granted, and what stands in them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvpush.protocol.ids import AgentName, PeerAddress
from kvpush.protocol.messages import Staged

MAX_AGENTS = 1024
"""Consumers whose slots are remembered, connected or not."""


@dataclass(slots=True)
class Slot:
    """use: number of its present use, 0 while it is free. told: what D was told when its bytes had landed; repeated
    until D gives credit. lost: a write into it has failed and may still land; it is never used again."""

    use: int = 0
    address: PeerAddress | None = None
    told: Staged | None = None
    told_s: float = 0.0
    lost: bool = False


@dataclass(slots=True)
class _Granted:
    slots: dict[int, Slot] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)


class PeerSlots:
    """Uses are numbered over all slots and consumers, so that nothing said about one can be taken for another."""

    def __init__(self) -> None:
        self._granted: dict[AgentName, _Granted] = {}
        self._last_use = 0

    def grant(self, agent: AgentName, slots: Iterable[int]) -> None:
        """D has named this rank's slots; what is known already stays as it is."""
        granted = self._granted.pop(agent, None) or _Granted()
        self._granted[agent] = granted  # the most recently named come last
        for slot in slots:
            if slot not in granted.slots:
                granted.slots[slot] = Slot()
                granted.free.append(slot)
        if len(self._granted) > MAX_AGENTS:
            # Only those of which nothing is under way: a slot must not be written while something else may land there.
            idle = (name for name, held in self._granted.items() if len(held.free) == len(held.slots))
            spare = next(idle, agent)
            if spare != agent:
                self.forget(spare)

    def granted(self, agent: AgentName) -> bool:
        """This consumer has granted at least one slot that still can be used."""
        granted = self._granted.get(agent)
        return granted is not None and any(not slot.lost for slot in granted.slots.values())

    def denied(self, agent: AgentName) -> bool:
        """This consumer has said that there is no slot for us, or none can be used any more."""
        return agent in self._granted and not self.granted(agent)

    def take(self, agent: AgentName, address: PeerAddress) -> tuple[int, int] | None:
        """Begins a use of a free slot, as (slot, use); None if there is none."""
        granted = self._granted.get(agent)
        if granted is None or not granted.free:
            return None
        index = granted.free.pop()
        self._last_use += 1
        slot = granted.slots[index]
        slot.use, slot.address = self._last_use, address
        return index, slot.use

    def told(self, agent: AgentName, message: Staged, now_s: float) -> None:
        """The bytes of a use have landed, and D was told so."""
        slot = self._find(agent, message.slot, message.use)
        if slot is not None:
            slot.told, slot.told_s = message, now_s

    def free(self, agent: AgentName, slot: int, use: int) -> bool:
        """A use is over: D has given credit, or nothing was written. False if that was not the present use."""
        found = self._find(agent, slot, use)
        if found is None:
            return False
        found.use, found.told, found.address = 0, None, None
        self._granted[agent].free.append(slot)
        return True

    def lose(self, agent: AgentName, slot: int, use: int) -> None:
        """A write has failed and may still land."""
        found = self._find(agent, slot, use)
        if found is not None:
            found.lost, found.told = True, None

    def overdue(self, before_s: float, now_s: float) -> list[tuple[AgentName, PeerAddress, Staged]]:
        """What D was told before `before_s` and gave no credit for: to be told again. Counts as told now."""
        found = []
        for agent, granted in self._granted.items():
            for slot in granted.slots.values():
                if slot.told is not None and slot.told_s < before_s and slot.address is not None:
                    slot.told_s = now_s
                    found.append((agent, slot.address, slot.told))
        return found

    def forget(self, agent: AgentName) -> None:
        """This incarnation is gone for good, or none of its slots is in use."""
        self._granted.pop(agent, None)

    def _find(self, agent: AgentName, slot: int, use: int) -> Slot | None:
        granted = self._granted.get(agent)
        found = granted.slots.get(slot) if granted is not None else None
        return found if found is not None and found.use == use and not found.lost else None
