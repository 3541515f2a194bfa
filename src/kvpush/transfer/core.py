"""The transfer core of one rank: commands and notifications in, writes, messages and results out.

What the background thread runs in production and the simulator in virtual time: no thread, no clock, no lock of its
own (the fence is shared with the engine's main thread). It owns the transport.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from kvpush.plan.geometry import CacheGeometry
from kvpush.protocol.consumer import Consumer
from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import AgentName, PeerAddress
from kvpush.protocol.messages import MalformedMessage, Ping, ToProducer, decode, encode
from kvpush.protocol.producer import Producer
from kvpush.protocol.timing import Timing
from kvpush.transfer import commands
from kvpush.transfer.connections import Connections
from kvpush.transfer.consumer_side import ConsumerSide
from kvpush.transfer.counters import Counters
from kvpush.transfer.dialer import Dialer
from kvpush.transfer.endings import Endings
from kvpush.transfer.fence import Fence
from kvpush.transfer.hashing import BlockHasher
from kvpush.transfer.integrity import DIGEST_WAIT_S, Digester
from kvpush.transfer.pieces import DIRECT, PathConfig
from kvpush.transfer.producer_side import ProducerSide
from kvpush.transfer.prover import Prover
from kvpush.transfer.quarantine import Quarantine
from kvpush.transfer.records import Records
from kvpush.transfer.results import Result
from kvpush.transfer.sources import PASSED, Event
from kvpush.transfer.staging.unstager import Unstager
from kvpush.transport.base import Transport, TransportError

_log = logging.getLogger(__name__)

TICK_S = 0.1
"""How often the bounds are looked at; small against every bound."""

PROOF_INTERVAL_S = 1.0
"""How often the end of a silent writer is asked for."""


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """What a core needs to know of its rank.

    sender: where peers reach this rank's side channel. cache: its KV cache. hasher: hashes KV for digests; None
    switches integrity off. integrity_share: of its transfers, those that it sends digests of as P. stream: push whole
    blocks after every chunk. paths: how pieces travel. quarantine_max_blocks: with more of them in quarantine nobody is
    asked to write; 0 sets no limit. clock: for the records alone, see `Records`.
    """

    sender: PeerAddress
    cache: CacheGeometry
    timing: Timing
    hasher: BlockHasher | None = None
    integrity_share: float = 1.0
    stream: bool = True
    paths: PathConfig = DIRECT
    quarantine_max_blocks: int = 0
    clock: Callable[[], float] | None = None


class TransferCore:
    """Drives both halves of the protocol. Every call takes the time; `poll` says how busy it is."""

    def __init__(self, config: CoreConfig, transport: Transport, dialer: Dialer, prover: Prover, fence: Fence) -> None:
        self.counters = Counters()
        self.records = Records(clock=config.clock)
        self._transport = transport
        self._dialer = dialer
        self._prover = prover
        self._results: deque[Result] = deque()
        self._next_tick_s = self._now_s = 0.0
        self._deaf = False
        self._asked_s: dict[AgentName, float] = {}
        self._hasher = hasher = config.hasher
        digester = None
        if hasher is not None:
            # For the protocol a piece that waits for its digest is in flight.
            wait_s = min(DIGEST_WAIT_S, config.timing.write_timeout_s / 2)
            digester = Digester(hasher, config.cache.block_size, config.integrity_share, wait_s)
        producer = Producer(config.timing, block_size=config.cache.block_size, stream=config.stream)
        consumer = Consumer(config.timing, config.sender)
        hello = Ping(0, config.sender)  # the protocol's own pings count from 1
        self._connections = Connections(
            transport, dialer, self.counters, consumer.wants_sent, self._needs, consumer.expects, hello, config.timing
        )
        self._endings = Endings(transport, encode(hello))
        self._producer_side = ProducerSide(
            producer, config.cache, transport, self._connections, fence, digester, config.paths, self.counters,
            self.records, self._results,
        )  # fmt: skip
        staging = config.paths.staging
        unstager = None
        if staging is not None and staging.receive is not None:
            unstager = Unstager(staging.packer, staging.receive, config.sender)
        self._consumer_side = ConsumerSide(
            consumer, config.sender, config.cache.block_size, self._connections, digester, unstager,
            config.paths.path != "staged", self.counters, self.records, self._results,
            max_quarantined=config.quarantine_max_blocks,
        )  # fmt: skip
        self.rank = (config.sender.pp_rank, config.sender.tp_rank)

    @property
    def idle(self) -> bool:
        """No transfer is known to either half; only tombstones may be left."""
        return self._producer_side.idle and self._consumer_side.idle and not self._connections.dialing

    @property
    def quarantine(self) -> Quarantine:
        """Memory that writers may still reach although nobody waits for them. Any thread may ask.

        It never holds a request whose `Released` can be taken already.
        """
        return self._consumer_side.quarantine

    @property
    def writing(self) -> bool:
        """Pieces are on their way, or a forward is about to make blocks ready: poll often."""
        return self._producer_side.writing

    @property
    def unpacking(self) -> bool:
        """Staged parts are being unpacked, or more may come soon: P waits for its slots."""
        return self._consumer_side.looking(self._now_s)

    @property
    def levels(self) -> dict[str, int]:
        """How much is open now, by the names of the metrics; read by the engine's thread."""
        return {
            "quarantined_blocks": self.quarantine.num_blocks,
            "open_transfers": len(self.records),
            "open_writes": self._producer_side.num_open_writes,
        }

    def take_results(self) -> list[Result]:
        """What has ended since the last call, in order."""
        results = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def command(self, command: commands.Command, now_s: float, event: Event = PASSED) -> None:
        """Takes one command of the engine. event: when the forward of its step is done (Progress only)."""
        try:
            match command:
                case commands.Progress():
                    self._producer_side.advance(command, event)
                case commands.Stalled():
                    self._producer_side.stalled(now_s, over=command.over)
                case commands.Offer() | commands.Preempt() | commands.Finish():
                    self._producer_side.command(command, now_s)
                case _:
                    self._consumer_side.command(command, now_s)
        except ProtocolError as error:
            # A defect of ours; the request's other half ends by its own bounds.
            self.counters.add("protocol_errors", error.fault)
            _log.error("kvpush: %s: %s", type(command).__name__, error)
        self._settle(now_s)

    def poll(self, now_s: float) -> None:
        """One round: notifications, handshakes, forwards that are done, writes that have ended, bounds."""
        self._now_s = now_s
        for agent, payload in self._notifications():
            self._receive(AgentName(agent), payload, now_s)
        self._connections.poll()
        # A registration that has just left must be known before any bound gives its memory up.
        self._settle(now_s)
        self._producer_side.poll(now_s)
        self._consumer_side.poll(now_s)
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + TICK_S
            self._producer_side.tick(now_s)
            self._consumer_side.tick(now_s)
            self._seek_proof(now_s)
            self._connections.tick(now_s)
        self._settle(now_s)

    def close(self) -> None:
        """Ends everything that belongs to the core, whatever goes wrong with one part of it."""
        with ExitStack() as stack:
            for part in (self._transport, self._prover, self._dialer, self._producer_side):
                stack.callback(part.close)
            if self._hasher is not None:
                stack.callback(self._hasher.close)

    def _notifications(self) -> list[tuple[str, bytes]]:
        """What has arrived. A transport that cannot tell is asked again: every transfer has its own bound."""
        try:
            arrived = self._transport.notifications()
        except TransportError as error:
            self.counters.add("transport_errors")
            if not self._deaf:
                _log.error("kvpush: messages cannot be read: %s", error)
            self._deaf = True
            return []
        self._deaf = False
        return arrived

    def _needs(self, agent: AgentName) -> bool:
        """Memory, here or there, may depend on the proof that this incarnation is gone."""
        return self._consumer_side.expects(agent) or agent in self._producer_side.suspects

    def _seek_proof(self, now_s: float) -> None:
        """Whoever may still write, and does not answer, may be gone for good; only proof of that sets memory free."""
        for agent in self._prover.take():
            self._producer_side.gone(agent, now_s)  # its memory is gone with it
            self._consumer_side.dead(agent, now_s)
            self._connections.drop(agent, "gone: its process has ended")
            self._endings.add(agent)
        for agent in self._endings.take(now_s):
            self._consumer_side.gone(agent, now_s)
        suspects = self._consumer_side.suspects | self._producer_side.suspects
        self._asked_s = {agent: asked_s for agent, asked_s in self._asked_s.items() if agent in suspects}
        for agent in suspects:
            known = self._connections.known(agent)
            if known is not None and now_s - self._asked_s.get(agent, -PROOF_INTERVAL_S) >= PROOF_INTERVAL_S:
                self._asked_s[agent] = now_s
                address, answer = known
                self._prover.ask(agent, answer.process, address)

    def _receive(self, agent: AgentName, payload: bytes, now_s: float) -> None:
        try:
            message = decode(payload)
        except MalformedMessage as error:
            self.counters.add("messages_dropped", "malformed")
            _log.debug("kvpush: dropped %d bytes from %s: %s", len(payload), agent, error)
            return
        self.counters.add("messages_received", type(message).__name__.lower())
        self._connections.heard(agent)
        self._settle(now_s)  # what waited for this sign of life has left
        side = self._producer_side if isinstance(message, ToProducer) else self._consumer_side
        try:
            side.receive(agent, message, now_s)  # type: ignore[arg-type]
        except ProtocolError as error:
            self.counters.add("messages_dropped", error.fault)
            _log.warning("kvpush: dropped %s from %s: %s", type(message).__name__, agent, error)
        except Exception:
            # Whatever a peer can provoke must not end the engine: its transfers end by their own bounds.
            self.counters.add("messages_dropped", "internal")
            _log.exception("kvpush: dropped %s from %s", type(message).__name__, agent)

    def _settle(self, now_s: float) -> None:
        """Hands out what the connections have to tell until nothing is left."""
        while events := self._connections.take():
            for event in events:
                self._producer_side.on_connection(event, now_s)
                self._consumer_side.on_connection(event, now_s)
