"""All receives of one D rank and their steps, whoever caused them: P's messages, the engine or the transport."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvpush.protocol.actions import (
    Action,
    Quarantined,
    ReportFailed,
    ReportReceived,
    ReportReleased,
    SendTo,
    Verify,
)
from kvpush.protocol.commits import CommitSet
from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import AgentName, PeerAddress, RequestId, SendKey
from kvpush.protocol.messages import MAX_TABLE_BYTES, Cancel, Commit
from kvpush.protocol.prompt import PromptIdentity
from kvpush.protocol.receive import Receive
from kvpush.protocol.timing import Timing
from kvpush.protocol.transitions import ReceiveEvent, ReceiveState

MAX_RESTARTS = 1
"""Registrations after the first one of a transfer; more than one lost connection is a failure."""


class ReceiveTable:
    """At most one receive for each request and each key, until it is received or its memory is free."""

    def __init__(self, timing: Timing, sender: PeerAddress) -> None:
        self._timing = timing
        self._sender = sender
        self._by_request: dict[RequestId, Receive] = {}
        self._by_key: dict[SendKey, Receive] = {}
        self._last_attempt = 0

    def __len__(self) -> int:
        return len(self._by_request)

    def get(self, request_id: RequestId) -> Receive | None:
        return self._by_request.get(request_id)

    def by_key(self, key: SendKey) -> Receive | None:
        return self._by_key.get(key)

    def all(self) -> list[Receive]:
        return list(self._by_request.values())

    def next_attempt(self) -> int:
        """A number that this rank has never used."""
        self._last_attempt += 1
        return self._last_attempt

    def add(
        self,
        request_id: RequestId,
        key: SendKey,
        prompt: PromptIdentity,
        first_token: int,
        blocks: list[list[bytes]],
        consumers: int,
        ranks: Iterable[PeerAddress],
        targets: Mapping[PeerAddress, int],
        now_s: float,
        direct: bool = True,
    ) -> list[Action]:
        """Registers a request with every rank. Raises ProtocolError (local) as `Consumer.register` says."""
        if request_id in self._by_request or key in self._by_key:
            raise ProtocolError("local", f"{key} or {request_id} is registered already")
        if not blocks or any(len(groups) != len(blocks[0]) for groups in blocks):
            raise ProtocolError("local", f"the block table of {request_id} is empty, or its parts differ in groups")
        if any(sum(len(table) for table in groups) > MAX_TABLE_BYTES for groups in blocks):
            raise ProtocolError("local", f"a part of the block table of {request_id} exceeds {MAX_TABLE_BYTES} bytes")
        commits = CommitSet(ranks)
        receive = Receive(
            request_id, key, prompt, first_token, blocks, consumers, commits, now_s, self._last_attempt + 1,
            dict(targets), direct=direct,
        )  # fmt: skip
        actions: list[Action] = []
        try:
            for address in sorted(commits.expected, key=str):
                actions += self.registration(receive, address)
        except ValueError as error:
            raise ProtocolError("local", f"{request_id} cannot be registered: {error}") from None
        receive.step(ReceiveEvent.REGISTER)
        self._last_attempt = receive.first_attempt
        self._by_request[request_id] = self._by_key[key] = receive
        return actions

    def registration(self, receive: Receive, address: PeerAddress, agent: AgentName | None = None) -> list[Action]:
        """The messages that register with one rank; agent: only with this incarnation."""
        return [SendTo(address, message, agent) for message in receive.registration(address, self._sender)]

    def restart(self, receive: Receive, address: PeerAddress, now_s: float) -> list[Action]:
        """Registers once more with a rank whose connection broke, or gives up."""
        if receive.restarts >= MAX_RESTARTS:
            return self.fail(receive, "disconnected", now_s)
        receive.restart(address, self.next_attempt(), now_s)
        return self.registration(receive, address)

    def accept(self, receive: Receive, address: PeerAddress, now_s: float) -> None:
        """A rank has the registration and the request."""
        if not receive.active:
            return
        receive.accepted.add(address)
        if receive.state is ReceiveState.REGISTERED and receive.all_accepted:
            receive.step(ReceiveEvent.ACCEPT)
            receive.since_s = now_s

    def commit(self, receive: Receive, agent: AgentName, message: Commit) -> list[Action]:
        """An incarnation has written everything. Raises ProtocolError (peer) if that is not what is owed."""
        if message.num_tokens != receive.prompt.num_tokens:
            raise ProtocolError("peer", f"commit of {message.num_tokens} tokens, {receive.prompt.num_tokens} are owed")
        # A commit is also a quiet: all that this incarnation had posted has landed.
        if not receive.active:
            receive.quiet.add(agent)
            return self.release_if_quiet(receive)
        address = receive.writers[agent]
        if not receive.ranks.commit(address):
            return []  # the same again
        receive.step(ReceiveEvent.COMMIT)
        receive.quiet.add(agent)
        receive.accepted.add(address)  # it may have overtaken its acceptance
        receive.num_bytes += message.num_bytes
        receive.digests += [(address, digest) for digest in message.digests]
        if not receive.ranks.complete:
            return []
        return [Verify(receive.request_id, tuple(receive.digests))] if receive.digests else self.complete(receive)

    def complete(self, receive: Receive) -> list[Action]:
        """Everything has landed and every check passed."""
        receive.step(ReceiveEvent.COMPLETE)
        self._drop(receive)
        return [ReportReceived(receive.request_id, receive.prompt.num_tokens, receive.num_bytes)]

    def give_up(self, receive: Receive, agent: AgentName, reason: str, quiet: bool, now_s: float) -> list[Action]:
        """An incarnation will not deliver; quiet: nor has it anything in flight."""
        if quiet:
            receive.quiet.add(agent)
        return self.fail(receive, reason, now_s) if receive.active else self.release_if_quiet(receive)

    def fail(self, receive: Receive, reason: str, now_s: float) -> list[Action]:
        """The engine hears of it at once; the memory stays until every writer is quiet."""
        receive.step(ReceiveEvent.FAIL)
        receive.reason = reason
        receive.since_s = receive.last_cancel_s = now_s
        actions: list[Action] = [ReportFailed(receive.request_id, reason)] if receive.wanted else []
        for agent in receive.may_write:
            actions.append(self.cancellation(receive, agent))
        return actions + self.release_if_quiet(receive)

    def cancellation(self, receive: Receive, agent: AgentName) -> Action:
        """What an incarnation that may write is told; it answers `Quiet`."""
        address = receive.writers[agent]
        return SendTo(address, Cancel(receive.key, receive.attempts[address], self._sender), agent)

    def release_if_quiet(self, receive: Receive) -> list[Action]:
        """Who never got a registration has nothing to write; all others must have said quiet, or be gone."""
        if not receive.fenced or receive.exposed:
            return []
        receive.step(ReceiveEvent.QUIET)
        self._drop(receive)
        return [ReportReleased(receive.request_id)]

    def check_fence(self, receive: Receive, now_s: float) -> list[Action]:
        """Repeats cancellations that were not answered; in the end the memory goes into quarantine."""
        actions: list[Action] = []
        # A writer in quarantine does not read: what is said to it piles up where it will find it.
        quarantined = receive.state is ReceiveState.QUARANTINED
        interval_s = self._timing.peer_timeout_s if quarantined else self._timing.ping_interval_s
        if now_s - receive.last_cancel_s >= interval_s:
            receive.last_cancel_s = now_s
            actions += [self.cancellation(receive, agent) for agent in receive.may_write]
        if receive.state is ReceiveState.FAILING and now_s - receive.since_s > self._timing.peer_timeout_s:
            receive.step(ReceiveEvent.QUIET_TIMEOUT)
            receive.quarantined_s = now_s
            actions.append(Quarantined(receive.request_id, self._writers(receive)))
        elif self._expired(receive, now_s):
            receive.step(ReceiveEvent.EXPIRE)
            self._drop(receive)
            actions.append(ReportReleased(receive.request_id, unproven=self._writers(receive)))
        return actions

    def _expired(self, receive: Receive, now_s: float) -> bool:
        """Whether a quarantine has lasted longer than the configuration allows: not by default, no time is a proof."""
        after_s = self._timing.quarantine_release_after_s
        quarantined = receive.state is ReceiveState.QUARANTINED
        return quarantined and after_s is not None and now_s - receive.quarantined_s > after_s

    @staticmethod
    def _writers(receive: Receive) -> tuple[PeerAddress, ...]:
        return tuple(sorted(set(receive.may_write.values()), key=str))

    def _drop(self, receive: Receive) -> None:
        del self._by_request[receive.request_id]
        del self._by_key[receive.key]
