"""One engine: its main loop around the scheduler's model, its worker, and its transfer thread, in virtual time.

Every step of it is an event of the fabric that belongs to its agent: they wait while the process is stopped and vanish
when it is killed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvpush.plan.geometry import CacheGeometry
from kvpush.protocol.ids import AgentName, PeerAddress, RequestId
from kvpush.sim.content import LAYERS
from kvpush.sim.network import SimDialer, SimProver
from kvpush.sim.pool import BlockPool
from kvpush.sim.request import BLOCK, Request, Status
from kvpush.sim.scheduler import Half, Rules, Scheduler, Step
from kvpush.sim.timing import IDLE_STEP_S, PREEMPT_WAIT_S, TICK_S, TIMING
from kvpush.sim.transport import WatchedTransport
from kvpush.transfer.commands import Command, Fetch, Preempt, Refuse, Stalled
from kvpush.transfer.core import CoreConfig, TransferCore
from kvpush.transfer.dialer import Answer
from kvpush.transfer.fence import Fence
from kvpush.transfer.reports import Reports
from kvpush.transfer.results import Result
from kvpush.transfer.sidechannel import ProcessIdentity
from kvpush.transfer.sources import PASSED, Event
from kvpush.transport.base import Region

if TYPE_CHECKING:
    from kvpush.sim.world import World

PORT = 14_600
TOKEN_BYTES = 8
BLOCK_BYTES = BLOCK * TOKEN_BYTES
_GARBAGE = np.uint64(0xDEAD_0000_0000_0000)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine is like. gpu: the forward runs behind its launch, and its event passes later."""

    num_blocks: int
    rules: Rules
    prefix_caching: bool
    recompute_below_tokens: int
    gpu: bool
    stream: bool
    integrity: bool
    forward_s: tuple[float, float]
    pause_s: float


class Forward:
    """The event behind a step's forward."""

    __slots__ = ("passed",)

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


