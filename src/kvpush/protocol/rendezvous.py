"""The rendezvous table at P: pairs registrations with local requests, whichever comes first."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import AgentName, PeerAddress, RequestId, SendKey, TransferId
from kvpush.protocol.messages import Register
from kvpush.protocol.prompt import PromptIdentity


@dataclass(slots=True)
class LocalRequest:
    """A request of this engine whose KV is to be handed over.

    ready: prompt tokens whose KV exists in the present blocks; 0 again after a preemption. finished: the engine is done
    with it and holds the blocks for us. ended_s: when it finished. registered: consumers that have, or had, a send;
    satisfied: consumers that need nothing more.
    """

    request_id: RequestId
    transfer_id: TransferId
    prompt: PromptIdentity
    consumers: int
    known_s: float
    ready: int = 0
    finished: bool = False
    ended_s: float = 0.0
    poisoned: bool = False
    reported: bool = False
    registered: set[int] = field(default_factory=set)
    satisfied: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        return self.ready >= self.prompt.num_tokens

    @property
    def computing(self) -> bool:
        return not self.finished and self.ready > 0


@dataclass(frozen=True, slots=True)
class Registration:
    """D's whole registration, its parts joined. blocks: one tuple of encoded tables per KV cache group."""

    key: SendKey
    attempt: int
    prompt: PromptIdentity
    first_token: int
    blocks: tuple[tuple[bytes, ...], ...]
    consumers: int
    agent: AgentName
    address: PeerAddress
    received_s: float


@dataclass(slots=True)
class _Parts:
    first: Register
    tables: dict[int, list[bytes]]
    since_s: float


class Assembly:
    """Joins the parts of registrations that were split; whole ones pass straight through."""

    def __init__(self) -> None:
        self._open: dict[tuple[AgentName, SendKey, int], _Parts] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, agent: AgentName, message: Register, now_s: float) -> Registration | None:
        """The joined registration once its last part is in. Raises ProtocolError if parts contradict each other."""
        if message.parts == 1:
            return self._join(agent, message, {0: message.blocks}, now_s)
        name = (agent, message.key, message.attempt)
        parts = self._open.get(name)
        if parts is None:
            parts = self._open[name] = _Parts(message, {}, now_s)
        same = ("prompt", "first_token", "sender", "consumers", "parts")
        if any(getattr(parts.first, item) != getattr(message, item) for item in same):
            raise ProtocolError("peer", f"parts of the registration {message.key} contradict each other")
        if len(message.blocks) != len(parts.first.blocks):
            raise ProtocolError("peer", f"parts of the registration {message.key} differ in KV cache groups")
        parts.tables[message.part] = message.blocks
        if len(parts.tables) < message.parts:
            return None
        del self._open[name]
        return self._join(agent, parts.first, parts.tables, now_s)

    def expire(self, before_s: float) -> None:
        """Forgets registrations whose first part came before `before_s`."""
        for name in [name for name, parts in self._open.items() if parts.since_s < before_s]:
            del self._open[name]

    @staticmethod
    def _join(agent: AgentName, first: Register, tables: dict[int, list[bytes]], now_s: float) -> Registration:
        groups = tuple(zip(*(tables[part] for part in range(first.parts)), strict=True))
        return Registration(
            first.key, first.attempt, first.prompt, first.first_token, groups, first.consumers, agent,
            first.sender, now_s,
        )  # fmt: skip


class Rendezvous:
    """Who waits for whom, by transfer id. Holds no send state: pairs are handed out as soon as both halves are here."""

    def __init__(self, max_held: int = 65_536) -> None:
        self._max_held = max_held
        self._local: dict[TransferId, LocalRequest] = {}
        self._by_request: dict[RequestId, LocalRequest] = {}
        self._held: dict[SendKey, Registration] = {}
        self._released: dict[SendKey, float] = {}
        self._announced: dict[TransferId, tuple[AgentName, float]] = {}

    @property
    def empty(self) -> bool:
        return not (self._local or self._held or self._released or self._announced)

    def local(self, transfer_id: TransferId) -> LocalRequest | None:
        return self._local.get(transfer_id)

    def by_request(self, request_id: RequestId) -> LocalRequest | None:
        return self._by_request.get(request_id)

    def locals(self) -> list[LocalRequest]:
        return list(self._by_request.values())

    def held(self) -> list[Registration]:
        return list(self._held.values())

    def add_local(self, request: LocalRequest) -> tuple[list[Registration], list[SendKey]]:
        """Books a local request; returns the registrations and releases that waited for it.

        Raises ProtocolError (local) if the request is known, or another live request has the transfer id.
        """
        if request.request_id in self._by_request or request.transfer_id in self._local:
            raise ProtocolError("local", f"transfer {request.transfer_id} already has a request")
        self._local[request.transfer_id] = self._by_request[request.request_id] = request
        waiting = [key for key in self._held if key.transfer_id == request.transfer_id]
        released = [key for key in self._released if key.transfer_id == request.transfer_id]
        for key in released:
            del self._released[key]
        return [self._held.pop(key) for key in waiting], released

    def remove_local(self, request: LocalRequest) -> None:
        self._by_request.pop(request.request_id, None)
        self._local.pop(request.transfer_id, None)
        self._announced.pop(request.transfer_id, None)

    def hold(self, registration: Registration) -> Registration | None:
        """Keeps a registration until its request comes; returns the one that it replaces.

        Raises ProtocolError (peer) if another peer holds this key, or the table is full.
        """
        old = self._held.get(registration.key)
        if old is None and len(self._held) >= self._max_held:
            raise ProtocolError("peer", f"{self._max_held} registrations wait already")
        if old is not None and old.agent != registration.agent:
            raise ProtocolError("peer", f"{registration.key} is registered by {old.agent}")
        if old is not None and old.attempt >= registration.attempt:
            # The same again: it keeps the age that it has, or a peer could hold it for ever.
            return None
        self._held[registration.key] = registration if old is None else replace(registration, received_s=old.received_s)
        return old

    def drop_held(self, key: SendKey) -> Registration | None:
        return self._held.pop(key, None)

    def get_held(self, key: SendKey) -> Registration | None:
        return self._held.get(key)

    def hold_release(self, key: SendKey, now_s: float) -> None:
        """Keeps a release until its request comes. Raises ProtocolError (peer) if the table is full."""
        if len(self._released) >= self._max_held:
            raise ProtocolError("peer", f"{self._max_held} releases wait already")
        self._released.setdefault(key, now_s)

    def announce(self, transfer_id: TransferId, agent: AgentName, now_s: float) -> None:
        """Notes, or renews, that a consumer will come. Raises ProtocolError (peer) if the table is full."""
        if transfer_id not in self._announced and len(self._announced) >= self._max_held:
            raise ProtocolError("peer", f"{self._max_held} announcements wait already")
        self._announced[transfer_id] = (agent, now_s)

    def announced_s(self, transfer_id: TransferId) -> float | None:
        """When the transfer was last announced, or None."""
        entry = self._announced.get(transfer_id)
        return None if entry is None else entry[1]

    def expire(self, before_s: float) -> list[Registration]:
        """Forgets what has waited since before `before_s`; returns the registrations among it."""
        for key in [key for key, since_s in self._released.items() if since_s < before_s]:
            del self._released[key]
        stale = [tid for tid, (_, s) in self._announced.items() if s < before_s and tid not in self._local]
        for transfer_id in stale:
            del self._announced[transfer_id]
        old = [key for key, registration in self._held.items() if registration.received_s < before_s]
        return [self._held.pop(key) for key in old]
