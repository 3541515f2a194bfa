"""P's half of the push protocol at one rank: registrations in, pieces and commits out.

Sans-I/O: every method takes the time and returns actions. `ProtocolError` means that nothing has changed; with fault
"peer" the caller counts and drops the message.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpush.protocol.actions import Action, TransferUnknown
from kvpush.protocol.answers import Answers
from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import AgentName, RequestId, SendKey, TransferId, check_id
from kvpush.protocol.messages import (
    MAX_CONSUMERS,
    Announce,
    Cancel,
    Credit,
    Grant,
    PieceDigest,
    Ping,
    Register,
    Release,
    ToProducer,
)
from kvpush.protocol.peers import Peers
from kvpush.protocol.prompt import PromptIdentity
from kvpush.protocol.registration import Assembly
from kvpush.protocol.rendezvous import LocalRequest, Rendezvous
from kvpush.protocol.send import Send
from kvpush.protocol.send_table import SendTable
from kvpush.protocol.timing import Timing
from kvpush.protocol.tombstones import Tombstones
from kvpush.protocol.transitions import SendState


class Producer:
    """The tables of one P rank.

    block_size: tokens per block of this rank's cache. stream: push whole blocks after every chunk, not only at the end.
    """

    def __init__(self, timing: Timing, *, block_size: int, stream: bool = True, max_tombstones: int = 16_384) -> None:
        self._timing = timing
        self._rendezvous = Rendezvous()
        self._assembly = Assembly()
        self._tombstones = Tombstones(max_tombstones)
        self._peers = Peers(timing)
        self._sends = SendTable(
            self._rendezvous, self._tombstones, self._peers, block_size=block_size, stream=stream
        )  # fmt: skip
        self._answers = Answers(self._rendezvous, self._tombstones, self._peers, self._assembly, self._sends)

    # What others may look at

    @property
    def idle(self) -> bool:
        """Nothing is going on; only tombstones may be left."""
        return self._rendezvous.empty and not len(self._sends) and not len(self._assembly)

    @property
    def num_tombstones(self) -> int:
        return len(self._tombstones)

    def send(self, key: SendKey) -> Send | None:
        """The send of a key as it stands in `WritePiece` and `SendEnded`; None once nothing of it is in flight."""
        return self._sends.get(key)

    def in_flight(self, request_id: RequestId) -> int:
        """Pieces that read the request's blocks; those that were poisoned read blocks that it does not own any more."""
        local = self._rendezvous.by_request(request_id)
        sends = [] if local is None else self._sends.of(local)
        return sum(send.num_reading for send in sends if send.reads_blocks)

    # Events from this engine

    def on_request(
        self, request_id: RequestId, transfer_id: TransferId, prompt: PromptIdentity, consumers: int, now_s: float
    ) -> list[Action]:
        """The engine has a request to hand over to `consumers` D requests.

        Raises ProtocolError (local) if the request or the transfer id is taken, or a value is out of range.
        """
        if not 1 <= consumers <= MAX_CONSUMERS:
            raise ProtocolError(
                "local", f"transfer {transfer_id} has {consumers} consumers, 1 to {MAX_CONSUMERS} can be"
            )
        try:
            check_id(transfer_id, "transfer_id")
        except ValueError as error:
            raise ProtocolError("local", str(error)) from None
        local = LocalRequest(request_id, transfer_id, prompt, consumers, known_s=now_s)
        held, released = self._rendezvous.add_local(local)
        self._tombstones.reopen(transfer_id)
        taken = {registration.key.consumer for registration in held}
        for release in released:
            local.release(release, taken)
        return [action for registration in held for action in self._sends.match(local, registration, now_s)]

    def on_tokens(self, request_id: RequestId, ready: int, now_s: float) -> list[Action]:
        """The KV of prompt tokens [0, ready) exists in the request's blocks (its event has passed).

        The caller drops events that were recorded before a preemption: they speak of blocks that are gone.
        """
        local = self._local(request_id)
        if not 0 <= ready <= local.prompt.num_tokens:
            raise ProtocolError("local", f"{ready} tokens of {request_id}, its prompt has {local.prompt.num_tokens}")
        local.ready = max(local.ready, ready)
        return self._sends.pump_all(self._sends.of(local), now_s)

    def on_preempted(self, request_id: RequestId, now_s: float) -> list[Action]:
        """The request's blocks are gone, and nothing reads them.

        Raises ProtocolError (local) while pieces are in flight: wait for them, or say `on_poisoned` first.
        """
        local = self._local(request_id)
        if local.finished:
            raise ProtocolError("local", f"request {request_id} is preempted although it has finished")
        if self.in_flight(request_id):
            raise ProtocolError("local", f"request {request_id} is preempted while its blocks are read")
        local.ready = 0
        for send in self._sends.of(local):
            self._sends.preempt(send, now_s)
        return []

    def on_finished(self, request_id: RequestId, now_s: float) -> list[Action]:
        """The engine is done with the request and holds its blocks until `ReportSent`."""
        local = self._local(request_id)
        if not local.complete:
            return self.on_aborted(request_id, now_s, "incomplete")
        local.finish(now_s)
        return self._sends.pump_all(self._sends.of(local), now_s) + self._sends.settle(local)

    def on_aborted(self, request_id: RequestId, now_s: float, reason: str = "aborted") -> list[Action]:
        """The request ended without its whole KV, or its client left; blocks are held until `ReportSent`."""
        local = self._local(request_id)
        local.finish(now_s)
        actions: list[Action] = []
        for send in self._sends.of(local):
            actions += self._sends.fail(send, reason, now_s)
        return actions + self._sends.close(local, reason, now_s)

    def on_poisoned(self, request_id: RequestId, now_s: float) -> list[Action]:
        """The engine takes the blocks although they are being read.

        What has a piece in flight can never commit; a send that has none lost nothing and goes on after the request has
        been computed again. A finished request has nothing to go on with.
        """
        local = self._local(request_id)
        local.ready = 0
        actions: list[Action] = []
        for send in self._sends.of(local):
            if send.num_reading or local.finished:
                send.poisoned = True
                actions += self._sends.fail(send, "poisoned", now_s)
            else:
                self._sends.preempt(send, now_s)
        return actions + (self._sends.close(local, "poisoned", now_s) if local.finished else [])

    def on_pressure(self, now_s: float) -> list[Action]:
        """The engine cannot admit its next request: drop the oldest complete one that nobody has registered for."""
        unclaimed = [local for local in self._rendezvous.locals() if local.finished and not local.keys]
        if not unclaimed:
            return []
        oldest = min(unclaimed, key=lambda local: local.ended_s)
        return [TransferUnknown(oldest.transfer_id, "pressure"), *self._sends.close(oldest, "pressure", now_s)]

    # Events from the transport

    def on_connected(self, agent: AgentName, now_s: float) -> list[Action]:
        """Pieces can be written to this incarnation from now on."""
        self._peers.on_connected(agent)
        return self._sends.pump_all(self._sends.to(agent), now_s)

    def on_unreachable(self, agent: AgentName, reason: str, now_s: float) -> list[Action]:
        """The peer cannot be reached, refuses us, or is another one: nothing can be delivered to it."""
        self._peers.drop(agent)
        self._assembly.drop_agent(agent)
        actions: list[Action] = []
        for registration in self._rendezvous.held():
            if registration.agent == agent:
                self._rendezvous.drop_held(registration.key)
                actions += self._sends.refuse(registration, reason, now_s)
        for send in self._sends.to(agent):
            actions += self._sends.fail(send, reason, now_s)
        return actions

    def on_written(
        self,
        key: SendKey,
        piece: int,
        num_bytes: int,
        digests: Sequence[PieceDigest],
        now_s: float,
        *,
        num_writes: int = 1,
        staged_blocks: int = 0,
    ) -> list[Action]:
        """Every byte of a piece stands in D's blocks. staged_blocks: of them, those that D has unpacked itself."""
        send, ended = self._sends.take_piece(key, piece)
        if ended.attempt == send.attempt:
            send.num_bytes += num_bytes
            send.num_writes += num_writes
            send.staged_blocks += staged_blocks
            send.digests += digests
        return self._sends.settle_send(send, now_s)

    def on_read(self, key: SendKey, piece: int) -> list[Action]:
        """A piece does not need the request's blocks any more: its bytes stand in staging memory."""
        send = self._sends.read_piece(key, piece)
        return self._sends.settle(send.local)

    def on_cut(self, key: SendKey, piece: int, end_token: int, now_s: float) -> list[Action]:
        """Blocks are being preempted of which a piece has read only those up to `end_token`.

        What it has read is on its way and ends like a piece; the rest is owed again. Pieces of the same send that were
        posted behind it must have been held back before. Raises ProtocolError (local) if it was to end before that, or
        to begin after it.
        """
        send, cut = self._sends.piece(key, piece)
        if not cut.first_token < end_token < cut.end_token:
            raise ProtocolError("local", f"piece {piece} of {key} cannot be cut at token {end_token}")
        send.cut(piece, end_token, now_s)
        return self._sends.settle(send.local)

    def on_write_failed(self, key: SendKey, piece: int, reason: str, now_s: float) -> list[Action]:
        """A piece could not be posted, or its write has failed; nothing of it is in flight any more."""
        send, ended = self._sends.take_piece(key, piece)
        if ended.attempt == send.attempt and not send.terminal:
            return self._sends.fail(send, reason, now_s)
        return self._sends.settle_send(send, now_s)

    def on_not_posted(self, key: SendKey, piece: int, now_s: float) -> list[Action]:
        """A piece was held back because its blocks are being preempted; it is owed again from its first token on."""
        send, ended = self._sends.take_piece(key, piece)
        if ended.attempt == send.attempt and not send.terminal:
            send.unpost(ended, now_s)
        return self._sends.settle_send(send, now_s)

    def on_message(self, agent: AgentName, message: ToProducer, now_s: float) -> list[Action]:
        """A message from a D rank. Raises ProtocolError with fault "peer" for what makes no sense."""
        self._peers.heard(agent, now_s)
        match message:
            case Register():
                return self._answers.register(agent, message, now_s)
            case Cancel():
                return self._answers.cancel(agent, message, now_s)
            case Release():
                return self._answers.release(agent, message, now_s)
            case Announce():
                if not self._rendezvous.announce(message.transfer_id, agent, now_s):
                    raise ProtocolError("peer", "too many announcements wait already")
                return []
            case Ping():
                return self._answers.ping(agent, message, now_s)
            case Grant() | Credit():
                return []  # of staging slots, of which this half knows nothing; a sign of life all the same

    def on_tick(self, now_s: float) -> list[Action]:
        """Looks at every bound; to be called a few times a second while anything is going on."""
        actions: list[Action] = []
        for registration in self._rendezvous.expire(now_s - self._timing.rendezvous_timeout_s):
            actions.append(TransferUnknown(registration.key.transfer_id, "no_request"))
            actions += self._sends.refuse(registration, "no_request", now_s)
        for send in self._sends.all():
            actions += self._check_send(send, now_s)
        for local in self._rendezvous.locals():
            actions += self._check_local(local, now_s)
        for agent in self._peers.overdue(now_s):
            actions += self.on_unreachable(agent, "no_connection", now_s)
        sharing = {send.agent for send in self._sends.all() if not send.terminal}
        sharing |= {registration.agent for registration in self._rendezvous.held()}
        for agent in self._peers.lost(sharing, now_s):
            actions += self.on_unreachable(agent, "peer_lost", now_s)
        self._tombstones.expire(now_s - self._timing.tombstone_s)
        self._assembly.expire(now_s - self._timing.rendezvous_timeout_s)
        return actions

    def _check_send(self, send: Send, now_s: float) -> list[Action]:
        """The bounds of one send: never scheduled, or a write that does not end."""
        if send.terminal:
            return []
        oldest_s = min((piece.posted_s for piece in send.pieces.values()), default=now_s)
        if now_s - oldest_s > self._timing.write_timeout_s:
            return self._sends.fail(send, "write_timeout", now_s)
        local = send.local
        if send.state is SendState.WAITING and not (local.finished or local.computing):
            late = now_s - send.waiting_since_s > self._timing.admission_timeout_s
            return self._sends.fail(send, "not_scheduled", now_s) if late else []
        return self._sends.pump(send, now_s)  # a piece that was held back is tried again

    def _check_local(self, local: LocalRequest, now_s: float) -> list[Action]:
        """The bounds of a request that the engine has finished: unclaimed, and writes that outlive their send."""
        if not local.finished or local.reported:
            return []
        timing, sends = self._timing, self._sends.of(local)
        if not local.claims.complete and all(send.terminal for send in sends):
            announced_s = self._rendezvous.announced_s(local.transfer_id)
            # An announcement holds only as long as D's pings renew it.
            announced = announced_s is not None and now_s - announced_s <= timing.peer_timeout_s
            bound_s = timing.announced_timeout_s if announced else timing.unclaimed_timeout_s
            if now_s - local.waiting_since_s > bound_s:
                unclaimed = TransferUnknown(local.transfer_id, "unclaimed")
                return [unclaimed, *self._sends.close(local, "unclaimed", now_s)]
        if not local.claims.complete:
            return []
        for send in sends:
            if send.terminal and now_s - send.ended_s > timing.abort_drain_s:
                # It can never commit; the late write can only reach memory that D still holds for it.
                send.poisoned = True
        return self._sends.settle(local)

    def _local(self, request_id: RequestId) -> LocalRequest:
        local = self._rendezvous.by_request(request_id)
        if local is None:
            raise ProtocolError("local", f"request {request_id} is not known")
        return local
