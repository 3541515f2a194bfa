"""One rank of an engine: its memory, the worker half of the connector, and its transfer thread, in virtual time.

Every step of it is an event of the fabric that belongs to its agent: they wait while the process is stopped and vanish
when it is killed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvpush.plan.geometry import CacheGeometry
from kvpush.protocol.ids import AgentName, PeerAddress, RequestId
from kvpush.sim.content import LAYERS
from kvpush.sim.hashing import LateHasher
from kvpush.sim.network import SimDialer, SimProver
from kvpush.sim.packing import ArrayPeer
from kvpush.sim.request import BLOCK
from kvpush.sim.staging import COSTS, PEER_REGION, make_peer, make_staging
from kvpush.sim.step import Entry, Step
from kvpush.sim.timing import PREEMPT_WAIT_S, TICK_S, TIMING
from kvpush.sim.transport import WatchedTransport
from kvpush.transfer.commands import Command, Fetch, Preempt
from kvpush.transfer.core import CoreConfig, TransferCore
from kvpush.transfer.dialer import Answer
from kvpush.transfer.fence import Fence
from kvpush.transfer.packing.base import PeerUnavailable
from kvpush.transfer.packing.peer import PeerRegion
from kvpush.transfer.pieces import PathConfig
from kvpush.transfer.reports import Reports
from kvpush.transfer.results import Result
from kvpush.transfer.sidechannel import ProcessIdentity
from kvpush.transfer.sources import PASSED, Event
from kvpush.transport.base import Region

if TYPE_CHECKING:
    from kvpush.sim.content import Words
    from kvpush.sim.engine import Engine

PORT = 14_600
TOKEN_BYTES = 8
BLOCK_BYTES = BLOCK * TOKEN_BYTES
_GARBAGE = np.uint64(0xDEAD_0000_0000_0000)


class Forward:
    """The event behind a step's forward."""

    __slots__ = ("passed",)

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


