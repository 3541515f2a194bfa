"""D's half of the push protocol at one rank: registrations out, commits in, and the fence around D's memory.

Sans-I/O: every method takes the time and returns actions. `ProtocolError` means that nothing has changed; with fault
"peer" the caller counts and drops the message.
"""

from __future__ import annotations

from collections.abc import Iterable

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
from kvpush.protocol.ids import AgentName, PeerAddress, RequestId, SendKey, TransferId
from kvpush.protocol.liveness import Liveness
from kvpush.protocol.messages import (
    Accepted,
    Announce,
    Cancel,
    Commit,
    Failed,
    Message,
    Ping,
    Pong,
    Quiet,
    Register,
    Release,
    ToConsumer,
)
from kvpush.protocol.prompt import PromptIdentity
from kvpush.protocol.receive import Receive
from kvpush.protocol.timing import Timing
from kvpush.protocol.transitions import ReceiveEvent, ReceiveState

MAX_RESTARTS = 1
"""Registrations after the first one of a transfer; more than one lost connection is a failure."""

MAX_KEYS_PER_PING = 128
"""Keeps a ping of the longest ids below the size of a message."""


class Consumer:
    """The table of one D rank."""

    def __init__(self, timing: Timing, sender: PeerAddress) -> None:
        self._timing = timing
        self._sender = sender
        self._by_request: dict[RequestId, Receive] = {}
        self._by_key: dict[SendKey, Receive] = {}
        self._announced: dict[TransferId, tuple[PromptIdentity, frozenset[PeerAddress]]] = {}
        self._liveness: Liveness[PeerAddress] = Liveness(timing.peer_timeout_s, timing.ping_interval_s)
        self._pinged: dict[int, tuple[PeerAddress, list[SendKey]]] = {}
        self._last_attempt = 0
        self._last_ping = 0

    @property
    def idle(self) -> bool:
        """Nothing is awaited, held or announced."""
        return not (self._by_request or self._announced)

    @property
    def quarantined(self) -> list[Receive]:
        return [receive for receive in self._by_request.values() if receive.state is ReceiveState.QUARANTINED]

    def receive(self, request_id: RequestId) -> Receive | None:
        return self._by_request.get(request_id)

    def expects(self, agent: AgentName) -> bool:
        """This incarnation has, or may have, something of ours to write."""
        return any(agent in receive.writers for receive in self._by_request.values())

    # Events from this engine

    def announce(
        self, transfer_id: TransferId, prompt: PromptIdentity, ranks: Iterable[PeerAddress], now_s: float
    ) -> list[Action]:
        """The scheduler has a request, but no blocks yet: P shall not give up its own half meanwhile."""
        addresses = frozenset(ranks)
        self._announced[transfer_id] = (prompt, addresses)
        for address in addresses:
            self._liveness.watch(address, now_s)
        message = Announce(transfer_id, prompt, self._sender)
        return [SendTo(address, message) for address in sorted(addresses, key=str)]

    def withdraw(self, transfer_id: TransferId) -> None:
        """An announced request has been registered, released, or is gone."""
        self._announced.pop(transfer_id, None)

    def register(
        self,
        request_id: RequestId,
        key: SendKey,
        prompt: PromptIdentity,
        first_token: int,
        blocks: list[list[bytes]],
        consumers: int,
        ranks: Iterable[PeerAddress],
        now_s: float,
    ) -> list[Action]:
        """The request has blocks: each rank shall write what it owes of tokens [first_token, num_tokens).

        blocks: the encoded block table as parts (outer) of KV cache groups (inner), each part fit for one message.
        From here on the caller may not reuse the blocks before ReportReceived or ReportReleased.
        Raises ProtocolError (local) if the request or the key is registered already.
        """
        if request_id in self._by_request or key in self._by_key:
            raise ProtocolError("local", f"{key} or {request_id} is registered already")
        receive = Receive(request_id, key, prompt, first_token, blocks, consumers, CommitSet(ranks), since_s=now_s)
        receive.attempt = self._last_attempt + 1
        messages = self._registration(receive)
        receive.step(ReceiveEvent.REGISTER)
        self._last_attempt = receive.attempt
        self._by_request[request_id] = self._by_key[key] = receive
        self.withdraw(key.transfer_id)
        actions: list[Action] = []
        for address in sorted(receive.ranks.expected, key=str):
            self._liveness.watch(address, now_s)
            actions += [SendTo(address, message) for message in messages]
        return actions

    def release(self, key: SendKey, ranks: Iterable[PeerAddress], *, all_consumers: bool = False) -> list[Action]:
        """The consumer needs nothing from P."""
        self.withdraw(key.transfer_id)
        message = Release(key, self._sender, all_consumers)
        return [SendTo(address, message) for address in sorted(set(ranks), key=str)]

    def cancel(self, request_id: RequestId, now_s: float) -> list[Action]:
        """The client has left: ReportReleased follows as soon as nobody can write any more."""
        receive = self._by_request.get(request_id)
        if receive is None:
            return []
        receive.wanted = False
        return self._fail(receive, "cancelled", now_s) if receive.active else []

    def wants_sent(self, message: Message) -> bool:
        """Whether a message that had to wait for its connection may still leave.

        A registration of a request that was given up meanwhile must not: its memory may be somebody else's already.
        """
        if not isinstance(message, Register):
            return True
        receive = self._by_key.get(message.key)
        return receive is not None and receive.active and receive.attempt == message.attempt

    # Events from the transport

    def on_delivered(self, address: PeerAddress, agent: AgentName, message: Message, now_s: float) -> list[Action]:
        """A message has gone to an incarnation: who has got a registration may write from now on."""
        if not isinstance(message, Register):
            return []
        receive = self._by_key.get(message.key)
        if receive is None or message.attempt != receive.attempt:
            return []
        before = receive.agent_at(address)
        receive.writers[agent] = address
        receive.quiet.discard(agent)
        if before is not None and before != agent:
            # The old incarnation may still write; only its proven end makes the memory safe.
            return self._fail(receive, "peer_restarted", now_s)
        return []

    def on_undelivered(self, address: PeerAddress, message: Message, reason: str, now_s: float) -> list[Action]:
        """A message could not be sent to an address. Who never got a registration cannot write."""
        if not isinstance(message, Register):
            return []
        receive = self._by_key.get(message.key)
        if receive is None or message.attempt != receive.attempt:
            return []
        known = address in receive.ranks.expected
        return self._fail(receive, reason, now_s) if receive.active and known else []

    def on_disconnected(self, agent: AgentName, now_s: float) -> list[Action]:
        """The connection to an incarnation broke: what it was to write is registered once more."""
        actions: list[Action] = []
        for receive in list(self._by_request.values()):
            if agent not in receive.writers or not receive.active:
                continue
            if receive.restarts >= MAX_RESTARTS:
                actions += self._fail(receive, "disconnected", now_s)
                continue
            receive.step(ReceiveEvent.RESTART)
            receive.restarts += 1
            self._last_attempt += 1
            receive.attempt = self._last_attempt
            receive.ranks.restart()
            receive.accepted.clear()
            receive.digests.clear()
            receive.num_bytes = 0
            receive.since_s = now_s
            for address in sorted(receive.ranks.expected, key=str):
                actions += [SendTo(address, message) for message in self._registration(receive)]
        return actions

    def on_gone(self, agent: AgentName, now_s: float) -> list[Action]:
        """Positive proof that an incarnation does not exist any more: it writes nothing."""
        actions: list[Action] = []
        for receive in list(self._by_request.values()):
            if agent not in receive.writers:
                continue
            if receive.active:
                actions += self._fail(receive, "peer_gone", now_s)
            receive.hush(agent)
            actions += self._release_if_quiet(receive)
        return actions

    def on_verified(self, request_id: RequestId, good: bool, now_s: float) -> list[Action]:
        """The digests of a Verify have been compared."""
        receive = self._by_request.get(request_id)
        if receive is None or receive.state is not ReceiveState.RECEIVING or not receive.ranks.complete:
            return []
        return self._complete(receive) if good else self._fail(receive, "integrity", now_s)

    def on_message(self, agent: AgentName, message: ToConsumer, now_s: float) -> list[Action]:
        """A message from a P rank. Raises ProtocolError with fault "peer" for what makes no sense."""
        if isinstance(message, Pong):
            return self._on_pong(agent, message, now_s)
        receive = self._by_key.get(message.key)
        if receive is None:
            return []  # it has ended: late or repeated
        address = receive.writers.get(agent)
        if address is None:
            raise ProtocolError("peer", f"{agent} was not asked to write {message.key}")
        self._liveness.heard(address, now_s)
        if message.attempt < receive.attempt:
            return []  # about an attempt that is over
        if message.attempt > receive.attempt:
            raise ProtocolError(
                "peer", f"attempt {message.attempt} of {message.key}, the last one is {receive.attempt}"
            )
        match message:
            case Accepted():
                return self._on_accepted(receive, address, now_s)
            case Commit():
                return self._on_commit(receive, agent, address, message)
            case Failed():
                if message.quiet:
                    receive.hush(agent)
                actions = self._fail(receive, message.reason, now_s) if receive.active else []
                return actions + self._release_if_quiet(receive)
            case Quiet():
                receive.hush(agent)
                actions = self._fail(receive, "stopped", now_s) if receive.active else []
                return actions + self._release_if_quiet(receive)

    def on_tick(self, now_s: float) -> list[Action]:
        """Looks at every bound, pings, and repeats unanswered cancellations."""
        timing = self._timing
        actions: list[Action] = []
        no_answer_s = timing.rendezvous_timeout_s + timing.peer_timeout_s
        for receive in list(self._by_request.values()):
            waited_s = now_s - receive.since_s
            if receive.active and waited_s > timing.peer_timeout_s and self._silent(receive, now_s):
                actions += self._fail(receive, "peer_lost", now_s)
            elif receive.state is ReceiveState.REGISTERED and waited_s > no_answer_s:
                actions += self._fail(receive, "no_answer", now_s)
            elif receive.fenced:
                actions += self._check_fence(receive, now_s)
        actions += self._pings(now_s)
        return actions

    # Steps

    def _registration(self, receive: Receive) -> list[Register]:
        return [
            Register(
                key=receive.key,
                attempt=receive.attempt,
                prompt=receive.prompt,
                first_token=receive.first_token,
                blocks=groups,
                sender=self._sender,
                consumers=receive.consumers,
                part=part,
                parts=len(receive.blocks),
            )
            for part, groups in enumerate(receive.blocks)
        ]

    def _on_accepted(self, receive: Receive, address: PeerAddress, now_s: float) -> list[Action]:
        if not receive.active:
            return []
        receive.accepted.add(address)
        if receive.state is ReceiveState.REGISTERED and receive.accepted == receive.ranks.expected:
            receive.step(ReceiveEvent.ACCEPT)
            receive.since_s = now_s
        return []

    def _on_commit(self, receive: Receive, agent: AgentName, address: PeerAddress, message: Commit) -> list[Action]:
        if message.num_tokens != receive.prompt.num_tokens:
            raise ProtocolError("peer", f"commit of {message.num_tokens} tokens, {receive.prompt.num_tokens} are owed")
        if not receive.active:
            # A commit is also a quiet: all that this incarnation had posted has landed.
            receive.hush(agent)
            return self._release_if_quiet(receive)
        if not receive.ranks.commit(address):
            return []  # the same again
        receive.step(ReceiveEvent.COMMIT, peer_fault=True)
        receive.num_bytes += message.num_bytes
        receive.digests += [(address, digest) for digest in message.digests]
        if not receive.ranks.complete:
            return []
        return [Verify(receive.request_id, tuple(receive.digests))] if receive.digests else self._complete(receive)

    def _complete(self, receive: Receive) -> list[Action]:
        receive.step(ReceiveEvent.COMPLETE)
        self._drop(receive)
        return [ReportReceived(receive.request_id, receive.prompt.num_tokens, receive.num_bytes)]

    def _fail(self, receive: Receive, reason: str, now_s: float) -> list[Action]:
        """The engine hears of it at once; the memory stays until every writer is quiet."""
        receive.step(ReceiveEvent.FAIL)
        receive.reason = reason
        receive.since_s = receive.last_cancel_s = now_s
        actions: list[Action] = [ReportFailed(receive.request_id, reason)] if receive.wanted else []
        receive.hush_unregistered()
        actions += self._cancels(receive)
        return actions + self._release_if_quiet(receive)

    def _cancels(self, receive: Receive) -> list[Action]:
        cancel = Cancel(receive.key, receive.attempt, self._sender)
        pending = receive.ranks.not_quiet
        return [
            SendTo(address, cancel, agent)
            for agent, address in receive.writers.items()
            if address in pending and agent not in receive.quiet
        ]

    def _release_if_quiet(self, receive: Receive) -> list[Action]:
        if not receive.fenced or not receive.ranks.quiet:
            return []
        receive.step(ReceiveEvent.QUIET)
        self._drop(receive)
        return [ReportReleased(receive.request_id)]

    def _check_fence(self, receive: Receive, now_s: float) -> list[Action]:
        actions: list[Action] = []
        if now_s - receive.last_cancel_s >= self._timing.ping_interval_s:
            receive.last_cancel_s = now_s
            actions += self._cancels(receive)
        if receive.state is ReceiveState.FAILING and now_s - receive.since_s > self._timing.peer_timeout_s:
            receive.step(ReceiveEvent.QUIET_TIMEOUT)
            actions.append(Quarantined(receive.request_id, tuple(sorted(receive.ranks.not_quiet, key=str))))
        return actions

    def _silent(self, receive: Receive, now_s: float) -> bool:
        """One of the ranks that must write has said nothing for longer than the timeout."""
        limit_s = self._timing.peer_timeout_s
        return any(self._liveness.silent_s(address, now_s) > limit_s for address in receive.ranks.expected)

    def _drop(self, receive: Receive) -> None:
        del self._by_request[receive.request_id]
        del self._by_key[receive.key]

    def _pings(self, now_s: float) -> list[Action]:
        keys: dict[PeerAddress, list[SendKey]] = {}
        for receive in self._by_request.values():
            for address in receive.ranks.expected:
                keys.setdefault(address, [])
                if receive.active:
                    keys[address].append(receive.key)
        announced: dict[PeerAddress, list[TransferId]] = {}
        for transfer_id, (_, addresses) in self._announced.items():
            for address in addresses:
                announced.setdefault(address, []).append(transfer_id)
        self._liveness.keep(set(keys) | set(announced))
        actions: list[Action] = []
        self._pinged = {seq: asked for seq, asked in self._pinged.items() if seq > self._last_ping - 1024}
        for address in self._liveness.due(now_s):
            mine, theirs = keys.get(address, []), announced.get(address, [])
            for start in range(0, max(len(mine), len(theirs), 1), MAX_KEYS_PER_PING):
                window = slice(start, start + MAX_KEYS_PER_PING)
                self._last_ping += 1
                self._pinged[self._last_ping] = (address, mine[window])
                actions.append(SendTo(address, Ping(self._last_ping, self._sender, mine[window], theirs[window])))
        return actions

    def _on_pong(self, agent: AgentName, message: Pong, now_s: float) -> list[Action]:
        if message.seq not in self._pinged:
            return []
        address, asked = self._pinged.pop(message.seq)
        self._liveness.heard(address, now_s)
        actions: list[Action] = []
        known = set(message.known)
        for key in asked:
            receive = self._by_key.get(key)
            if key in known or receive is None or receive.writers.get(agent) != address:
                continue
            if receive.state is ReceiveState.REGISTERED:
                actions += [SendTo(address, register, agent) for register in self._registration(receive)]
            elif receive.active and address not in receive.accepted:
                continue
            elif receive.active:
                # It had accepted and has forgotten: what it wrote and what it will write is unknown.
                actions += self._fail(receive, "forgotten", now_s)
        return actions
