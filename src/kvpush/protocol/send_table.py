"""All sends of one P rank and their steps, whoever caused them: D's messages, the engine or the transport."""

from __future__ import annotations

from dataclasses import replace

from kvpush.protocol.actions import Action, ReportSent, SendEnded, SendTo, WritePiece
from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import AgentName, SendKey
from kvpush.protocol.messages import Accepted, Failed, Message, Quiet, reason_text
from kvpush.protocol.peers import Peers
from kvpush.protocol.registration import Registration
from kvpush.protocol.rendezvous import LocalRequest, Rendezvous
from kvpush.protocol.send import Piece, Send
from kvpush.protocol.tombstones import Tombstone, Tombstones
from kvpush.protocol.transitions import SendEvent, SendState


class SendTable:
    """At most one send for each key. It stays until nothing of it is in flight; then a tombstone takes its place.

    rendezvous, tombstones and peers are shared with who answers D's messages.
    """

    def __init__(
        self, rendezvous: Rendezvous, tombstones: Tombstones, peers: Peers, *, block_size: int, stream: bool
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be positive, got {block_size}")
        self._rendezvous = rendezvous
        self._tombstones = tombstones
        self._peers = peers
        self._block_size = block_size
        self._stream = stream
        self._sends: dict[SendKey, Send] = {}
        self._next_piece = 0

    def __len__(self) -> int:
        return len(self._sends)

    def get(self, key: SendKey) -> Send | None:
        return self._sends.get(key)

    def all(self) -> list[Send]:
        return list(self._sends.values())

    def to(self, agent: AgentName) -> list[Send]:
        return [send for send in self._sends.values() if send.agent == agent]

    def of(self, local: LocalRequest) -> list[Send]:
        return [self._sends[key] for key in local.keys]

    def match(self, local: LocalRequest, registration: Registration, now_s: float) -> list[Action]:
        """Registration and request have met. A registration that does not fit is refused; the request goes on."""
        reason = local.refusal(registration)
        if reason:
            stone = self._tombstones.get(registration.key, registration.agent)
            if reason == "duplicate" and stone is not None and stone.since_s >= local.known_s:
                reason = stone.reason or reason  # it was served; why that ended tells more
            return self.refuse(registration, reason, now_s)
        local.claims.begin(registration.key, registration.address, registration.targets)
        send = self._sends[registration.key] = Send(registration, local, waiting_since_s=now_s)
        local.keys.append(registration.key)
        return [*self.status(send), *self._peers.connect(registration, now_s), *self.pump(send, now_s)]

    def register_again(self, send: Send, registration: Registration, now_s: float) -> list[Action]:
        """The same incarnation registers with a higher attempt."""
        if registration.prompt != send.registration.prompt:
            send.cover(registration.attempt)
            return self.status(send) if send.terminal else self.fail(send, "prompt_mismatch", now_s)
        if send.terminal:
            # Writes of the old attempt are in flight to the same blocks: there is no new one before they have ended,
            # and nobody may be told that all is quiet.
            send.cover(registration.attempt)
            return [self._tell(send, Failed(send.key, send.attempt, send.reason or send.state.value, quiet=False))]
        send.restart(registration, now_s)
        return [*self.status(send), *self._peers.connect(registration, now_s), *self.pump(send, now_s)]

    def status(self, send: Send) -> list[Action]:
        """How things stand, for a peer that asks or repeats itself."""
        if not send.terminal:
            return [self._tell(send, Accepted(send.key, send.attempt))]
        if send.state is SendState.FAILED:
            return [self._tell(send, send.last_word())]
        return []  # cancelled: Quiet follows when its pieces have ended

    def pump(self, send: Send, now_s: float) -> list[Action]:
        """Posts what is ready and not posted yet."""
        if send.terminal or not self._peers.connected(send.agent):
            return []
        limit = send.postable(self._block_size, self._stream)
        if limit <= send.posted:
            return []
        piece, self._next_piece = self._next_piece, self._next_piece + 1
        posted = send.post(piece, limit, now_s)
        return [
            WritePiece(
                send.key, send.attempt, piece, send.local.request_id, send.agent, posted.first_token, posted.end_token
            )
        ]

    def pump_all(self, sends: list[Send], now_s: float) -> list[Action]:
        return [action for send in sends for action in self.pump(send, now_s)]

    def piece(self, key: SendKey, piece: int) -> tuple[Send, Piece]:
        """A piece and its send. Raises ProtocolError (local) if it is not in flight."""
        send = self._sends.get(key)
        if send is None or piece not in send.pieces:
            raise ProtocolError("local", f"piece {piece} of {key} is not in flight")
        return send, send.pieces[piece]

    def take_piece(self, key: SendKey, piece: int) -> tuple[Send, Piece]:
        """A piece has ended, one way or another. Raises ProtocolError (local) if it is not in flight."""
        send, taken = self.piece(key, piece)
        del send.pieces[piece]
        return send, taken

    def read_piece(self, key: SendKey, piece: int) -> Send:
        """A piece needs no blocks any more. Raises ProtocolError (local) if it is not in flight."""
        send, taken = self.piece(key, piece)
        send.pieces[piece] = replace(taken, read=True)
        return send

    def settle_send(self, send: Send, now_s: float) -> list[Action]:
        """After a piece has ended: commits a send whose last piece that was, and says quiet for one that had ended."""
        if send.pieces:
            return []
        if send.state is SendState.DRAINING:
            return self.end(send, SendEvent.DRAINED, "", now_s)
        if not send.terminal:
            return []
        return [self._tell(send, Quiet(send.key, send.attempt)), *self._bury(send, now_s)]

    def fail(self, send: Send, reason: str, now_s: float) -> list[Action]:
        """Ends a send that will not deliver; nothing for one that has ended."""
        return [] if send.terminal else self.end(send, SendEvent.FAIL, reason, now_s)

    def cancel(self, send: Send, now_s: float) -> list[Action]:
        """D wants no more of a send; one that has ended says quiet by itself."""
        return [] if send.terminal else self.end(send, SendEvent.CANCEL, "cancelled", now_s)

    def end(self, send: Send, event: SendEvent, reason: str, now_s: float) -> list[Action]:
        """Takes a send to its terminal state and tells D; `Quiet` waits for what is in flight."""
        send.step(event)
        send.reason = reason_text(reason)
        send.ended_s = send.local.waiting_since_s = now_s
        send.local.claims.end(send.key)
        actions: list[Action] = []
        if event is not SendEvent.CANCEL or not send.pieces:
            actions.append(self._tell(send, send.last_word()))
        actions.append(
            SendEnded(
                send.key, send.local.request_id, send.state.value, send.reason,
                send.num_tokens, send.num_bytes, send.num_writes,
            )
        )  # fmt: skip
        return actions if send.pieces else actions + self._bury(send, now_s)

    def preempt(self, send: Send, now_s: float) -> None:
        """The source blocks are gone while nothing reads them: the rest is owed from the watermark on."""
        if not send.terminal:
            send.step(SendEvent.PREEMPT)
            send.waiting_since_s = now_s

    def refuse(self, registration: Registration, reason: str, now_s: float) -> list[Action]:
        """Answers a registration that gets no send: nothing was ever in flight for it, and nothing ever will be."""
        key, num_tokens = registration.key, registration.prompt.num_tokens
        failed = Failed(key, registration.attempt, reason_text(reason), quiet=True)
        stone = Tombstone(
            key, registration.attempt, registration.agent, registration.address, failed.reason, failed, now_s
        )
        self._tombstones.put(stone)
        return [
            SendTo(registration.address, failed, registration.agent),
            SendEnded(key, None, SendState.FAILED.value, failed.reason, num_tokens, 0, 0),
        ]

    def close(self, local: LocalRequest, reason: str, now_s: float) -> list[Action]:
        """No further consumer will be served; who comes late is told why at once."""
        if not local.claims.complete:
            local.claims.close(reason)
            self._tombstones.close(local.transfer_id, reason, now_s)
        return self.settle(local)

    def settle(self, local: LocalRequest) -> list[Action]:
        """Frees the request once no consumer needs anything and nothing reads its blocks (but what is poisoned)."""
        if not local.finished or local.reported or not local.claims.complete:
            return []
        if any(send.reads_blocks or not send.terminal for send in self.of(local)):
            return []
        local.reported = True
        self._rendezvous.remove_local(local)
        return [ReportSent(local.request_id)]

    def _bury(self, send: Send, now_s: float) -> list[Action]:
        """Nothing of a terminal send is in flight any more: remember its end, free its request."""
        del self._sends[send.key]
        send.local.keys.remove(send.key)
        stone = Tombstone(
            send.key, send.attempt, send.agent, send.registration.address, send.reason, send.last_word(), now_s
        )
        self._tombstones.put(stone)
        return self.settle(send.local)

    def _tell(self, send: Send, message: Message) -> Action:
        return SendTo(send.registration.address, message, send.agent)
