"""D's half of the push protocol at one rank: registrations out, commits in, and the fence around D's memory.

Sans-I/O: every method takes the time and returns actions. `ProtocolError` means that nothing has changed; with fault
"peer" the caller counts and drops the message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvpush.protocol.actions import Action, SendTo
from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import AgentName, PeerAddress, RequestId, SendKey, TransferId
from kvpush.protocol.liveness import Liveness
from kvpush.protocol.messages import (
    Accepted,
    Announce,
    Commit,
    Failed,
    Lease,
    Message,
    Pong,
    Quiet,
    Register,
    Release,
    Staged,
    ToConsumer,
)
from kvpush.protocol.pings import Asked, Pings
from kvpush.protocol.prompt import PromptIdentity
from kvpush.protocol.receive import Receive
from kvpush.protocol.receive_table import ReceiveTable
from kvpush.protocol.timing import Timing
from kvpush.protocol.transitions import ReceiveState


class Consumer:
    """The table of one D rank. sender: where this rank answers; its ranks are written into every key."""

    def __init__(self, timing: Timing, sender: PeerAddress) -> None:
        self._timing = timing
        self._sender = sender
        self._receives = ReceiveTable(timing, sender)
        self._announced: dict[TransferId, frozenset[PeerAddress]] = {}
        self._liveness: Liveness[PeerAddress] = Liveness(timing.peer_timeout_s, timing.ping_interval_s)
        self._pings = Pings(sender)

    @property
    def idle(self) -> bool:
        """Nothing is awaited, held or announced."""
        return not (len(self._receives) or self._announced)

    @property
    def quarantined(self) -> list[Receive]:
        return [receive for receive in self._receives.all() if receive.state is ReceiveState.QUARANTINED]

    def receive(self, request_id: RequestId) -> Receive | None:
        return self._receives.get(request_id)

    def loading(self, agent: AgentName, key: SendKey, attempt: int) -> RequestId | None:
        """The request that this incarnation fills by this attempt; None if nobody waits for that (any more)."""
        receive = self._receives.by_key(key)
        if receive is None or not receive.active or agent not in receive.writers:
            return None
        return receive.request_id if receive.attempts.get(receive.writers[agent]) == attempt else None

    def expects(self, agent: AgentName) -> bool:
        """This incarnation has, or may have, something of ours to write."""
        return any(agent in receive.may_write for receive in self._receives.all())

    # Events from this engine

    def announce(
        self, transfer_id: TransferId, prompt: PromptIdentity, ranks: Iterable[PeerAddress], now_s: float
    ) -> list[Action]:
        """The scheduler has a request, but no blocks yet: P shall not give up its own half meanwhile.

        Several requests of one transfer share one announcement; the first that registers or releases ends it.
        """
        message = Announce(transfer_id, prompt, self._sender)
        self._announced[transfer_id] = addresses = frozenset(ranks)
        for address in addresses:
            self._liveness.watch(address, now_s)
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
        targets: Mapping[PeerAddress, int] | None = None,
        direct: bool = True,
    ) -> list[Action]:
        """The request has blocks: each rank shall write what it owes of tokens [first_token, num_tokens).

        blocks: the encoded block table as parts (outer) of KV cache groups (inner), each part at most MAX_TABLE_BYTES.
        targets: to how many ranks of this engine each of `ranks` writes for this request, 1 where it is not named.
        direct: they may write into the blocks; otherwise only into staging slots, and failed blocks are free at once.
        From here on the caller may not reuse the blocks before ReportReceived or ReportReleased.
        Raises ProtocolError (local), and nobody hears of the request, if it or the key is registered already, or if a
        value cannot stand in a message.
        """
        key = key.at(self._sender)
        addresses = frozenset(ranks)
        actions = self._receives.add(
            request_id, key, prompt, first_token, blocks, consumers, addresses, targets or {}, now_s, direct
        )
        self.withdraw(key.transfer_id)
        for address in addresses:
            self._liveness.watch(address, now_s)
        return actions

    def release(self, key: SendKey, ranks: Iterable[PeerAddress], *, all_consumers: bool = False) -> list[Action]:
        """The consumer (or every one that has not registered) needs nothing from P."""
        message = Release(key.at(self._sender), self._receives.next_attempt(), self._sender, all_consumers)
        self.withdraw(key.transfer_id)
        return [SendTo(address, message) for address in sorted(set(ranks), key=str)]

    def cancel(self, request_id: RequestId, now_s: float) -> list[Action]:
        """The client has left: ReportReleased follows as soon as nobody can write any more."""
        receive = self._receives.get(request_id)
        if receive is None:
            return []
        receive.wanted = False
        return self._receives.fail(receive, "cancelled", now_s) if receive.active else []

    def wants_sent(self, message: Message) -> bool:
        """Whether a message that had to wait for its connection may still leave.

        A registration of a request that was given up meanwhile must not: its memory may be somebody else's already.
        """
        if not isinstance(message, Register):
            return True
        receive = self._receives.by_key(message.key)
        return receive is not None and receive.active and message.attempt in receive.attempts.values()

    # Events from the transport

    def on_delivered(self, address: PeerAddress, agent: AgentName, message: Message, now_s: float) -> list[Action]:
        """A message has gone, or may have gone, to an incarnation: who has a registration may write from now on."""
        if not isinstance(message, Register):
            return []
        receive = self._receives.by_key(message.key)
        if receive is None or message.attempt < receive.first_attempt or address not in receive.ranks.expected:
            return []
        replaced = receive.others_at(address, agent)
        receive.admit(agent, address)
        if not receive.active:
            # It left although it was not wanted any more: the fence now waits for this incarnation too.
            return [self._receives.cancellation(receive, agent)]
        # The old incarnation may still write; only its proven end makes the memory safe.
        return self._receives.fail(receive, "peer_restarted", now_s) if replaced else []

    def on_undelivered(self, address: PeerAddress, message: Message, reason: str, now_s: float) -> list[Action]:
        """A message has certainly not been sent: who never got a registration cannot write.

        If it may have arrived all the same, say `on_delivered`, then `on_disconnected`.
        """
        if not isinstance(message, Register):
            return []
        receive = self._receives.by_key(message.key)
        if receive is None or not receive.active or receive.attempts.get(address) != message.attempt:
            return []
        return self._receives.fail(receive, reason, now_s)

    def on_disconnected(self, agent: AgentName, now_s: float) -> list[Action]:
        """The connection to an incarnation broke: what it had not committed is registered once more with its rank."""
        actions: list[Action] = []
        for receive in self._receives.all():
            address = receive.writers.get(agent)
            if address is not None and receive.active and address in receive.ranks.pending:
                actions += self._receives.restart(receive, address, now_s)
        return actions

    def on_dead(self, agent: AgentName, now_s: float) -> list[Action]:
        """An incarnation's process is proven gone: it delivers nothing. What it had sent may land until `on_gone`."""
        actions: list[Action] = []
        for receive in self._receives.all():
            address = receive.writers.get(agent)
            if address is not None and receive.active and address in receive.ranks.pending:
                actions += self._receives.fail(receive, "peer_gone", now_s)
        return actions

    def on_gone(self, agent: AgentName, now_s: float) -> list[Action]:
        """Proof that nothing of an incarnation lands any more: its process is gone, and its connection has ended."""
        actions: list[Action] = []
        for receive in self._receives.all():
            address = receive.writers.get(agent)
            if address is None:
                continue
            receive.quiet.add(agent)
            if receive.active and address in receive.ranks.pending:
                actions += self._receives.fail(receive, "peer_gone", now_s)
            else:
                actions += self._receives.release_if_quiet(receive)
        return actions

    def on_verified(self, request_id: RequestId, good: bool, now_s: float) -> list[Action]:
        """The digests of a Verify have been compared."""
        receive = self._receives.get(request_id)
        if receive is None or receive.state is not ReceiveState.RECEIVING or not receive.ranks.complete:
            return []
        return self._receives.complete(receive) if good else self._receives.fail(receive, "integrity", now_s)

    def on_message(self, agent: AgentName, message: ToConsumer, now_s: float) -> list[Action]:
        """A message from a P rank. Raises ProtocolError with fault "peer" for what makes no sense."""
        if isinstance(message, Pong):
            return self._on_pong(agent, message, now_s)
        if isinstance(message, Staged):
            raise ProtocolError("local", "staged blocks are not this half's business")
        receive = self._receives.by_key(message.key)
        if receive is None or message.attempt < receive.first_attempt:
            return []  # it has ended: late or repeated
        address = receive.writers.get(agent)
        if address is None:
            raise ProtocolError("peer", f"{agent} was not asked to write {message.key}")
        self._liveness.heard(address, now_s)
        current = receive.attempts[address]
        if message.attempt < current:
            return []  # about an attempt that is over
        if message.attempt > current:
            raise ProtocolError("peer", f"attempt {message.attempt} of {message.key}, the last one is {current}")
        match message:
            case Accepted():
                self._receives.accept(receive, address, now_s)
                return []
            case Commit():
                return self._receives.commit(receive, agent, message)
            case Failed():
                return self._receives.give_up(receive, agent, message.reason, message.quiet, now_s)
            case Quiet():
                return self._receives.give_up(receive, agent, "stopped", True, now_s)

    def on_tick(self, now_s: float) -> list[Action]:
        """Looks at every bound, pings, and repeats unanswered cancellations."""
        timing = self._timing
        actions: list[Action] = []
        for receive in self._receives.all():
            waited_s = now_s - receive.since_s
            if receive.fenced:
                actions += self._receives.check_fence(receive, now_s)
            elif waited_s > timing.peer_timeout_s and self._silent(receive, now_s):
                actions += self._receives.fail(receive, "peer_lost", now_s)
            elif not receive.all_accepted and waited_s > timing.rendezvous_timeout_s + timing.peer_timeout_s:
                actions += self._receives.fail(receive, "no_answer", now_s)
        return actions + self._ping(now_s)

    # Steps

    def _silent(self, receive: Receive, now_s: float) -> bool:
        """One of the ranks that have yet to commit has said nothing for longer than the timeout."""
        limit_s = self._timing.peer_timeout_s
        return any(self._liveness.silent_s(address, now_s) > limit_s for address in receive.ranks.pending)

    def _ping(self, now_s: float) -> list[Action]:
        leases: dict[PeerAddress, list[Asked]] = {}
        for receive in self._receives.all():
            for address in receive.ranks.pending if receive.active else ():
                lease = Lease(receive.key, receive.attempts[address])
                leases.setdefault(address, []).append(Asked(lease, address in receive.accepted))
        announced: dict[PeerAddress, list[TransferId]] = {}
        for transfer_id, addresses in self._announced.items():
            for address in addresses:
                announced.setdefault(address, []).append(transfer_id)
        self._liveness.keep(set(leases) | set(announced))
        return [
            SendTo(address, ping)
            for address in self._liveness.due(now_s)
            for ping in self._pings.ask(address, leases.get(address, []), announced.get(address, []))
        ]

    def _on_pong(self, agent: AgentName, message: Pong, now_s: float) -> list[Action]:
        answered = self._pings.answered(message)
        if answered is None:
            return []
        address, leases = answered
        self._liveness.heard(address, now_s)
        known = set(message.known)
        actions: list[Action] = []
        for asked in leases:
            receive = self._receives.by_key(asked.lease.key)
            if receive is None or not receive.active or address not in receive.ranks.pending:
                continue
            if receive.attempts[address] != asked.lease.attempt or address not in receive.writers.values():
                continue  # registered again since, or not registered with anybody yet
            if agent not in receive.writers:
                actions += self._receives.fail(receive, "peer_restarted", now_s)
            elif asked.lease.key in known:
                continue
            elif address not in receive.accepted:
                actions += self._receives.registration(receive, address, agent)
            elif asked.accepted:
                # It had accepted, and has forgotten: what it wrote and what it will write is unknown.
                actions += self._receives.fail(receive, "forgotten", now_s)
        return actions
