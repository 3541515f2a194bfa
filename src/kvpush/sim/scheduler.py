"""A small model of vLLM's scheduler: admission, chunks, preemption, loads, failures, and what it asserts.

It calls the connector's scheduler half where vLLM does, and hands it outputs of the shape that vLLM's have.
"""

from __future__ import annotations

from collections.abc import Callable

from kvpush.sim.pool import BlockPool
from kvpush.sim.request import BLOCK, Request, Status, num_blocks
from kvpush.sim.step import EngineDied, Entry, Half, Rules, Step, scheduler_output


class Scheduler:
    """on_free(blocks, preempted): told which blocks have gone back to the pool, and whether that was a preemption."""

    def __init__(self, half: Half, pool: BlockPool, rules: Rules, on_free: Callable[[list[int], bool], None]) -> None:
        self.half, self.pool, self.rules = half, pool, rules
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._on_free = on_free
        self._finished_ids: set[str] = set()
        self._preempted_ids: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._deferred: list[tuple[int, list[int], bool]] = []
        self._step = self._processed = 0
        self.changes = 0  # whatever lets the next step do more than this one

    @property
    def has_work(self) -> bool:
        """vLLM steps while anything is unfinished, unfreed, or not told to the workers."""
        return bool(self.requests or self._finished_ids)

    @property
    def restless(self) -> bool:
        """The next step has something to say even if it computes nothing."""
        return bool(self._finished_ids or self._preempted_ids or self._received or self._deferred)

    @property
    def idle(self) -> bool:
        left = self.requests or self.waiting or self.running or self._received or self._failed or self._deferred
        return not left and self.pool.all_free

    # Arrivals and departures

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.half.on_new_request(request)

    def finish(self, request: Request, status: Status) -> None:
        """From outside of a step: an abort, or a load that has failed."""
        if request.finished or self.requests.get(request.request_id) is not request:
            return
        loading = request.status is Status.WAITING_FOR_REMOTE_KVS and request.request_id not in self._received
        self._received.discard(request.request_id)
        self._failed.discard(request.request_id)
        self._end(request, status, delayed=loading)

    def _end(self, request: Request, status: Status, *, delayed: bool = False) -> None:
        queue = self.running if request.status is Status.RUNNING else self.waiting
        queue.remove(request)
        request.status = status
        held = self.half.on_finished(request, (tuple(request.blocks[: num_blocks(request.computed)]),))
        self._finished_ids.add(request.request_id)
        if not held and not delayed:
            self._free(request)

    def _free(self, request: Request) -> None:
        self._return_blocks(request)
        del self.requests[request.request_id]

    def _return_blocks(self, request: Request, *, preempted: bool = False) -> None:
        blocks, request.blocks = request.blocks, []
        self.changes += 1
        if not blocks:
            return
        if self._must_defer(request):
            self._deferred.append((self._step, blocks, preempted))
            return
        self._on_free(self.pool.give_back(blocks), preempted)

    def _must_defer(self, request: Request) -> bool:
        """A step in flight may still write its blocks."""
        return self.rules.defer_free and request.last_step > self._processed

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._return_blocks(request, preempted=True)
        request.status = Status.PREEMPTED
        request.computed = request.placeholders = 0
        request.stale = request.in_flight
        request.drop_stale = self.rules.drop_stale and request.hands_over
        request.preemptions += 1
        self.waiting.insert(0, request)
        self._preempted_ids.add(request.request_id)

    def reset_prefix_cache(self) -> None:
        """With running requests preempted; vLLM refuses while others hold blocks."""
        if any(request.blocks and request.status is not Status.RUNNING for request in self.requests.values()):
            return
        if self._deferred:
            return
        for request in list(reversed(self.running)):
            self._preempt(request)
            request.drop_stale = True
        self.pool.forget_cache()

    # A step

    def schedule(self) -> Step:
        """The next step, the connector's metadata included."""
        self._step += 1
        budget = self.rules.budget
        entries: list[Entry] = []
        cached: list[tuple[Request, list[int] | None, int]] = []
        new: list[tuple[Request, int]] = []
        resumed: set[str] = set()
        num_preempted = len(self._preempted_ids)  # by a reset of the cache: those may come back in this very step
        for request in list(self.running):
            if not budget or request.status is not Status.RUNNING:
                break
            start = request.computed
            advanced = self._advance(request, budget)
            if advanced is None:
                break
            count, gained = advanced
            if count:
                budget -= count
                cached.append((request, gained or None, start))
                entries.append(self._entry(request, start, count))
        taken_back = len(self._preempted_ids) > num_preempted
        # Those that hold blocks come first, or they and whoever waits for their blocks would wait for each other.
        waiting = [*(r for r in self.waiting if r.blocks), *(r for r in self.waiting if not r.blocks)]
        for request in waiting if not taken_back else ():
            if not budget or len(self.running) >= self.rules.max_running:
                break
            if not self._ready(request):
                continue
            admitted = self._admit(request, budget)
            if admitted is None:
                break
            start, count = admitted
            if not count:
                continue
            budget -= count
            if request.preemptions and not self.rules.v2:
                resumed.add(request.request_id)
                cached.append((request, list(request.blocks), start))
            else:
                new.append((request, start))
            entries.append(self._entry(request, start, count))
        step = Step(self._step, entries, self._finished_ids)
        output = scheduler_output(entries, new, cached, resumed, self._preempted_ids, self._finished_ids)
        step.before, step.after = self.half.on_step(output)
        step.fresh, self.pool.fresh = self.pool.fresh, []
        self._finished_ids, self._preempted_ids = set(), set()
        return step

    def _entry(self, request: Request, start: int, count: int) -> Entry:
        request.computed = start + count
        request.in_flight += 1
        request.last_step = self._step
        samples = request.computed >= request.known
        entry = Entry(request, start, request.computed, list(request.blocks), samples)
        if samples:
            request.placeholders += 1
        return entry

    def _advance(self, request: Request, budget: int) -> tuple[int, list[int]] | None:
        """A running request: (tokens of this step, blocks gained). It may take the blocks of later ones; None if there
        is no room all the same."""
        count = min(request.known - request.computed, self.rules.chunk, budget)
        if count <= 0 or request.outputs + request.placeholders >= request.max_tokens:
            return 0, []
        need = num_blocks(request.computed + count) - len(request.blocks)
        while need > self.pool.num_free:
            victim = self.running[-1]
            if self._must_defer(victim):
                return None
            self._preempt(victim)
            if victim is request:
                return None
        gained = self.pool.take(max(need, 0))
        request.blocks += gained
        self._cache(request, request.computed + count)
        return count, gained

    def _ready(self, request: Request) -> bool:
        """Whether a waiting request may be looked at; takes up what its load has brought."""
        if request.stale and not request.drop_stale:
            return False
        if request.status is not Status.WAITING_FOR_REMOTE_KVS:
            return True
        if request.request_id not in self._received:
            return False
        self._received.discard(request.request_id)
        self.changes += 1
        if request.request_id in self._failed:
            self._failed.discard(request.request_id)
            if not request.computed:
                self._return_blocks(request)
        self._cache(request, request.computed)
        if request.computed == request.known:
            request.computed -= 1
        request.status = Status.PREEMPTED if request.preemptions else Status.WAITING
        return True

    def _admit(self, request: Request, budget: int) -> tuple[int, int] | None:
        """(first token, tokens) of a waiting request; no tokens if it loads or must wait, None if there is no room."""
        hits: list[int] = []
        external, load = 0, False
        start = request.computed
        if start == 0:
            hits = self.pool.hit(request.keys(request.known - 1))
            start = len(hits) * BLOCK
            found, load = self.half.matched_tokens(request.request_id, start)
            if found is None:
                return 0, 0
            external = found
            if external < 0 or load is not (external > 0) or start + external > request.known:
                raise EngineDied(f"{external} tokens are to be loaded for {request.request_id}, which has {start}")
        count = 0 if load else min(request.known - start, self.rules.chunk, budget)
        held = len(request.blocks) or len(hits)
        need = num_blocks(start + external + count) - held
        room = self.pool.available(hits)
        whole = num_blocks(request.known) - held if self.rules.full_isl else 0
        reserved = self._reserved() if load and self.rules.full_isl else 0
        if max(need, whole) > room - reserved:
            return None
        if not request.blocks:
            self.pool.touch(hits)
            request.blocks = list(hits)
        request.blocks += self.pool.take(max(need, 0))
        self.half.on_allocated(request.request_id, (tuple(request.blocks),), external)
        if load:
            if request.loads:
                raise EngineDied(f"{request.request_id} is loaded twice")
            request.loads += 1
            self.changes += 1
            request.status = Status.WAITING_FOR_REMOTE_KVS
            request.computed = start + external
            return start, 0
        self.waiting.remove(request)
        self.running.append(request)
        request.status = Status.RUNNING
        self._cache(request, start + count)
        return start, count

    def _reserved(self) -> int:
        """Blocks that requests in the middle of their prefill will still take."""
        return sum(max(num_blocks(request.known) - len(request.blocks), 0) for request in self.running)

    def _cache(self, request: Request, num_tokens: int) -> None:
        for key, block in zip(request.keys(num_tokens), request.blocks, strict=False):
            self.pool.cache(key, block)

    # Its output

    def update(self, step: Step) -> None:
        """Processes a step's output in vLLM's order."""
        self._processed = step.number
        while self._deferred and self._deferred[0][0] <= self._processed:
            _, blocks, preempted = self._deferred.pop(0)
            self.changes += 1
            self._on_free(self.pool.give_back(blocks), preempted)
        failed = self._fail_loads(step) | self._invalidate(step)
        for entry in step.entries:
            self._output(entry, failed)
        if self.rules.policy == "fail":
            for request_id in sorted(failed):
                self.finish(self.requests[request_id], Status.FINISHED_ERROR)
        self.half.on_failed(sorted(step.failures))
        self.half.on_quarantines(step.quarantines)
        self.half.on_reported(step.received)
        for request_id in sorted(step.received):
            request = self._reported(request_id, "received")
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                self._received.add(request_id)
            elif request.finished:
                self._free(request)
            else:
                raise EngineDied(f"{request_id} was reported as received, and is {request.status.name}")
        for request_id in sorted(step.sent):
            self._free(self._reported(request_id, "sent"))
        self.changes += bool(step.entries or step.received or step.sent or step.invalid)

    def _reported(self, request_id: str, what: str) -> Request:
        request = self.requests.get(request_id)
        if request is None:
            raise EngineDied(f"{request_id} was reported as {what}, and the engine does not hold it")
        if what == "sent" and not request.finished:
            raise EngineDied(f"{request_id} was reported as sent, and is {request.status.name}")
        return request

    def _output(self, entry: Entry, failed: set[str]) -> None:
        request = entry.request
        request.in_flight -= 1
        stale = request.stale > 0
        request.stale -= stale
        if request.finished or request.request_id in failed or (stale and request.drop_stale) or not entry.samples:
            return
        request.outputs += 1
        request.placeholders -= not stale
        if request.outputs >= request.max_tokens:
            self._end(request, Status.FINISHED_LENGTH_CAPPED)

    def _fail_loads(self, step: Step) -> set[str]:
        """Requests whose load has failed, by name; under `recompute` they begin anew."""
        found = (self.requests.get(request_id) for request_id in step.failed)
        loads = [r for r in found if r is not None and r.status is Status.WAITING_FOR_REMOTE_KVS]
        failed = {request.request_id for request in loads}
        if self.rules.policy == "fail":
            return failed
        for request in loads:
            request.computed = 0
        self._failed |= failed
        return set()

    def _invalidate(self, step: Step) -> set[str]:
        """Requests whose load has failed; under `recompute` they go on from the first block that holds nothing."""
        failed = set()
        for request in self.requests.values() if step.invalid else ():
            hit = [place for place, block in enumerate(request.blocks) if block in step.invalid]
            if not hit or request.finished or hit[0] * BLOCK >= request.computed:
                continue
            if request.status is not Status.WAITING_FOR_REMOTE_KVS:
                raise EngineDied(f"invalid blocks hit {request.request_id}, which is {request.status.name}")
            request.computed = hit[0] * BLOCK
            failed.add(request.request_id)
        if self.rules.policy == "recompute":
            self._failed |= failed
            return set()
        return failed
