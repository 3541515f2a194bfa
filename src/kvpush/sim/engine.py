"""One engine: its main loop around the scheduler's model, and its ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpush.plan.paths import Path
from kvpush.protocol.ids import AgentName
from kvpush.sim.pool import BlockPool
from kvpush.sim.request import BLOCK, Request, Status
from kvpush.sim.scheduler import Scheduler
from kvpush.sim.step import EngineDied, Half, Rules, Step
from kvpush.sim.timing import IDLE_STEP_S
from kvpush.sim.worker import Worker
from kvpush.transfer.commands import Fetch, Refuse, Stalled

if TYPE_CHECKING:
    from kvpush.sim.world import World


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine is like. gpu: the forward runs behind its launch, and its event passes later.

    path: how KV comes to it, and how it sends where D lets it choose.
    """

    num_blocks: int
    rules: Rules
    prefix_caching: bool
    recompute_below_tokens: int
    gpu: bool
    stream: bool
    integrity: bool
    forward_s: tuple[float, float]
    pause_s: float
    quarantine_max_blocks: int = 0
    tp_size: int = 1
    path: Path = "direct"


class Engine:
    """One life of an engine. `host` is where it answers; its loop and its side channel live in rank 0's process."""

    def __init__(self, world: World, host: str, life: int, spec: EngineSpec, half: Half) -> None:
        self.world, self.host, self.spec = world, host, spec
        self.engine_id = f"engine-{host}.{life}"
        self.agent = AgentName(f"{host}.{life}")
        self.inputs: deque[Callable[[], None]] = deque()
        self.scheduler = Scheduler(
            half, BlockPool(spec.num_blocks, prefix_caching=spec.prefix_caching), spec.rules, self._on_free
        )
        names = [self.agent, *(AgentName(f"{host}.{life}/{rank}") for rank in range(1, spec.tp_size))]
        self.workers = [Worker(self, rank, name, 100 * life + rank + 1) for rank, name in enumerate(names)]
        self._steps: deque[Step] = deque()  # scheduled, not processed
        self._reported: dict[tuple[str, str], set[int]] = {}  # (request, report) -> ranks that have made it
        self._failed: set[str] = set()
        self._awake = self._quiet = self._stalled = False
        self._blocked_on: Step | None = None

    # What others ask of it

    @property
    def running(self) -> bool:
        """All of its processes run."""
        return all(worker.running for worker in self.workers)

    @property
    def killed(self) -> bool:
        return self.world.fabric.state(self.agent) == "killed"

    def add(self, request: Request) -> None:
        """A request arrives; it waits in the socket while the process is stopped."""
        self._input(lambda: self.scheduler.add(request))

    def abort(self, request: Request) -> None:
        self._input(lambda: self.scheduler.finish(request, Status.FINISHED_ABORTED))

    def reset_prefix_cache(self) -> None:
        self._input(self.scheduler.reset_prefix_cache)

    def _input(self, action: Callable[[], None]) -> None:
        self.inputs.append(action)
        self.wake()

    def leftovers(self) -> list[str]:
        """What is left of requests, but blocks in the prefix cache and tombstones: what is not idle, by name."""
        parts = {
            "scheduler": self.scheduler.idle,
            "scheduler half": self.scheduler.half.idle,
            "steps": not self._steps,
            "counts of reports": not self._reported,
        }
        return [name for name, good in parts.items() if not good] + [
            f"{name} of {worker.agent}" for worker in self.workers for name in worker.leftovers()
        ]

    # The main loop

    def wake(self) -> None:
        """There may be something to do."""
        if not self._awake:
            self._awake = True
            self._again(self.world.fabric.random.random() * 2e-4)

    def _again(self, delay_s: float) -> None:
        self.world.fabric.after(delay_s, self._loop, self.agent)

    def _loop(self) -> None:
        scheduler = self.scheduler
        while self.inputs:
            self.inputs.popleft()()
            self._quiet = False
        depth = 2 if self.spec.rules.overlap else 1
        useful = not self._quiet or scheduler.restless or any(worker.has_results for worker in self.workers)
        if len(self._steps) < depth and scheduler.has_work and useful:
            step = self._schedule()
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

    def _schedule(self) -> Step:
        before = self.scheduler.changes
        step = self.scheduler.schedule()
        step.pending = len(self.workers)
        self._quiet = not step.entries and self.scheduler.changes == before
        self._stalled = any(isinstance(command, Stalled) for command in step.before)
        for command in step.before:
            if isinstance(command, Fetch | Refuse):
                # P writes there from now on, not this step's forward.
                blocks = command.blocks[0][command.first_token // BLOCK :]
                step.fresh = [block for block in step.fresh if block not in blocks]
        self._steps.append(step)
        for worker in self.workers:
            worker.take(step)
        return step

    def _step_idly(self) -> None:
        if self._quiet and not self._awake:
            self._quiet = False
            self.wake()

    def _process(self, step: Step) -> None:
        self._steps.popleft()
        before = self.scheduler.changes
        self._count(step)
        self.scheduler.update(step)
        if step.entries:
            self.world.note_progress()
        self._quiet &= self.scheduler.changes == before
        self._again(2e-5)

    # What the ranks say

    def on_collected(self, step: Step, worker: Worker, sent: set[str], received: set[str], invalid: set[int]) -> None:
        """A rank's reports of a step."""
        step.invalid |= invalid
        step.reports += [(request_id, "sent", worker.tp_rank) for request_id in sent]
        step.reports += [(request_id, "received", worker.tp_rank) for request_id in received]

    def _count(self, step: Step) -> None:
        """vLLM counts reports in the order of steps, and passes one on when every rank has made it."""
        for request_id, name, rank in step.reports:
            ranks = self._reported.setdefault((request_id, name), set())
            if rank in ranks:
                raise EngineDied(f"rank {rank} of {self.agent} reports {request_id} as {name} twice")
            ranks.add(rank)
            if len(ranks) == len(self.workers):
                del self._reported[request_id, name]
                (step.sent if name == "sent" else step.received).add(request_id)
        self._failed |= step.failed
        step.failed = self._failed & step.received
        self._failed -= step.failed

    def on_done(self, step: Step) -> None:
        """A rank has finished a step."""
        step.pending -= 1
        step.done = step.pending == 0
        if step.done and self._blocked_on is step:
            self._blocked_on = None
            self._again(1e-5)

    def _on_free(self, blocks: list[int], preempted: bool) -> None:
        for worker in self.workers:
            self.world.referee.on_free(worker, blocks, preempted)
