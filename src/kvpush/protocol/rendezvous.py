"""The rendezvous table at P: pairs registrations with local requests, whichever comes first."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvpush.protocol.claims import Claims
from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import AgentName, PeerAddress, RequestId, SendKey, TransferId
from kvpush.protocol.prompt import PromptIdentity
from kvpush.protocol.registration import Registration

__all__ = ["HeldRelease", "LocalRequest", "Registration", "Rendezvous"]


@dataclass(slots=True)
class LocalRequest:
    """A request of this engine whose KV is to be handed over.

    ready: prompt tokens whose KV exists in the present blocks; 0 again after a preemption. finished: the engine is done
    with it and holds the blocks for us. waiting_since_s: since when, finished, it waits for the next consumer.
    claims: the consumers that have come, and those that need nothing; keys: those whose send has not been buried.
    """

    request_id: RequestId
    transfer_id: TransferId
    prompt: PromptIdentity
    consumers: int
    known_s: float
    ready: int = 0
    finished: bool = False
    ended_s: float = 0.0
    waiting_since_s: float = 0.0
    reported: bool = False
    keys: list[SendKey] = field(default_factory=list)
    claims: Claims = field(init=False)

    def __post_init__(self) -> None:
        self.claims = Claims(self.consumers)

    @property
    def complete(self) -> bool:
        return self.ready >= self.prompt.num_tokens

    @property
    def computing(self) -> bool:
        return not self.finished and self.ready > 0

    def finish(self, now_s: float) -> None:
        """The engine is done with the request; the first time counts."""
        if not self.finished:
            self.finished, self.ended_s, self.waiting_since_s = True, now_s, now_s

    def release(self, release: HeldRelease, taken: set[int]) -> None:
        """Applies what was said before the request was known. taken: consumers whose registrations wait for it."""
        consumer, cancelled = release.key.consumer, release.cancelled
        if cancelled is not None:
            self.take_back(cancelled.key, cancelled.prompt, cancelled.address, cancelled.targets)
        elif consumer < self.consumers and consumer not in taken | self.claims.keys_begun:
            self.claims.release(consumer)
        if release.all_consumers:
            self.claims.release_others(but=taken)

    def take_back(self, key: SendKey, prompt: PromptIdentity, address: PeerAddress, targets: int) -> None:
        """A registration of this request was cancelled before it could be served: its rank needs nothing more."""
        if prompt == self.prompt and not self.claims.refusal(key, address, targets):
            self.claims.begin(key, address, targets)
            self.claims.end(key)

    def refusal(self, registration: Registration) -> str:
        """Why a registration gets nothing of this request, or ""."""
        if registration.prompt != self.prompt:
            return "prompt_mismatch"
        return self.claims.refusal(registration.key, registration.address, registration.targets)


@dataclass(frozen=True, slots=True)
class HeldRelease:
    """A consumer that needs nothing of a request that is not here yet. all_consumers: nor does any other.

    cancelled: the registration that its rank took back; then only this rank needs nothing.
    """

    key: SendKey
    attempt: int
    all_consumers: bool
    since_s: float
    cancelled: Registration | None = None


class Rendezvous:
    """Who waits for whom, by transfer id. Holds no send state: pairs are handed out as soon as both halves are here.

    max_held: registrations that may wait, and likewise releases and announcements; max_held_bytes: the size of their
    block tables together.
    """

    def __init__(self, max_held: int = 65_536, max_held_bytes: int = 256 * 1024 * 1024) -> None:
        self._max_held = max_held
        self._max_held_bytes = max_held_bytes
        self._local: dict[TransferId, LocalRequest] = {}
        self._by_request: dict[RequestId, LocalRequest] = {}
        self._held: dict[TransferId, dict[SendKey, Registration]] = {}
        self._num_held = self._held_bytes = 0
        self._released: dict[TransferId, dict[SendKey, HeldRelease]] = {}
        self._num_released = 0
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
        return [registration for held in self._held.values() for registration in held.values()]

    def get_held(self, key: SendKey) -> Registration | None:
        return self._held.get(key.transfer_id, {}).get(key)

    def add_local(self, request: LocalRequest) -> tuple[list[Registration], list[HeldRelease]]:
        """Books a local request; returns the registrations and releases that waited for it.

        Raises ProtocolError (local) if the request is known, or another live request has the transfer id.
        """
        if request.request_id in self._by_request:
            raise ProtocolError("local", f"request {request.request_id} is known already")
        if request.transfer_id in self._local:
            raise ProtocolError("local", f"transfer {request.transfer_id} already has a request")
        self._local[request.transfer_id] = self._by_request[request.request_id] = request
        released = list(self._released.pop(request.transfer_id, {}).values())
        self._num_released -= len(released)
        waiting = list(self._held.get(request.transfer_id, ()))
        return [held for key in waiting if (held := self.drop_held(key)) is not None], released

    def remove_local(self, request: LocalRequest) -> None:
        self._by_request.pop(request.request_id, None)
        self._local.pop(request.transfer_id, None)
        self._announced.pop(request.transfer_id, None)

    def hold(self, registration: Registration) -> str:
        """Keeps a registration until its request comes; a newer attempt takes the place and the age of an older one.

        Returns "", or why it is not kept: "duplicate" if another incarnation holds this key or another engine this
        consumer, "busy" if the table is full.
        """
        key = registration.key
        held = self._held.get(key.transfer_id, {})
        old = held.get(key)
        for other in held.values():
            same_consumer = other.key.consumer == key.consumer
            if same_consumer and other.address.engine != registration.address.engine:
                return "duplicate"
        if old is not None and old.agent != registration.agent:
            return "duplicate"
        if old is not None and old.attempt >= registration.attempt:
            return ""  # The same again: it keeps the age that it has, or a peer could hold it for ever.
        grown_bytes = registration.num_bytes - (old.num_bytes if old is not None else 0)
        if (old is None and self._num_held >= self._max_held) or self._held_bytes + grown_bytes > self._max_held_bytes:
            return "busy"
        if old is not None:
            self.drop_held(key)
            registration = replace(registration, received_s=old.received_s)
        self._held.setdefault(key.transfer_id, {})[key] = registration
        self._num_held += 1
        self._held_bytes += registration.num_bytes
        self._drop_release(key)  # what this rank said before it registered is over
        return ""

    def drop_held(self, key: SendKey) -> Registration | None:
        held = self._held.get(key.transfer_id, {})
        registration = held.pop(key, None)
        if registration is not None:
            self._num_held -= 1
            self._held_bytes -= registration.num_bytes
            if not held:
                del self._held[key.transfer_id]
        return registration

    def hold_release(self, release: HeldRelease) -> None:
        """Keeps a release until its request comes. Raises ProtocolError (peer) if the table is full."""
        key = release.key
        if self._num_released >= self._max_held:
            raise ProtocolError("peer", f"{self._max_held} releases wait already")
        self._drop_release(key)
        self._released.setdefault(key.transfer_id, {})[key] = release
        self._num_released += 1

    def announce(self, transfer_id: TransferId, agent: AgentName, now_s: float) -> bool:
        """Notes, or renews, that a consumer will come. False if the table is full."""
        if transfer_id not in self._announced and len(self._announced) >= self._max_held:
            return False
        self._announced[transfer_id] = (agent, now_s)
        return True

    def announced_s(self, transfer_id: TransferId) -> float | None:
        """When the transfer was last announced, or None."""
        entry = self._announced.get(transfer_id)
        return None if entry is None else entry[1]

    def expire(self, before_s: float) -> list[Registration]:
        """Forgets what has waited since before `before_s`; returns the registrations among it."""
        releases = [release for of in self._released.values() for release in of.values()]
        for release in releases:
            if release.since_s < before_s:
                self._drop_release(release.key)
        stale = [tid for tid, (_, s) in self._announced.items() if s < before_s and tid not in self._local]
        for transfer_id in stale:
            del self._announced[transfer_id]
        old = [registration for registration in self.held() if registration.received_s < before_s]
        for registration in old:
            self.drop_held(registration.key)
        return old

    def _drop_release(self, key: SendKey) -> None:
        of_transfer = self._released.get(key.transfer_id, {})
        if of_transfer.pop(key, None) is not None:
            self._num_released -= 1
            if not of_transfer:
                del self._released[key.transfer_id]
