"""D: which writer may write into which staging slot."""

from __future__ import annotations

from kvpush.protocol.ids import AgentName


class SlotLeases:
    """A slot belongs to one incarnation of a writer until that is proven gone, whatever becomes of its transfers.

    So a late write can only reach a slot that nobody else uses, and no transfer ever waits for another one's slot to be
    given back. The first writer gets three quarters of the slots, each further one three quarters of what is left.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))
        self._held: dict[AgentName, tuple[int, ...]] = {}
        self._holder: dict[int, AgentName] = {}

    @property
    def holders(self) -> set[AgentName]:
        return set(self._held)

    def grant(self, agent: AgentName) -> tuple[int, ...]:
        """The writer's slots, the same at every call; empty while others hold all."""
        held = self._held.get(agent, ())
        if not held and self._free:
            count = max(1, len(self._free) * 3 // 4)
            held, self._free = tuple(self._free[:count]), self._free[count:]
            self._held[agent] = held
            self._holder |= dict.fromkeys(held, agent)
        return held

    def holds(self, agent: AgentName, slot: int) -> bool:
        return self._holder.get(slot) == agent

    def revoke(self, agent: AgentName) -> tuple[int, ...]:
        """The writer is proven gone: its slots are free. Returns them."""
        slots = self._held.pop(agent, ())
        for slot in slots:
            del self._holder[slot]
        self._free += slots
        return slots