class Engine:
    """One life of an engine. `host` is where it answers."""

    def __init__(self, world: World, host: str, life: int, spec: EngineSpec, half: Half) -> None:
        self.world, self.host, self.spec = world, host, spec
        self.agent = AgentName(f"{host}.{life}")
        self.address = PeerAddress(host, PORT)
        self.resumed_s = world.now_s
        self.inputs: deque[Callable[[], None]] = deque()
        self.scheduler = Scheduler(
            half, BlockPool(spec.num_blocks, prefix_caching=spec.prefix_caching), spec.rules, self._on_free
        )
        self.reports = Reports(BLOCK)
        self.fence = Fence()
        self.memory = np.zeros((LAYERS, spec.num_blocks, BLOCK), np.uint64)
        self.transport = WatchedTransport(world.fabric, self.agent, world.blocks_at, world.referee.on_post)
        if world.trace is not None:
            self.transport.on_notify = world.referee.on_notify
        self.base = self.transport.map(self.memory.view(np.uint8).reshape(-1))
        self.layer_bytes = spec.num_blocks * BLOCK_BYTES
        self.geometry = CacheGeometry(
            bases=tuple(self.base + layer * self.layer_bytes for layer in range(LAYERS)),
            block_stride=BLOCK_BYTES,
            head_stride=TOKEN_BYTES,
            token_stride=TOKEN_BYTES,
            content_bytes=TOKEN_BYTES,
            num_blocks=spec.num_blocks,
            num_heads=1,
            block_size=BLOCK,
        )
        self.transport.register([Region(self.base, self.memory.nbytes)])
        self.answer = Answer(
            f"engine-{self.agent}", self.agent, self.transport.metadata(), self.geometry,
            ProcessIdentity(host_id=world.machine(host), pid=life + 1, pid_start=life + 1),
        )  # fmt: skip
        config = CoreConfig(
            self.address, self.geometry, TIMING, reader=self if spec.integrity else None, stream=spec.stream
        )  # fmt: skip
        dialer = SimDialer(world, self.agent, self.look)
        self.core = TransferCore(config, self.transport, dialer, SimProver(world, self.agent, host), self.fence)
        self._commands: deque[tuple[Command, Event]] = deque()
        self._results: list[Result] = []
        self._steps: deque[Step] = deque()  # scheduled, not processed
        self._launching: deque[Step] = deque()
        self._worker_busy = False
        self._fence_wait: tuple[Step, list[RequestId]] | None = None
        self._awake = self._quiet = self._stalled = False
        self._blocked_on: Step | None = None
        self._forwards: deque[tuple[Step, Forward]] = deque()
        self._forward_end_s = 0.0
        self._look_at_s = float("inf")
        self._tick_at_s = 0.0

    # What others ask of it

    @property
    def running(self) -> bool:
        return self.world.fabric.state(self.agent) == "running"

    def add(self, request: Request) -> None:
        """A request arrives; it waits in the socket while the process is stopped."""
        self._input(lambda: self.scheduler.add(request))

    def abort(self, request: Request) -> None:
        self._input(lambda: self.scheduler.finish(request, Status.FINISHED_ABORTED))

    def reset_prefix_cache(self) -> None:
        self._input(self.scheduler.reset_prefix_cache)

    def _input(self, action: Callable[[], None]) -> None:
        self.inputs.append(action)
        self._wake()

    def read(self, blocks: Sequence[int], first_token: int, end_token: int) -> list[bytes]:
        used = list(blocks[first_token // BLOCK : -(-end_token // BLOCK)])
        return [self.memory[layer, used].tobytes() for layer in range(LAYERS)]

    def look(self, delay_s: float | None = None) -> None:
        """Has the transfer thread take a round soon."""
        fabric = self.world.fabric
        if delay_s is None:
            delay_s = fabric.random.random() * self.spec.pause_s
        at_s = fabric.now_s + delay_s
        if at_s < self._look_at_s:
            self._look_at_s = at_s
            fabric.after(delay_s, lambda: self._round(at_s), self.agent)

    @property
    def idle(self) -> bool:
        """Nothing is left of any request, but blocks in the prefix cache and tombstones."""
        return not self.leftovers()

    def leftovers(self) -> list[str]:
        """What is not idle, by name."""
        parts = {
            "scheduler": self.scheduler.idle,
            "scheduler half": self.scheduler.half.idle,
            "reports": self.reports.idle,
            "fence": self.fence.idle,
            "core": self.core.idle,
            "writes in flight": self.transport.in_flight == 0,
            "commands": not self._commands,
            "results": not self._results,
            "steps": not self._steps,
        }
        return [name for name, good in parts.items() if not good]

    # The main loop

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            self.world.fabric.after(self.world.fabric.random.random() * 2e-4, self._loop, self.agent)

    def _again(self, delay_s: float) -> None:
        self.world.fabric.after(delay_s, self._loop, self.agent)

    def _loop(self) -> None:
        scheduler = self.scheduler
        while self.inputs:
            self.inputs.popleft()()
            self._quiet = False
        depth = 2 if self.spec.rules.overlap else 1
        useful = not self._quiet or self._results or scheduler.restless
        if len(self._steps) < depth and scheduler.has_work and useful:
            before = scheduler.changes
            step = scheduler.schedule()
            self._steps.append(step)
            self._launching.append(step)
            self._quiet = not step.entries and scheduler.changes == before
            self._stalled = any(isinstance(command, Stalled) for command in step.before)
            self._work()
            if len(self._steps) < depth and step.entries and not step.done:
                self._again(1e-4)
                return
        if not self._steps:
            self._awake = False
            if scheduler.has_work and self._stalled:
                # vLLM steps all the time; between steps that change nothing only the time matters.
                self.world.fabric.after(IDLE_STEP_S, self._step_idly, self.agent)
            return
        oldest = self._steps[0]
        if oldest.done:
            self._process(oldest)
        else:
            self._blocked_on = oldest

    def _step_idly(self) -> None:
        if self._quiet and not self._awake:
            self._quiet = False
            self._wake()

    def _process(self, step: Step) -> None:
        self._steps.popleft()
        before = self.scheduler.changes
        self.scheduler.update(step)
        if step.entries:
            self.world.note_progress()
        self._quiet &= self.scheduler.changes == before
        self._again(2e-5)

    def _done(self, step: Step) -> None:
        step.done = True
        if self._blocked_on is step:
            self._blocked_on = None
            self._again(1e-5)

    # The worker

    def _work(self) -> None:
        """Takes up the next step: what the connector does before the forward, and its bounded wait."""
        if self._worker_busy or not self._launching:
            return
        self._worker_busy = True
        step = self._launching.popleft()
        preempted = [command.request_id for command in step.before if isinstance(command, Preempt)]
        if preempted:
            self.fence.close(preempted)
            if self.fence.busy(preempted):
                self._fence_wait = (step, preempted)
                self.world.fabric.after(PREEMPT_WAIT_S, lambda: self._end_wait(step), self.agent)
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
            if isinstance(command, Fetch | Refuse):
                blocks = command.blocks[0][command.first_token // BLOCK :]
                step.fresh = [block for block in step.fresh if block not in blocks]
                if isinstance(command, Fetch):
                    self._scrub(blocks)
                    referee.on_fetch(self, command)
        self._submit(commands)
        forward_s = fabric.draw_s(self.spec.forward_s) if step.entries else 1e-5
        if not self.spec.gpu:
            fabric.after(forward_s, lambda: self._finish_cpu(step), self.agent)
            return
        start_s = max(self._forward_end_s, fabric.now_s + 5e-5)
        self._forward_end_s = start_s + forward_s
        fabric.after(5e-5, lambda: self._finish_launch(step), self.agent)

    def _finish_cpu(self, step: Step) -> None:
        self._compute(step)
        self._submit(step.after)
        self._collect(step)
        self._done(step)
        self._worker_busy = False
        self._work()

    def _finish_launch(self, step: Step) -> None:
        """The forward has been launched and ends by itself."""
        event = Forward()
        self._submit(step.after, event)
        self._collect(step)
        self._forwards.append((step, event))
        fabric = self.world.fabric
        fabric.after(max(self._forward_end_s - fabric.now_s, 0.0), self._finish_forward, self.agent)
        self._worker_busy = False
        self._work()

    def _finish_forward(self) -> None:
        """One forward has ended: the oldest one, whatever a stop has done to the order of events."""
        step, event = self._forwards.popleft()
        self._compute(step)
        event.passed = True
        self.look()
        self._done(step)

    def _submit(self, commands: Sequence[Command], event: Event = PASSED) -> None:
        if commands:
            self._commands.extend((command, event) for command in commands)
            self.look()

    def _collect(self, step: Step) -> None:
        results, self._results = self._results, []
        step.sent, step.received = self.reports.collect(step.finished_ids, results)
        step.invalid = self.reports.take_invalid_blocks()

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
            self.memory[:, table[tokens // BLOCK], tokens % BLOCK] = kv[:, entry.start : entry.end]
        for entry in step.entries:
            if entry.start:
                there = self.memory[:, entry.table].reshape(LAYERS, -1)[:, : entry.start]
                wanted = entry.request.content.kv[:, : entry.start]
                if not np.array_equal(there, wanted):
                    self.world.referee.on_wrong_kv(self, entry, there, wanted)

    # The transfer thread

    def _round(self, at_s: float) -> None:
        """One round of the transfer thread, unless an earlier one was asked for."""
        if at_s != self._look_at_s:
            return
        now_s, random = self.world.now_s, self.world.fabric.random
        while self._commands:
            command, event = self._commands.popleft()
            self.core.command(command, now_s, event)
        if self.core.writing and random.random() < 0.5:
            # The interpreter may take the thread off here, and let the engine's main thread do something meanwhile.
            self.world.fabric.after(random.random() * self.spec.pause_s, self._poll, self.agent)
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
            self._wake()
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

    def _on_free(self, blocks: list[int], preempted: bool) -> None:
        self.world.referee.on_free(self, blocks, preempted)
