"""Registrations as P keeps them, and how one is joined from its parts."""

from __future__ import annotations

from dataclasses import dataclass

from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import AgentName, PeerAddress, SendKey
from kvpush.protocol.messages import Register
from kvpush.protocol.prompt import PromptIdentity


@dataclass(frozen=True, slots=True)
class Registration:
    """D's whole registration, its parts joined.

    blocks: one tuple of encoded tables per KV cache group. direct: P may write into them itself.
    """

    key: SendKey
    attempt: int
    prompt: PromptIdentity
    first_token: int
    blocks: tuple[tuple[bytes, ...], ...]
    consumers: int
    targets: int
    agent: AgentName
    address: PeerAddress
    received_s: float
    direct: bool = True

    @property
    def num_bytes(self) -> int:
        """The size of its block tables."""
        return sum(len(table) for group in self.blocks for table in group)


@dataclass(slots=True)
class _Parts:
    first: Register
    tables: dict[int, list[bytes]]
    since_s: float


class Assembly:
    """Joins the parts of registrations that were split; whole ones pass straight through.

    max_open: registrations that may be incomplete at a time.
    """

    def __init__(self, max_open: int = 1024) -> None:
        self._max_open = max_open
        self._open: dict[tuple[AgentName, SendKey], _Parts] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, agent: AgentName, message: Register, now_s: float) -> Registration | None:
        """The joined registration once its last part is in.

        A higher attempt replaces the parts of a lower one. Raises ProtocolError (peer) if parts contradict each other,
        or too many registrations are incomplete.
        """
        if message.parts == 1:
            return self._join(agent, message, {0: message.blocks}, now_s)
        name = (agent, message.key)
        parts = self._open.get(name)
        if parts is not None and message.attempt < parts.first.attempt:
            return None
        if parts is None or message.attempt > parts.first.attempt:
            if parts is None and len(self._open) >= self._max_open:
                raise ProtocolError("peer", f"{self._max_open} registrations are incomplete already")
            parts = self._open[name] = _Parts(message, {}, now_s)
        same = ("prompt", "first_token", "sender", "consumers", "targets", "parts", "direct")
        if any(getattr(parts.first, item) != getattr(message, item) for item in same):
            raise ProtocolError("peer", f"parts of the registration {message.key} contradict each other")
        if len(message.blocks) != len(parts.first.blocks):
            raise ProtocolError("peer", f"parts of the registration {message.key} differ in KV cache groups")
        parts.tables[message.part] = message.blocks
        if len(parts.tables) < message.parts:
            return None
        del self._open[name]
        return self._join(agent, parts.first, parts.tables, now_s)

    def drop(self, agent: AgentName, key: SendKey, attempt: int) -> None:
        """Forgets the parts of attempts up to this one."""
        parts = self._open.get((agent, key))
        if parts is not None and parts.first.attempt <= attempt:
            del self._open[agent, key]

    def drop_agent(self, agent: AgentName) -> None:
        """Forgets all parts from a peer."""
        for name in [name for name in self._open if name[0] == agent]:
            del self._open[name]

    def expire(self, before_s: float) -> None:
        """Forgets registrations whose first part came before `before_s`."""
        for name in [name for name, parts in self._open.items() if parts.since_s < before_s]:
            del self._open[name]

    @staticmethod
    def _join(agent: AgentName, first: Register, tables: dict[int, list[bytes]], now_s: float) -> Registration:
        return Registration(
            key=first.key,
            attempt=first.attempt,
            prompt=first.prompt,
            first_token=first.first_token,
            blocks=tuple(zip(*(tables[part] for part in range(first.parts)), strict=True)),
            consumers=first.consumers,
            targets=first.targets,
            agent=agent,
            address=first.sender,
            received_s=now_s,
            direct=first.direct,
        )