class Worker:
    """One rank of one life of an engine."""

    def __init__(self, engine: Engine, tp_rank: int, agent: AgentName, pid: int) -> None:
        self.engine, self.world, self.spec = engine, engine.world, engine.spec
        self.agent, self.tp_rank = agent, tp_rank
        self.resumed_s = self.world.now_s
        self.reports = Reports(BLOCK)
        self.fence = Fence()
        num_blocks = self.spec.num_blocks
        self.memory = np.zeros((LAYERS, num_blocks, BLOCK), np.uint64)
        referee = self.world.referee
        self.transport = WatchedTransport(self.world.fabric, agent, self.world.blocks_at, referee.on_post)
        if self.world.trace is not None:
            self.transport.on_notify = referee.on_notify
        self.base = self.transport.map(self.memory.view(np.uint8).reshape(-1))
        self.layer_bytes = num_blocks * BLOCK_BYTES
        geometry = CacheGeometry(
            bases=tuple(self.base + layer * self.layer_bytes for layer in range(LAYERS)),
            block_stride=BLOCK_BYTES,
            head_stride=TOKEN_BYTES,
            token_stride=TOKEN_BYTES,
            content_bytes=TOKEN_BYTES,
            num_blocks=num_blocks,
            num_heads=1,
            block_size=BLOCK,
        )
        self.transport.register([Region(self.base, self.memory.nbytes)])
        self.staging = make_staging(self) if self.spec.path in ("staged", "auto") else None
        area = None if self.staging is None else self.staging.receive
        process = ProcessIdentity(host_id=self.world.machine(engine.host), pid=pid, pid_start=pid)
        self.answer = Answer(engine.engine_id, agent, self.transport.metadata(), geometry, process, area, self._peer())
        config = CoreConfig(
            PeerAddress(engine.host, PORT, 0, tp_rank), geometry, TIMING,
            hasher=LateHasher(self.memory) if self.spec.integrity else None, stream=self.spec.stream,
            paths=PathConfig(self.spec.path, COSTS, self.staging, self._map, background=False),
            quarantine_max_blocks=self.spec.quarantine_max_blocks,
        )  # fmt: skip
        dialer = SimDialer(self.world, agent, self.look)
        prover = SimProver(self.world, agent, engine.host)
        self.core = TransferCore(config, self.transport, dialer, prover, self.fence)
        self._told = self.core.quarantine
        self._commands: deque[tuple[Command, Event]] = deque()
        self._results: list[Result] = []
        self._launching: deque[Step] = deque()
        self._busy = False
        self._fence_wait: tuple[Step, list[RequestId]] | None = None
        self._forwards: deque[tuple[Step, Forward]] = deque()
        self._forward_end_s = 0.0
        self._look_at_s = float("inf")
        self._tick_at_s = 0.0

    def _peer(self) -> tuple[PeerRegion, ...]:
        """Caches on GPUs can be mapped by those of the same machine."""
        return (PEER_REGION,) if self.spec.gpu and self.spec.path in ("auto", "peer") else ()

    def _map(self, answer: Answer) -> ArrayPeer:
        if not self.spec.gpu or answer.process.host_id != self.world.machine(self.engine.host):
            raise PeerUnavailable("it is somewhere else")
        return make_peer(self, answer)

    @property
    def running(self) -> bool:
        return self.world.fabric.state(self.agent) == "running"

    @property
    def has_results(self) -> bool:
        """The transfer thread has ended something that no step has picked up yet."""
        return bool(self._results)

    def leftovers(self) -> list[str]:
        """What is not idle, by name."""
        parts = {
            "reports": self.reports.idle,
            "fence": self.fence.idle,
            "core": self.core.idle,
            "writes in flight": self.transport.in_flight == 0,
            "commands": not self._commands,
            "results": not self._results,
        }
        return [name for name, good in parts.items() if not good]

    def kv_of(self, entry_kv: Words) -> Words:
        """This rank's share of some KV: other heads than the others have."""
        return entry_kv + np.uint64(self.tp_rank)

    # The main thread

    def take(self, step: Step) -> None:
        """The next step; it begins when this process comes to it and the one before has been launched."""
        self._launching.append(step)
        self._after(1e-6, self._begin)

    def _begin(self) -> None:
        """What the connector does before the forward, and its bounded wait."""
        if self._busy or not self._launching:
            return
        self._busy = True
        step = self._launching.popleft()
        preempted = [command.request_id for command in step.before if isinstance(command, Preempt)]
        if preempted:
            self.fence.close(preempted)
            if self.fence.busy(preempted):
                self._fence_wait = (step, preempted)
                self._after(PREEMPT_WAIT_S, lambda: self._end_wait(step))
                return
        self._launch(step, preempted)

    def _end_wait(self, step: Step) -> None:
        if self._fence_wait is not None and self._fence_wait[0] is step:
            preempted, self._fence_wait = self._fence_wait[1], None
            self._launch(step, preempted)

    def _launch(self, step: Step, preempted: list[RequestId]) -> None:
        fabric, referee = self.world.fabric, self.world.referee
        poisoned = self.fence.poison(preempted) if preempted else set()
        for request_id in preempted:
            referee.on_preempted(self, request_id, poisoned)
        commands = self.reports.admit(step.before, poisoned)
        for command in commands:
            if isinstance(command, Fetch):
                self._scrub(command.blocks[0][command.first_token // BLOCK :])
                referee.on_fetch(self, command)
        self._submit(commands)
        forward_s = fabric.draw_s(self.spec.forward_s) if step.entries else 1e-5
        if not self.spec.gpu:
            self._after(forward_s, lambda: self._finish_cpu(step))
            return
        self._forward_end_s = max(self._forward_end_s, fabric.now_s + 5e-5) + forward_s
        self._after(5e-5, lambda: self._finish_launch(step))

    def _finish_cpu(self, step: Step) -> None:
        self._compute(step)
        self._submit(step.after)
        self._collect(step)
        self.engine.on_done(step)
        self._busy = False
        self._begin()

    def _finish_launch(self, step: Step) -> None:
        """The forward has been launched and ends by itself."""
        event = Forward()
        self._submit(step.after, event)
        self._collect(step)
        self._forwards.append((step, event))
        self._after(max(self._forward_end_s - self.world.now_s, 0.0), self._finish_forward)
        self._busy = False
        self._begin()

    def _finish_forward(self) -> None:
        """One forward has ended: the oldest one, whatever a stop has done to the order of events."""
        step, event = self._forwards.popleft()
        self._compute(step)
        event.passed = True
        self.look()
        self.engine.on_done(step)

    def _submit(self, commands: Sequence[Command], event: Event = PASSED) -> None:
        if commands:
            self._commands.extend((command, event) for command in commands)
            self.look()

    def _collect(self, step: Step) -> None:
        results, self._results = self._results, []
        sent, received, failed = self.reports.collect(step.finished_ids, results)
        if self.core.quarantine != self._told:
            self._told = step.quarantines[self.core.rank] = self.core.quarantine
        step.failures |= self.reports.take_failures()
        if self.spec.rules.failed_recving:
            step.failed |= failed
        self.engine.on_collected(step, self, sent, received, self.reports.take_invalid_blocks())

    def _scrub(self, blocks: Sequence[int]) -> None:
        """What others left in new blocks must not be taken for KV."""
        if blocks:
            self.memory[:, list(blocks)] = _GARBAGE

    def _compute(self, step: Step) -> None:
        """The forward: reads the KV of all earlier tokens, writes that of the new ones."""
        if step.fresh:
            self.world.referee.on_reuse(self, step.fresh)
            self._scrub(step.fresh)
        for entry in step.entries:
            table, kv = np.array(entry.table), entry.request.content.kv
            tokens = np.arange(entry.start, entry.end)
            self.memory[:, table[tokens // BLOCK], tokens % BLOCK] = self.kv_of(kv[:, entry.start : entry.end])
        for entry in step.entries:
            if entry.start:
                self._check(entry)

    def _check(self, entry: Entry) -> None:
        there = self.memory[:, entry.table].reshape(LAYERS, -1)[:, : entry.start]
        wanted = self.kv_of(entry.request.content.kv[:, : entry.start])
        if not np.array_equal(there, wanted):
            self.world.referee.on_wrong_kv(self, entry, there, wanted)

    # The transfer thread

    def look(self, delay_s: float | None = None) -> None:
        """Has the transfer thread take a round soon."""
        fabric = self.world.fabric
        if delay_s is None:
            delay_s = fabric.random.random() * self.spec.pause_s
        at_s = fabric.now_s + delay_s
        if at_s < self._look_at_s:
            self._look_at_s = at_s
            self._after(delay_s, lambda: self._round(at_s))

    def _round(self, at_s: float) -> None:
        """One round of the transfer thread, unless an earlier one was asked for."""
        if at_s != self._look_at_s:
            return
        now_s, random = self.world.now_s, self.world.fabric.random
        while self._commands:
            command, event = self._commands.popleft()
            quarantined = self.core.quarantine.num_blocks
            self.core.command(command, now_s, event)
            if isinstance(command, Fetch):
                self.world.referee.on_given(self, command, quarantined)
        if self.core.writing and random.random() < 0.5:
            # The interpreter may take the thread off here, and let the engine's main thread do something meanwhile.
            self._after(random.random() * self.spec.pause_s, self._poll)
        else:
            self._poll()

    def _poll(self) -> None:
        self._look_at_s = float("inf")
        now_s, core = self.world.now_s, self.core
        core.poll(now_s)
        results = core.take_results()
        for result in results:
            self.world.referee.on_result(self, result)
        if results:
            self._results += results
            self.world.note_progress()
            self.engine.wake()
        if self._fence_wait is not None:
            step, preempted = self._fence_wait
            if not self.fence.busy(preempted):
                self._end_wait(step)
        if now_s >= self._tick_at_s:
            self._tick_at_s = now_s + TICK_S
            self.world.referee.on_tick(self)
        if self._commands:
            self.look()
        elif not core.idle:
            self.look(max(self._tick_at_s - now_s, 1e-6))
        if self.transport.frozen:
            self.world.freeze(self)

    def _after(self, delay_s: float, action: object) -> None:
        self.world.fabric.after(delay_s, action, self.agent)  # type: ignore[arg-type]
