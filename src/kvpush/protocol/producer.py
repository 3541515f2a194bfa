"""P's half of the push protocol at one rank: registrations in, pieces and commits out.

Sans-I/O: every method takes the time and returns actions. `ProtocolError` means that nothing has changed; with fault
"peer" the caller counts and drops the message.
"""

from __future__ import annotations

from kvpush.protocol.actions import Action, Connect, ReportSent, SendEnded, SendTo, TransferUnknown, WritePiece
from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import AgentName, RequestId, SendKey, TransferId
from kvpush.protocol.liveness import Liveness
from kvpush.protocol.messages import (
    Accepted,
    Announce,
    Cancel,
    Commit,
    Failed,
    PieceDigest,
    Ping,
    Pong,
    Quiet,
    Register,
    Release,
    ToProducer,
)
from kvpush.protocol.prompt import PromptIdentity
from kvpush.protocol.rendezvous import Assembly, LocalRequest, Registration, Rendezvous
from kvpush.protocol.send import Piece, Send
from kvpush.protocol.timing import Timing
from kvpush.protocol.tombstones import Tombstone, Tombstones
from kvpush.protocol.transitions import SendEvent, SendState


class Producer:
    """The table of one P rank.

    block_size: tokens per block of this rank's cache. stream: push whole blocks after every chunk, not only at the end.
    """

    def __init__(self, timing: Timing, *, block_size: int, stream: bool = True, max_tombstones: int = 16_384) -> None:
        self._timing = timing
        self._block_size = block_size
        self._stream = stream
        self._rendezvous = Rendezvous()
        self._assembly = Assembly()
        self._sends: dict[SendKey, Send] = {}
        self._tombstones = Tombstones(max_tombstones)
        self._liveness: Liveness[AgentName] = Liveness(timing.peer_timeout_s, timing.ping_interval_s)
        self._connected: set[AgentName] = set()
        self._next_piece = 0

    # What others may look at

    @property
    def idle(self) -> bool:
        """Nothing is going on; only tombstones may be left."""
        return self._rendezvous.empty and not self._sends and not len(self._assembly)

    @property
    def num_tombstones(self) -> int:
        return len(self._tombstones)

    def send(self, key: SendKey) -> Send | None:
        return self._sends.get(key)

    def in_flight(self, request_id: RequestId) -> int:
        """Pieces of a request that were posted and have not ended: its blocks are being read."""
        return sum(len(send.pieces) for send in self._sends.values() if send.local.request_id == request_id)

    # Events from this engine

    def on_request(
        self, request_id: RequestId, transfer_id: TransferId, prompt: PromptIdentity, consumers: int, now_s: float
    ) -> list[Action]:
        """The engine has a request to hand over to `consumers` D requests. Raises ProtocolError for a duplicate id."""
        if consumers < 1:
            raise ProtocolError("local", f"transfer {transfer_id} has {consumers} consumers")
        local = LocalRequest(request_id, transfer_id, prompt, consumers, known_s=now_s)
        held, released = self._rendezvous.add_local(local)
        local.satisfied.update(key.consumer for key in released)
        actions: list[Action] = []
        for registration in held:
            actions += self._match(local, registration, now_s)
        return actions

    def on_tokens(self, request_id: RequestId, ready: int, now_s: float) -> list[Action]:
        """The KV of prompt tokens [0, ready) exists in the request's blocks (its event has passed)."""
        local = self._local(request_id)
        if not 0 <= ready <= local.prompt.num_tokens:
            raise ProtocolError("local", f"{ready} tokens of {request_id}, its prompt has {local.prompt.num_tokens}")
        local.ready = max(local.ready, ready)
        return self._pump_all(local, now_s)

    def on_preempted(self, request_id: RequestId, now_s: float) -> list[Action]:
        """The request's blocks are gone. Pieces in flight must have ended, or `on_poisoned` must come first."""
        local = self._local(request_id)
        local.ready = 0
        for send in self._sends_of(local):
            if not send.terminal:
                send.step(SendEvent.PREEMPT)
                send.waiting_since_s = now_s
        return []

    def on_finished(self, request_id: RequestId, now_s: float) -> list[Action]:
        """The engine is done with the request and holds its blocks until `ReportSent`."""
        local = self._local(request_id)
        if not local.complete:
            return self.on_aborted(request_id, now_s, "incomplete")
        local.finished, local.ended_s = True, now_s
        return self._pump_all(local, now_s) + self._settle(local)

    def on_aborted(self, request_id: RequestId, now_s: float, reason: str = "aborted") -> list[Action]:
        """The request ended without its whole KV, or its client left; blocks are held until `ReportSent`."""
        local = self._local(request_id)
        local.finished, local.ended_s = True, now_s
        actions: list[Action] = []
        for send in self._sends_of(local):
            actions += self._fail(send, reason, now_s)
        return actions + self._close(local, reason, now_s)

    def on_poisoned(self, request_id: RequestId, now_s: float) -> list[Action]:
        """The engine takes the blocks although they are being read: no send of the request can commit any more."""
        local = self._local(request_id)
        local.poisoned = True
        actions: list[Action] = []
        for send in self._sends_of(local):
            actions += self._fail(send, "poisoned", now_s)
        return actions + self._settle(local)

    def on_pressure(self, now_s: float) -> list[Action]:
        """The engine cannot admit its next request: drop the oldest complete one that nobody has registered for."""
        unclaimed = [local for local in self._rendezvous.locals() if local.finished and not self._sends_of(local)]
        if not unclaimed:
            return []
        oldest = min(unclaimed, key=lambda local: local.ended_s)
        return [TransferUnknown(oldest.transfer_id, "pressure"), *self._close(oldest, "pressure", now_s)]

    # Events from the transport

    def on_connected(self, agent: AgentName, now_s: float) -> list[Action]:
        """Pieces can be written to this incarnation from now on."""
        self._connected.add(agent)
        actions: list[Action] = []
        for send in list(self._sends.values()):
            if send.registration.agent == agent:
                actions += self._pump(send, now_s)
        return actions

    def on_unreachable(self, agent: AgentName, reason: str, now_s: float) -> list[Action]:
        """The peer cannot be reached, refuses us, or is another one: nothing can be delivered to it."""
        self._connected.discard(agent)
        actions: list[Action] = []
        for registration in self._rendezvous.held():
            if registration.agent == agent:
                self._rendezvous.drop_held(registration.key)
                self._bury(registration, reason, None, now_s)
        for send in list(self._sends.values()):
            if send.registration.agent == agent:
                actions += self._fail(send, reason, now_s)
        return actions

    def on_written(
        self, key: SendKey, piece: int, num_bytes: int, digest: PieceDigest | None, now_s: float
    ) -> list[Action]:
        """Every byte of a piece has landed."""
        send, ended = self._end_piece(key, piece)
        if ended.attempt == send.attempt:
            send.num_bytes += num_bytes
            send.num_writes += 1
            if digest is not None:
                send.digests.append(digest)
        return self._after_piece(send, now_s)

    def on_write_failed(self, key: SendKey, piece: int, reason: str, now_s: float) -> list[Action]:
        """A piece could not be posted, or its write has failed; nothing of it is in flight any more."""
        send, ended = self._end_piece(key, piece)
        actions = self._fail(send, reason, now_s) if ended.attempt == send.attempt else []
        return actions + (self._after_piece(send, now_s) if key in self._sends else [])

    def on_not_posted(self, key: SendKey, piece: int, now_s: float) -> list[Action]:
        """A piece was held back because its blocks are being preempted; it is owed again from its first token on."""
        send, ended = self._end_piece(key, piece)
        if ended.attempt == send.attempt and not send.terminal:
            send.step(SendEvent.UNPOST)
            send.posted = min(send.posted, ended.first_token)
        return self._after_piece(send, now_s)

    def on_message(self, agent: AgentName, message: ToProducer, now_s: float) -> list[Action]:
        """A message from a D rank. Raises ProtocolError with fault "peer" for what makes no sense."""
        self._liveness.heard(agent, now_s)
        match message:
            case Register():
                return self._on_register(agent, message, now_s)
            case Cancel():
                return self._on_cancel(agent, message, now_s)
            case Release():
                return self._on_release(message, now_s)
            case Announce():
                self._rendezvous.announce(message.transfer_id, agent, now_s)
                return []
            case Ping():
                return self._on_ping(agent, message, now_s)

    def on_tick(self, now_s: float) -> list[Action]:
        """Looks at every bound; to be called a few times a second while anything is going on."""
        timing = self._timing
        actions: list[Action] = []
        for registration in self._rendezvous.expire(now_s - timing.rendezvous_timeout_s):
            actions.append(TransferUnknown(registration.key.transfer_id, "no_request"))
            actions += self._refuse(registration, "no_request", now_s)
        for local in self._rendezvous.locals():
            actions += self._check_local(local, now_s)
        for send in list(self._sends.values()):
            idle_s = now_s - send.waiting_since_s
            queued = send.state is SendState.WAITING and not (send.local.finished or send.local.computing)
            if queued and idle_s > timing.admission_timeout_s:
                actions += self._fail(send, "not_scheduled", now_s)
        agents = {send.registration.agent for send in self._sends.values() if not send.terminal}
        self._liveness.keep(agents | {registration.agent for registration in self._rendezvous.held()})
        for agent in self._liveness.lost(now_s):
            actions += self.on_unreachable(agent, "peer_lost", now_s)
        self._tombstones.expire(now_s - timing.tombstone_s)
        self._assembly.expire(now_s - timing.rendezvous_timeout_s)
        return actions

    # Messages

    def _on_register(self, agent: AgentName, message: Register, now_s: float) -> list[Action]:
        send = self._sends.get(message.key)
        stone = self._tombstones.get(message.key)
        if send is not None and send.registration.agent == agent and message.attempt <= send.attempt:
            # The same again, or one that was overtaken by its successor.
            return self._accept(send) if message.attempt == send.attempt and not send.terminal else []
        if stone is not None and stone.agent == agent and message.attempt <= stone.attempt:
            return self._repeat(stone)
        if message.attempt <= self._tombstones.floor(agent):
            failed = Failed(message.key, message.attempt, "stale", quiet=True)
            return [SendTo(message.sender, failed, agent)]
        registration = self._assembly.add(agent, message, now_s)
        if registration is None:
            return []
        self._liveness.watch(agent, now_s)
        local = self._rendezvous.local(message.key.transfer_id)
        if send is not None:
            if send.registration.agent == agent and not send.terminal and send.local is local:
                send.restart(registration, now_s)
                return self._accept(send) + self._pump(send, now_s)
            return self._refuse(registration, "duplicate", now_s, remember=False)
        if local is None:
            if stone is not None and stone.agent is None:
                return self._refuse(registration, stone.reason, now_s)
            try:
                self._rendezvous.hold(registration)
            except ProtocolError:
                return self._refuse(registration, "duplicate", now_s, remember=False)
            return [] if agent in self._connected else [Connect(registration.address, agent)]
        return self._match(local, registration, now_s)

    def _on_cancel(self, agent: AgentName, message: Cancel, now_s: float) -> list[Action]:
        quiet = SendTo(message.sender, Quiet(message.key, message.attempt), agent)
        held = self._rendezvous.get_held(message.key)
        if held is not None and held.agent == agent and held.attempt <= message.attempt:
            self._rendezvous.drop_held(message.key)
        send = self._sends.get(message.key)
        if send is not None and send.registration.agent == agent and send.attempt <= message.attempt:
            if not send.terminal:
                return self._end(send, SendEvent.CANCEL, "cancelled", now_s)
            if send.pieces:
                return []  # Quiet follows when they have ended
        stone = self._tombstones.get(message.key)
        if stone is None or stone.agent != agent or stone.attempt < message.attempt:
            # Also for what we never heard of: the registration may still be on its way.
            self._tombstones.put(
                Tombstone(message.key, message.attempt, agent, message.sender, "cancelled", quiet.message, now_s)
            )
        return [quiet]

    def _on_release(self, message: Release, now_s: float) -> list[Action]:
        local = self._rendezvous.local(message.key.transfer_id)
        if local is None:
            if self._tombstones.get(message.key) is None:
                self._rendezvous.hold_release(message.key, now_s)
            return []
        send = self._sends.get(message.key)
        if send is not None and not send.terminal:
            raise ProtocolError("peer", f"release of {message.key}, which is registered")
        taken = {other.key.consumer for other in self._sends_of(local)}
        released = set(range(local.consumers)) - taken if message.all_consumers else {message.key.consumer}
        local.satisfied.update(released)
        return self._settle(local)

    def _on_ping(self, agent: AgentName, message: Ping, now_s: float) -> list[Action]:
        known: list[SendKey] = []
        actions: list[Action] = []
        for key in message.registered:
            send, held, stone = self._sends.get(key), self._rendezvous.get_held(key), self._tombstones.get(key)
            if send is not None and send.registration.agent == agent:
                known.append(key)
                actions += [] if send.terminal else self._accept(send)
            elif held is not None and held.agent == agent:
                known.append(key)
            elif stone is not None and stone.agent == agent:
                known.append(key)
                actions += self._repeat(stone)
        for transfer_id in message.announced:
            self._rendezvous.announce(transfer_id, agent, now_s)
        return [*actions, SendTo(message.sender, Pong(message.seq, known), agent)]

    # Steps

    def _match(self, local: LocalRequest, registration: Registration, now_s: float) -> list[Action]:
        key = registration.key
        if registration.prompt != local.prompt:
            # The request itself goes on: the right consumer may still come.
            return self._refuse(registration, "prompt_mismatch", now_s)
        if key.consumer >= local.consumers or key.consumer in local.satisfied:
            return self._refuse(registration, "duplicate", now_s)
        if local.poisoned:
            return self._refuse(registration, "poisoned", now_s)
        send = self._sends[key] = Send(registration, local, waiting_since_s=now_s)
        local.registered.add(key.consumer)
        actions = self._accept(send)
        if registration.agent not in self._connected:
            actions.append(Connect(registration.address, registration.agent))
        return actions + self._pump(send, now_s)

    def _accept(self, send: Send) -> list[Action]:
        accepted = Accepted(send.key, send.attempt)
        return [SendTo(send.registration.address, accepted, send.registration.agent)]

    def _pump_all(self, local: LocalRequest, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for send in self._sends_of(local):
            actions += self._pump(send, now_s)
        return actions

    def _pump(self, send: Send, now_s: float) -> list[Action]:
        """Posts what is ready and not posted yet."""
        if send.state not in (SendState.WAITING, SendState.STREAMING) or send.registration.agent not in self._connected:
            return []
        limit = send.postable(self._block_size, self._stream)
        if limit <= send.posted:
            return []
        piece = self._next_piece
        send.step(SendEvent.POST_LAST if limit == send.num_tokens else SendEvent.POST)
        self._next_piece += 1
        first, send.posted = send.posted, limit
        send.waiting_since_s = now_s
        send.pieces[piece] = Piece(send.attempt, first, limit)
        agent = send.registration.agent
        return [WritePiece(send.key, send.attempt, piece, send.local.request_id, agent, first, limit)]

    def _after_piece(self, send: Send, now_s: float) -> list[Action]:
        if send.pieces:
            return []
        if send.state is SendState.DRAINING:
            return self._end(send, SendEvent.DRAINED, "", now_s)
        return self._bury_quiet(send, now_s, tell=True) if send.terminal else []

    def _fail(self, send: Send, reason: str, now_s: float) -> list[Action]:
        return [] if send.terminal else self._end(send, SendEvent.FAIL, reason, now_s)

    def _end(self, send: Send, event: SendEvent, reason: str, now_s: float) -> list[Action]:
        """Takes a send to its terminal state and tells D; `Quiet` waits for what is in flight."""
        send.step(event)
        send.reason = reason
        registration, key = send.registration, send.key
        actions: list[Action] = []
        if event is SendEvent.DRAINED:
            commit = Commit(key, send.attempt, send.num_tokens, send.num_bytes, send.num_writes, list(send.digests))
            actions.append(SendTo(registration.address, commit, registration.agent))
        elif event is SendEvent.FAIL:
            failed = Failed(key, send.attempt, reason[:500], quiet=not send.pieces)
            actions.append(SendTo(registration.address, failed, registration.agent))
        actions.append(
            SendEnded(
                key, send.local.request_id, send.state.value, reason, send.num_tokens, send.num_bytes, send.num_writes
            )
        )
        send.local.satisfied.add(key.consumer)
        if not send.pieces:
            actions += self._bury_quiet(send, now_s, tell=event is SendEvent.CANCEL)
        return actions

    def _bury_quiet(self, send: Send, now_s: float, *, tell: bool) -> list[Action]:
        """Nothing of a terminal send is in flight any more: say so, remember its end, free its request."""
        del self._sends[send.key]
        registration = send.registration
        if send.state is SendState.COMMITTED:
            last: Commit | Failed | Quiet = Commit(
                send.key, send.attempt, send.num_tokens, send.num_bytes, send.num_writes, list(send.digests)
            )
            actions: list[Action] = []
        else:
            quiet = Quiet(send.key, send.attempt)
            actions = [SendTo(registration.address, quiet, registration.agent)] if tell else []
            failed = Failed(send.key, send.attempt, send.reason[:500], quiet=True)
            last = failed if send.state is SendState.FAILED else quiet
        self._bury(registration, send.reason, last, now_s)
        return actions + self._settle(send.local)

    def _refuse(self, registration: Registration, reason: str, now_s: float, *, remember: bool = True) -> list[Action]:
        """Answers a registration that gets no send. Nothing was ever in flight for it.

        remember=False leaves the key to whom it belongs: a stranger's registration must not bury it.
        """
        failed = Failed(registration.key, registration.attempt, reason, quiet=True)
        if remember:
            self._bury(registration, reason, failed, now_s)
        ended = SendEnded(registration.key, None, SendState.FAILED.value, reason, registration.prompt.num_tokens, 0, 0)
        return [SendTo(registration.address, failed, registration.agent), ended]

    def _bury(self, of: Registration, reason: str, last: Commit | Failed | Quiet | None, now_s: float) -> None:
        self._tombstones.put(Tombstone(of.key, of.attempt, of.agent, of.address, reason, last, now_s))

    def _repeat(self, stone: Tombstone) -> list[Action]:
        if stone.last is None or stone.address is None:
            return []
        return [SendTo(stone.address, stone.last, stone.agent)]

    def _close(self, local: LocalRequest, reason: str, now_s: float) -> list[Action]:
        """No further consumer will be served; who comes late is told why at once."""
        for consumer in set(range(local.consumers)) - local.satisfied:
            key = SendKey(local.transfer_id, consumer)
            self._tombstones.put(Tombstone(key, 0, None, None, reason, None, now_s))
            local.satisfied.add(consumer)
        return self._settle(local)

    def _check_local(self, local: LocalRequest, now_s: float) -> list[Action]:
        """The bounds of a request that the engine has finished: unclaimed, and writes that do not end."""
        if not local.finished or local.reported:
            return []
        sends = self._sends_of(local)
        if all(send.terminal for send in sends) and len(local.satisfied) < local.consumers:
            announced_s = self._rendezvous.announced_s(local.transfer_id)
            timing = self._timing
            bound_s = timing.unclaimed_timeout_s if announced_s is None else timing.announced_timeout_s
            if now_s - local.ended_s > bound_s:
                return [TransferUnknown(local.transfer_id, "unclaimed"), *self._close(local, "unclaimed", now_s)]
        stuck = any(send.pieces for send in sends) and all(send.terminal for send in sends)
        if stuck and now_s - local.ended_s > self._timing.abort_drain_s and len(local.satisfied) >= local.consumers:
            # Its sends have failed, so nothing can commit; the late write can only reach memory that D still holds.
            local.poisoned = True
            return self._settle(local)
        return []

    def _settle(self, local: LocalRequest) -> list[Action]:
        """Frees the request once every consumer is satisfied and nothing reads its blocks (or it is poisoned)."""
        if not local.finished or local.reported or len(local.satisfied) < local.consumers:
            return []
        if not local.poisoned and any(send.pieces for send in self._sends_of(local)):
            return []
        local.reported = True
        self._rendezvous.remove_local(local)
        return [ReportSent(local.request_id)]

    def _local(self, request_id: RequestId) -> LocalRequest:
        local = self._rendezvous.by_request(request_id)
        if local is None:
            raise ProtocolError("local", f"request {request_id} is not known")
        return local

    def _sends_of(self, local: LocalRequest) -> list[Send]:
        keys = (SendKey(local.transfer_id, consumer) for consumer in sorted(local.registered))
        return [send for key in keys if (send := self._sends.get(key)) is not None and send.local is local]

    def _end_piece(self, key: SendKey, piece: int) -> tuple[Send, Piece]:
        send = self._sends.get(key)
        if send is None or piece not in send.pieces:
            raise ProtocolError("local", f"piece {piece} of {key} is not in flight")
        return send, send.pieces.pop(piece)
