"""P's half of the transfer core: carries out what the producer's state machine asks for."""

from __future__ import annotations

import logging
from collections import deque

from kvpush.plan.geometry import CacheGeometry
from kvpush.protocol.actions import Action, Connect, ReportSent, SendEnded, SendTo, TransferUnknown, WritePiece
from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import AgentName, RequestId
from kvpush.protocol.messages import Accepted, Credit, Grant, ToProducer
from kvpush.protocol.producer import Producer
from kvpush.transfer.commands import Finish, Offer, Preempt, Progress
from kvpush.transfer.connections import Connected, Connections, Disconnected, Unreachable
from kvpush.transfer.connections import Event as ConnectionEvent
from kvpush.transfer.counters import Counters
from kvpush.transfer.fence import Fence
from kvpush.transfer.integrity import Digester
from kvpush.transfer.pieces import PathConfig, Pieces
from kvpush.transfer.records import Record, Records
from kvpush.transfer.results import Result, Sent
from kvpush.transfer.sources import Event, Sources
from kvpush.transfer.staging.outcomes import Cut, Ended, NotPosted, Outcome, Read
from kvpush.transfer.writer import Landed, PieceLost, PieceRefused
from kvpush.transport.base import Transport

_log = logging.getLogger(__name__)

STALL_S = 2.0
"""How long an engine may stand still for want of blocks before a request that nobody has asked for is dropped."""

STALL_GAP_S = 0.5
"""An engine that says nothing for so long does not stand still: it steps every few milliseconds while it does."""


