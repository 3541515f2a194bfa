"""D's half of the transfer core: carries out what the consumer's state machine asks for."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from kvpush.plan.block_table import encode_blocks
from kvpush.protocol.actions import (
    Action,
    Quarantined,
    ReportFailed,
    ReportReceived,
    ReportReleased,
    SendTo,
    Verify,
)
from kvpush.protocol.consumer import Consumer
from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import AgentName, PeerAddress, RequestId, SendKey
from kvpush.protocol.messages import Accepted, Commit, Credit, Failed, Grant, Register, Staged, ToConsumer
from kvpush.transfer.commands import Announce, BlockTable, Cancel, Fetch, Refuse, Release, SideChannel, Withdraw
from kvpush.transfer.connections import Connections, Delivered, Disconnected, Undelivered
from kvpush.transfer.connections import Event as ConnectionEvent
from kvpush.transfer.counters import Counters
from kvpush.transfer.integrity import Check, Digester
from kvpush.transfer.quarantine import Quarantine
from kvpush.transfer.records import Records
from kvpush.transfer.results import LoadFailed, Received, Released, Result
from kvpush.transfer.staging.unstager import Target, Unstager

_log = logging.getLogger(__name__)

BLOCKS_PER_PART = 12_000
"""Block ids in one message: even as plain ids of 4 bytes they stay below the size of a message."""

Command = Announce | Withdraw | Fetch | Refuse | Cancel | Release


class ConsumerSide:
    """Owned by the transfer thread.

    max_quarantined: while more blocks are in quarantine nobody is asked to write; 0 sets no limit.
    quarantine: what is held now; replaced whole, so that any thread may read it.
    """

    def __init__(
        self,
        consumer: Consumer,
        sender: PeerAddress,
        block_size: int,
        connections: Connections,
        digester: Digester | None,
        unstager: Unstager | None,
        direct: bool,
        counters: Counters,
        records: Records,
        results: deque[Result],
        *,
        max_quarantined: int,
    ) -> None:
        self._consumer = consumer
        self._sender = sender
        self._block_size = block_size
        self._connections = connections
        self._digester = digester
        self._unstager = unstager
        self._direct = direct
        self._counters = counters
        self._records = records
        self._results = results
        self._max_quarantined = max_quarantined
        self._quarantined: dict[RequestId, Quarantine] = {}
        self.quarantine = Quarantine()
        self._fetches: dict[RequestId, Fetch] = {}
        self._requests: dict[SendKey, RequestId] = {}
        self._engine_ids: dict[SendKey, str] = {}  # who alone may get a registration, where the client says so
        self._checks: dict[RequestId, Check] = {}  # digests that are being compared
        self._broken: set[AgentName] = set()  # incarnations whose connection has broken while they might write
        self._addresses: dict[AgentName, PeerAddress] = {}  # of the holders of staging slots
        self._unpacking: list[RequestId] = []  # released as soon as nothing is unpacked into them any more

    @property
    def idle(self) -> bool:
        return self._consumer.idle and not self._fetches and not self._unpacking

    def expects(self, agent: AgentName) -> bool:
        """This incarnation may write here."""
        return self._consumer.expects(agent) or agent in self._addresses

    def command(self, command: Command, now_s: float) -> None:
        match command:
            case Announce():
                actions = self._consumer.announce(
                    command.transfer_id, command.prompt, [self._rank_at(command.peer)], now_s
                )
            case Withdraw():
                self._consumer.withdraw(command.transfer_id)
                actions = []
            case Fetch():
                actions = self._fetch(command, now_s)
            case Refuse():
                actions = self._refuse(command.request_id, command.reason)
            case Cancel():
                actions = self._consumer.cancel(command.request_id, now_s)
            case Release():
                actions = self._consumer.release(
                    command.key, [self._rank_at(command.peer)], all_consumers=command.all_consumers
                )
        self._run(actions, now_s)

    def receive(self, agent: AgentName, message: ToConsumer, now_s: float) -> None:
        if isinstance(message, Staged):
            self._on_part(agent, message, now_s)
            return
        if isinstance(message, Accepted | Commit):
            request_id = self._requests.get(message.key)
            if request_id is not None:
                first = isinstance(message, Accepted)
                self._records.mark(request_id, "accepted" if first else "commit_seen", now_s, last=not first)
        if isinstance(message, Commit):
            message = self._checked(agent, message)
        self._run(self._consumer.on_message(agent, message, now_s), now_s)

    def poll(self, now_s: float) -> None:
        """Ends what has been checked, and gives back the slots whose parts have been unpacked."""
        for request_id, check in list(self._checks.items()):
            if check.done():
                del self._checks[request_id]
                self._run(self._verified(request_id, check, now_s), now_s)
        if self._unstager is None:
            return
        self._give(self._unstager.poll())
        waiting, self._unpacking = self._unpacking, []
        for request_id in waiting:
            self._release(request_id)

    def looking(self, now_s: float) -> bool:
        """Parts are being unpacked, or more may come soon."""
        return self._unstager is not None and self._unstager.active(now_s)

    def tick(self, now_s: float) -> None:
        self._run(self._consumer.on_tick(now_s), now_s)

    def dead(self, agent: AgentName, now_s: float) -> None:
        self._run(self._consumer.on_dead(agent, now_s), now_s)

    def gone(self, agent: AgentName, now_s: float) -> None:
        if self._unstager is not None:
            self._unstager.gone(agent)
        self._addresses.pop(agent, None)
        self._run(self._consumer.on_gone(agent, now_s), now_s)

    @property
    def suspects(self) -> set[AgentName]:
        """Incarnations that may write here and seem not to exist any more: only proof of that sets memory free.

        Those that are silent, and those whose connection broke, because most of them are gone for good.
        """
        self._broken = {agent for agent in self._broken if self._consumer.expects(agent)}
        silent = {agent for receive in self._consumer.quarantined for agent in receive.may_write}
        holders = set() if self._unstager is None else self._unstager.leases.holders
        return silent | {agent for agent in self._broken | holders if self._connections.answer(agent) is None}

    def on_connection(self, event: ConnectionEvent, now_s: float) -> None:
        match event:
            case Delivered():
                actions = self._consumer.on_delivered(event.address, event.agent, event.message, now_s)
                if isinstance(event.message, Register):
                    self._grant(event.agent, event.address)
            case Undelivered():
                # The label is counted, the whole text is for whoever reads the log.
                reason = event.reason.split(":")[0]
                actions = self._consumer.on_undelivered(event.address, event.message, reason, now_s)
                self._run(actions, now_s, event.reason)
                return
            case Disconnected():
                self._broken.add(event.agent)
                actions = self._consumer.on_disconnected(event.agent, now_s)
            case _:
                actions = []
        self._run(actions, now_s)

    def _rank_at(self, peer: SideChannel) -> PeerAddress:
        """The rank of P that writes into this one: with equal sizes, its namesake."""
        return PeerAddress(peer[0], peer[1], self._sender.pp_rank, self._sender.tp_rank)

    def _fetch(self, fetch: Fetch, now_s: float) -> list[Action]:
        address = self._rank_at(fetch.peer)
        if self._max_quarantined and self.quarantine.num_blocks > self._max_quarantined:
            # The scheduler half asks for no more loads then; this one was on its way. P shall not wait for it.
            return [*self._refuse(fetch.request_id, "quarantine_full"), *self._consumer.release(fetch.key, [address])]
        try:
            actions = self._consumer.register(
                fetch.request_id, fetch.key, fetch.prompt, fetch.first_token, _parts(fetch.blocks), fetch.consumers,
                [address], now_s, direct=self._direct,
            )  # fmt: skip
        except (ProtocolError, ValueError) as error:
            # The engine waits for two reports, whatever was wrong with the registration.
            _log.error("kvpush: transfer %s cannot be registered: %s", fetch.key.transfer_id, error)
            return self._refuse(fetch.request_id, "not_registered")
        self._fetches[fetch.request_id] = fetch
        if fetch.engine_id is not None:
            self._engine_ids[fetch.key.at(self._sender)] = fetch.engine_id
        self._requests[fetch.key.at(self._sender)] = fetch.request_id
        self._records.open(fetch.request_id, fetch.key.transfer_id)
        self._records.mark(fetch.request_id, "registered", now_s)
        return actions

    def _refuse(self, request_id: RequestId, reason: str) -> list[Action]:
        """Fails a load for which nobody was asked to write."""
        self._counters.add("loads_failed", reason)
        self._results += [LoadFailed(request_id, reason), Released(request_id)]
        return []

    def _run(self, actions: Sequence[Action], now_s: float, why: str = "") -> None:
        """why: more about a failure among the actions than its reason says."""
        queue = deque(actions)
        while queue:
            action = queue.popleft()
            match action:
                case SendTo():
                    message = action.message
                    engine_id = self._engine_ids.get(message.key) if isinstance(message, Register) else None
                    self._connections.send(action.address, message, action.agent, engine_id)
                case Verify():
                    queue.extendleft(reversed(self._verify(action, now_s)))
                case ReportReceived():
                    self._on_received(action, now_s)
                case ReportFailed():
                    self._counters.add("loads_failed", action.reason)
                    record = self._records.get(action.request_id)
                    name = record.transfer_id if record is not None else action.request_id
                    if record is not None:
                        record.failure = action.reason
                    _log.warning("kvpush: transfer %s failed: %s", name, why or action.reason)
                    self._results.append(LoadFailed(action.request_id, action.reason))
                case ReportReleased():
                    if action.unproven:
                        self._counters.add("quarantines_expired")
                        _log.error(
                            "kvpush: blocks of request %s leave quarantine by time, without proof: if %s continues, it "
                            "writes into what they are used for now",
                            action.request_id, ", ".join(str(writer) for writer in action.unproven),
                        )  # fmt: skip
                    self._release(action.request_id)
                case Quarantined():
                    self._counters.add("quarantines")
                    self._quarantined[action.request_id] = self._held(action)
                    self._sum_up()
                    _log.warning(
                        "kvpush: blocks of request %s stay in quarantine: %s may still write them and does not answer",
                        action.request_id, ", ".join(str(writer) for writer in action.writers),
                    )  # fmt: skip
                case _:
                    raise AssertionError(f"the consumer asked for {action}")

    def _held(self, action: Quarantined) -> Quarantine:
        """The part of a request's memory that its writers were given."""
        fetch = self._fetches[action.request_id]
        first_block = fetch.first_token // self._block_size
        num_blocks = sum(len(group[first_block:]) for group in fetch.blocks)
        return Quarantine(num_blocks, tuple(str(writer) for writer in action.writers))

    def _sum_up(self) -> None:
        held = self._quarantined.values()
        writers = {writer for one in held for writer in one.writers}
        self.quarantine = Quarantine(sum(one.num_blocks for one in held), tuple(sorted(writers)))

    def _verify(self, action: Verify, now_s: float) -> list[Action]:
        fetch = self._fetches[action.request_id]
        if self._digester is None:
            return self._consumer.on_verified(action.request_id, True, now_s)
        digests = [digest for _, digest in action.digests]
        check = self._digester.check(fetch.blocks[0], fetch.first_token, fetch.prompt.num_tokens, digests)
        if not check.done():
            self._checks[action.request_id] = check
            return []
        return self._verified(action.request_id, check, now_s)

    def _verified(self, request_id: RequestId, check: Check, now_s: float) -> list[Action]:
        fetch, verdict = self._fetches[request_id], check.verdict()
        self._counters.add("integrity", verdict)
        self._records.open(request_id, fetch.key.transfer_id)
        self._records.mark(request_id, f"integrity {verdict}", now_s)
        self._records.mark(request_id, "verified", now_s)
        return self._consumer.on_verified(request_id, verdict != "mismatch", now_s)

    def _on_received(self, action: ReportReceived, now_s: float) -> None:
        fetch = self._forget(action.request_id)
        self._counters.add("receives")
        self._counters.add("bytes_received", amount=action.num_bytes)
        self._records.mark(action.request_id, "received", now_s)
        record = self._records.get(action.request_id)
        note = ""
        if record is not None:
            record.num_tokens, record.num_bytes = action.num_tokens, action.num_bytes
            note = record.timing(("registered to received", "registered", "received"))
            verdict = next((moment for moment in record.times_s if moment.startswith("integrity ")), "")
            if verdict:
                note += f", {verdict}"
            elif self._digester is not None and self._digester.chooses(fetch.key.transfer_id):
                self._counters.add("integrity", "not_sent")
                note += ", integrity not checked (P sent no digests)"
        self._records.end(action.request_id, "received")
        _log.info("kvpush: transfer %s received: %d tokens%s", fetch.key.transfer_id, action.num_tokens, note)
        self._results.append(Received(action.request_id))

    def _release(self, request_id: RequestId) -> None:
        """Nobody else writes into the blocks; what is being unpacked has to end first."""
        if self._unstager is not None and self._unstager.busy(request_id):
            self._unpacking.append(request_id)
            return
        self._forget(request_id)
        if self._quarantined.pop(request_id, None) is not None:
            self._sum_up()
        self._records.end(request_id, "cancelled")
        self._results.append(Released(request_id))

    def _grant(self, agent: AgentName, address: PeerAddress) -> None:
        """Tells whoever has got a registration which slots are his; again each time, because messages get lost."""
        if self._unstager is not None and self._connections.answer(agent) is not None:
            self._addresses[agent] = address
            grant = Grant(self._sender, list(self._unstager.leases.grant(agent)))
            self._connections.send(address, grant, agent)

    def _on_part(self, agent: AgentName, message: Staged, now_s: float) -> None:
        if self._unstager is None:
            raise ProtocolError("peer", f"{agent} has staged blocks, and there is no staging memory here")
        request_id = self._consumer.loading(agent, message.key, message.attempt)
        fetch = self._fetches.get(request_id) if request_id is not None else None
        target = None
        if fetch is not None:
            table, first = fetch.blocks[0], fetch.first_token // self._block_size
            end = -(-fetch.prompt.num_tokens // self._block_size)
            target = Target(fetch.request_id, table, first, end)
        self._counters.add("parts", "unpacked" if target is not None else "unwanted")
        self._give(self._unstager.receive(agent, message, target, now_s))

    def _give(self, credits: Sequence[tuple[AgentName, Credit]]) -> None:
        for agent, credit in credits:
            address = self._addresses.get(agent)
            if address is not None:
                self._connections.send(address, credit, agent)

    def _checked(self, agent: AgentName, commit: Commit) -> Commit | Failed:
        """A commit counts only if every staged block that it speaks of was unpacked here for this attempt."""
        request_id = self._consumer.loading(agent, commit.key, commit.attempt)
        if request_id is None or not commit.staged_blocks:
            return commit
        attempt, unstager = commit.attempt, self._unstager
        unpacked = 0 if unstager is None else unstager.num_unpacked(request_id, agent, attempt)
        if unpacked == commit.staged_blocks:
            return commit
        _log.error(
            "kvpush: transfer %s: %d staged blocks committed, %d unpacked", commit.key.transfer_id,
            commit.staged_blocks, unpacked,
        )  # fmt: skip
        return Failed(commit.key, attempt, "staged_missing", quiet=True)

    def _forget(self, request_id: RequestId) -> Fetch:
        if self._unstager is not None:
            self._unstager.forget(request_id)
        fetch = self._fetches.pop(request_id)
        key = fetch.key.at(self._sender)
        self._requests.pop(key, None)
        self._engine_ids.pop(key, None)
        check = self._checks.pop(request_id, None)
        if check is not None:
            check.cancel()  # its blocks may be somebody else's from now on
        return fetch


def _parts(blocks: BlockTable) -> list[list[bytes]]:
    """A block table as parts (outer) of KV cache groups (inner), each encoded."""
    longest = max(len(group) for group in blocks)
    starts = range(0, longest, BLOCKS_PER_PART)
    return [[encode_blocks(group[start : start + BLOCKS_PER_PART]) for group in blocks] for start in starts]