class ProducerSide:
    """Owned by the transfer thread."""

    def __init__(
        self,
        producer: Producer,
        cache: CacheGeometry,
        transport: Transport,
        connections: Connections,
        fence: Fence,
        digester: Digester | None,
        paths: PathConfig,
        counters: Counters,
        records: Records,
        results: deque[Result],
    ) -> None:
        self._producer = producer
        self._sources = Sources()
        self._pieces = Pieces(paths, cache, transport, fence, digester, counters, self._wanted)
        self._connections = connections
        self._fence = fence
        self._counters = counters
        self._records = records
        self._results = results
        self._stalled_s: tuple[float, float] | None = None  # since when the engine has stood still, and the last word
        self._offered: set[RequestId] = set()
        self._decoding: set[RequestId] = set()  # those of them that P goes on writing to
        self._lost: list[WritePiece] = []  # they have failed, but bytes of them may still land

    @property
    def idle(self) -> bool:
        return self._producer.idle and self._pieces.idle and not len(self._sources)

    @property
    def suspects(self) -> set[AgentName]:
        """Incarnations whose proven end would make lost pieces harmless."""
        return {piece.agent for piece in self._lost}

    @property
    def writing(self) -> bool:
        return not self._pieces.idle or self._sources.pending

    @property
    def num_open_writes(self) -> int:
        """Pieces in flight, and those that were lost and may still land."""
        return len(self._pieces) + len(self._lost)

    def advance(self, progress: Progress, event: Event) -> None:
        if progress.request_id in self._offered:
            self._sources.advance(progress, event)

    def command(self, command: Offer | Preempt | Finish, now_s: float) -> None:
        match command:
            case Offer():
                self._run(self._offer(command, now_s), now_s)
            case Preempt():
                try:
                    self._run(self._preempt(command, now_s), now_s)
                finally:
                    # Whatever became of it: a request that stayed closed could never be handed over.
                    self._fence.reopen(command.request_id)
            case Finish():
                self._run(self._finish(command, now_s), now_s)

    def _offer(self, offer: Offer, now_s: float) -> list[Action]:
        try:
            actions = self._producer.on_request(
                offer.request_id, offer.transfer_id, offer.prompt, offer.consumers, now_s
            )
        except ProtocolError as error:
            # The transfer id has a request that the engine has finished and that still waits for its consumers.
            self._counters.add("unmatched", "duplicate")
            _log.warning("kvpush: request %s is served without hand-over: %s", offer.request_id, error)
            return []
        self._offered.add(offer.request_id)
        if offer.decodes:
            self._decoding.add(offer.request_id)
        self._records.open(offer.request_id, offer.transfer_id)
        self._records.mark(offer.request_id, "known", now_s)
        return actions

    def _preempt(self, preempt: Preempt, now_s: float) -> list[Action]:
        request_id = preempt.request_id
        if request_id not in self._offered:
            return []
        self._counters.add("preemptions", "poisoned" if preempt.poisoned else "")
        self._sources.preempt(request_id)
        # The fence does not wait for pieces that were lost; for the protocol they read on.
        poisoned = preempt.poisoned or any(piece.request_id == request_id for piece in self._lost)
        actions = self._producer.on_poisoned(request_id, now_s) if poisoned else []
        return actions + self._producer.on_preempted(request_id, now_s)

    def _finish(self, finish: Finish, now_s: float) -> list[Action]:
        request_id = finish.request_id
        if request_id not in self._offered:
            return [ReportSent(request_id)]  # nothing reads its blocks
        ready = self._sources.settle(request_id)
        if not finish.aborted:
            try:
                if ready is not None:
                    self._records.mark(request_id, "computed", now_s, last=True)
                    self._run(self._producer.on_tokens(request_id, ready, now_s), now_s)
                self._records.mark(request_id, "prefilled", now_s)
                return self._producer.on_finished(request_id, now_s)
            except ProtocolError as error:
                # A defect of ours must not keep the blocks: the engine waits for a report.
                self._counters.add("protocol_errors", error.fault)
                _log.error("kvpush: request %s ends without its KV: %s", request_id, error)
        return self._producer.on_aborted(request_id, now_s, finish.aborted or "incomplete")

    def stalled(self, now_s: float, *, over: bool = False) -> None:
        """The engine stands still for want of blocks: after a while the oldest request that nobody reads has to go.

        Otherwise P and D could wait for each other until the longest bound: P full of requests that D cannot admit, D
        of requests that P cannot admit.
        """
        if over:
            self._stalled_s = None
            return
        since_s, last_s = self._stalled_s or (now_s, now_s)
        if now_s - last_s > STALL_GAP_S:
            since_s = now_s  # it has worked in between
        if now_s - since_s >= STALL_S:
            self._run(self._producer.on_pressure(now_s), now_s)
            since_s = now_s
        self._stalled_s = (since_s, now_s)

    def receive(self, agent: AgentName, message: ToProducer, now_s: float) -> None:
        if isinstance(message, Grant | Credit):
            self._pieces.hear(agent, message, self._connections.answer(agent))
        self._run(self._producer.on_message(agent, message, now_s), now_s)

    def poll(self, now_s: float) -> None:
        for request_id, ready in self._sources.passed():
            self._records.mark(request_id, "computed", now_s, last=True)
            self._run(self._producer.on_tokens(request_id, ready, now_s), now_s)
        for outcome in self._pieces.poll(now_s):
            self._on_outcome(outcome, now_s)

    def close(self) -> None:
        self._pieces.close()

    def tick(self, now_s: float) -> None:
        self._run(self._producer.on_tick(now_s), now_s)
        for agent, address, message in self._pieces.overdue(now_s):
            self._connections.send(address, message, agent)

    def gone(self, agent: AgentName, now_s: float) -> None:
        """Proof that an incarnation does not exist any more: nothing lands there."""
        self._pieces.gone(agent)
        lost = [piece for piece in self._lost if piece.agent == agent]
        self._lost = [piece for piece in self._lost if piece.agent != agent]
        for piece in lost:
            self._run(self._producer.on_write_failed(piece.key, piece.piece, "write_lost", now_s), now_s)

    def on_connection(self, event: ConnectionEvent, now_s: float) -> None:
        match event:
            case Connected():
                self._pieces.meet(event.agent, self._connections.answer(event.agent))
                self._run(self._producer.on_connected(event.agent, now_s), now_s)
            case Unreachable() | Disconnected():
                self._pieces.drop(event.agent)
                reason = event.reason.split(":")[0]
                self._run(self._producer.on_unreachable(event.agent, reason, now_s), now_s)

    def _wanted(self, piece: WritePiece) -> bool:
        """The attempt that a piece belongs to goes on."""
        send = self._producer.send(piece.key)
        return send is not None and not send.terminal and send.attempt == piece.attempt

    def _on_outcome(self, outcome: Landed | Outcome, now_s: float) -> None:
        piece = outcome.piece
        if not isinstance(outcome, Ended):
            self._fence.end(piece.request_id)
        match outcome:
            case Landed():
                self._on_landed(outcome, now_s)
            case Read():
                self._run(self._producer.on_read(piece.key, piece.piece), now_s)
            case Cut():
                self._run(self._producer.on_cut(piece.key, piece.piece, outcome.end_token, now_s), now_s)
            case NotPosted():
                self._run(self._producer.on_not_posted(piece.key, piece.piece, now_s), now_s)
            case Ended():
                self._on_staged(outcome, now_s)

    def _on_staged(self, ended: Ended, now_s: float) -> None:
        piece = ended.piece
        if ended.error:
            # What of it may still land can only reach a slot: for D's blocks it is over.
            self._count_failure(piece, ended.error)
            self._run(self._producer.on_write_failed(piece.key, piece.piece, "write_failed", now_s), now_s)
            return
        self._count_landed(piece, ended.num_bytes, ended.num_parts, now_s)
        _log.debug(
            "kvpush: transfer %s piece %d: tokens %d-%d, %d staged parts in %.2f ms",
            piece.key.transfer_id, piece.piece, piece.first_token, piece.end_token, ended.num_parts, ended.took_s * 1e3,
        )  # fmt: skip
        # No fence: nothing has read the blocks since they were packed, and the pack was over before they were taken, or
        # the request was poisoned then.
        actions = self._producer.on_written(
            piece.key, piece.piece, ended.num_bytes, ended.digests, now_s,
            num_writes=ended.num_parts, staged_blocks=ended.num_blocks,
        )  # fmt: skip
        self._run(actions, now_s)

    def _count_failure(self, piece: WritePiece, error: str) -> None:
        if error == "stopped":
            return  # the transfer had ended before
        self._counters.add("writes_failed")
        _log.warning("kvpush: a write of transfer %s failed: %s", piece.key.transfer_id, error)

    def _count_landed(self, piece: WritePiece, num_bytes: int, num_writes: int, landed_s: float) -> Record | None:
        self._counters.add("writes", amount=num_writes)
        self._counters.add("bytes_written", amount=num_bytes)
        record = self._records.get(piece.request_id)
        if record is not None:
            # Found in the round that has posted it, it would seem to have landed before.
            record.mark_last("landed", max(landed_s, record.times_s.get("last_write", landed_s)))
        return record

    def _on_landed(self, landed: Landed, now_s: float) -> None:
        piece = landed.piece
        if landed.may_land:
            self._lose(piece, landed.error)
            return
        if landed.error:
            self._count_failure(piece, landed.error)
            self._run(self._producer.on_write_failed(piece.key, piece.piece, "write_failed", now_s), now_s)
            return
        record = self._count_landed(piece, landed.num_bytes, 1, landed.landed_s)
        if record is not None:
            record.num_runs += landed.cost.num_runs
            record.plan_s += landed.cost.plan_s
            record.post_s += landed.cost.post_s
        _log.debug(
            "kvpush: transfer %s piece %d: tokens %d-%d, %d runs, plan %.2f ms, post %.2f ms (cpu %.2f ms), in %.2f ms",
            piece.key.transfer_id, piece.piece, piece.first_token, piece.end_token, landed.cost.num_runs,
            landed.cost.plan_s * 1e3, landed.cost.post_s * 1e3, landed.cost.cpu_s * 1e3, landed.took_s * 1e3,
        )  # fmt: skip
        # While the fence is held the engine's main thread cannot poison: either it was first, and nothing commits, or
        # the commit was, and every byte had been read before the blocks are taken. What is decided is carried out
        # without the fence, so that the main thread never waits for a message to leave.
        with self._fence.committing(piece.request_id) as poisoned:
            actions = self._producer.on_poisoned(piece.request_id, now_s) if poisoned else []
            digests = [] if landed.digest is None else [landed.digest]
            actions += self._producer.on_written(piece.key, piece.piece, landed.num_bytes, digests, now_s)
        self._run(actions, now_s)

    def _lose(self, piece: WritePiece, error: str) -> None:
        """A write has ended badly, and nobody knows whether the rest of it lands.

        For the protocol it stays in flight, so that its attempt never commits and is never called quiet. Its connection
        is given up, which fails at once whatever else goes there.
        """
        self._counters.add("writes_lost")
        self._lost.append(piece)
        _log.error("kvpush: a write of transfer %s failed and may still land: %s", piece.key.transfer_id, error)
        self._connections.drop(piece.agent, f"write_lost: {error}")

    def _run(self, actions: list[Action], now_s: float) -> None:
        """Carries out actions in order; those that follow from them come right behind."""
        queue = deque(actions)
        while queue:
            action = queue.popleft()
            match action:
                case SendTo():
                    if isinstance(action.message, Accepted):
                        self._on_accepted(action.message, now_s)
                    self._connections.send(action.address, action.message, action.agent)
                case Connect():
                    self._connections.connect(action.address, action.agent)
                case WritePiece():
                    queue.extendleft(reversed(self._write(action, now_s)))
                case ReportSent():
                    self._offered.discard(action.request_id)
                    self._decoding.discard(action.request_id)
                    self._sources.forget(action.request_id)
                    self._end_record(action.request_id)
                    self._results.append(Sent(action.request_id))
                case SendEnded():
                    self._on_ended(action, now_s)
                case TransferUnknown():
                    if action.reason != "no_request":  # then there is a registration, but no request of ours
                        self._records.fail(action.transfer_id, action.reason)
                    self._counters.add("unmatched", action.reason)
                    _log.warning("kvpush: transfer %s dropped: %s", action.transfer_id, action.reason)
                case _:
                    raise AssertionError(f"the producer asked for {action}")

    def _write(self, piece: WritePiece, now_s: float) -> list[Action]:
        if not self._fence.begin(piece.request_id):
            return self._producer.on_not_posted(piece.key, piece.piece, now_s)
        begun_s = self._records.now(now_s)
        try:
            self._post(piece, now_s)
        except PieceLost as error:
            self._fence.end(piece.request_id)
            self._lose(piece, str(error))
            return []
        except PieceRefused as error:
            self._fence.end(piece.request_id)
            self._counters.add("writes_refused")
            _log.warning("kvpush: transfer %s cannot be written: %s", piece.key.transfer_id, error)
            return self._producer.on_write_failed(piece.key, piece.piece, "post_failed", now_s)
        record = self._records.get(piece.request_id)
        if record is not None:
            record.mark("first_write", begun_s)
            record.mark_last("last_write", self._records.now(now_s))
        return []

    def _post(self, piece: WritePiece, now_s: float) -> None:
        send = self._producer.send(piece.key)
        answer = self._connections.answer(piece.agent)
        groups = self._sources.table(piece.request_id)
        if send is None or answer is None or not groups:
            raise PieceRefused("the peer, the registration or the blocks are gone")
        stable = piece.request_id not in self._decoding
        self._pieces.post(piece, send, answer, groups[0], now_s, stable_tail=stable)

    def _on_ended(self, ended: SendEnded, now_s: float) -> None:
        self._counters.add("sends", ended.reason or ended.state)
        transfer_id = ended.key.transfer_id
        if ended.request_id is None:
            _log.warning("kvpush: registration of transfer %s refused: %s", transfer_id, ended.reason)
            return
        self._pieces.forget(ended.key)
        record = self._records.get(ended.request_id)
        if ended.state != "committed":
            if record is not None:
                record.failure = ended.reason or ended.state
            _log.warning("kvpush: transfer %s %s: %s", transfer_id, ended.state, ended.reason)
            return
        if record is not None:
            record.mark_last("committed", self._records.now(now_s))
            record.num_tokens += ended.num_tokens
            record.num_bytes += ended.num_bytes
            record.num_writes += ended.num_writes
        spans = (("prefill to commit", "prefilled", "committed"), ("first write to landed", "first_write", "landed"))
        _log.info(
            "kvpush: transfer %s committed: %d tokens, %d bytes, %d writes%s%s",
            transfer_id, ended.num_tokens, ended.num_bytes, ended.num_writes,
            record.timing(*spans) if record else "", record.cost() if record else "",
        )  # fmt: skip

    def _on_accepted(self, accepted: Accepted, now_s: float) -> None:
        send = self._producer.send(accepted.key)
        if send is not None:
            self._records.mark(send.local.request_id, "matched", now_s)

    def _end_record(self, request_id: RequestId) -> None:
        record = self._records.get(request_id)
        if record is not None:
            self._records.end(request_id, "sent" if "committed" in record.times_s else "released")
