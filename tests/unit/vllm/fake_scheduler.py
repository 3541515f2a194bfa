"""A scheduler that treats a KV connector as vLLM's does, in the shapes of its versions, and asserts what vLLM asserts.

Left out is what a connector cannot see. Blocks are ids of a pool with reference counts and a prefix cache, so that a
block that is given back too early, twice or never is found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any, Literal

from fake_pool import BLOCK, Pool

__all__ = ["BLOCK", "Request", "Scheduler", "Shape", "Status", "next_token"]

Shape = Literal["v1", "v2", "v2-0.26"]


class Status(Enum):
    WAITING = auto()
    WAITING_FOR_REMOTE_KVS = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_STOPPED = auto()
    FINISHED_LENGTH_CAPPED = auto()
    FINISHED_ABORTED = auto()
    FINISHED_ERROR = auto()

    @property
    def finished(self) -> bool:
        return self.name.startswith("FINISHED")


def next_token(tokens: Sequence[int]) -> int:
    """The model: greedy, so that every engine says the same."""
    return int.from_bytes(hashlib.blake2b(repr(tuple(tokens)).encode(), digest_size=2).digest(), "little")


@dataclass(eq=False)
class Request:
    """What vLLM keeps of a request. num_computed counts steps that are in flight; stale: output tokens of steps that
    were in flight when it was preempted."""

    request_id: str
    prompt_token_ids: list[int]
    kv_transfer_params: dict[str, Any] | None
    max_tokens: int
    status: Status = Status.WAITING
    blocks: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_in_flight: int = 0
    stale_steps: int = 0
    drop_stale: bool = False
    placeholders: int = 0
    preemptions: int = 0
    freed: bool = False
    loads: int = 0
    params_out: dict[str, Any] | None = None
    mm_features: tuple[object, ...] = ()
    lora_request: object = None
    cache_salt: str | None = None
    prompt_embeds: object = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def tokens(self) -> list[int]:
        return self.prompt_token_ids + self.outputs

    @property
    def finished(self) -> bool:
        return self.status.finished


class Scheduler:
    """One engine's scheduler. connector: the scheduler half. policy: of failed loads."""

    def __init__(
        self,
        connector: Any,
        *,
        shape: Shape = "v1",
        num_blocks: int = 64,
        prefix_caching: bool = True,
        policy: Literal["fail", "recompute"] = "fail",
        chunk: int = 8,
        kv_delivery: bool = False,
        world_size: int = 1,
    ) -> None:
        self.connector, self.shape, self.policy = connector, shape, policy
        self.pool = Pool(num_blocks, prefix_caching=prefix_caching)
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.ended: dict[str, Request] = {}
        self._chunk, self._kv_delivery, self._world_size = chunk, kv_delivery, world_size
        self._finished_ids: set[str] = set()
        self._preempted_ids: set[str] = set()
        self._received_ids: set[str] = set()
        self._failed_ids: set[str] = set()
        self._failed_pending: set[str] = set()
        self._counts: dict[tuple[str, str], int] = {}

    @property
    def busy(self) -> bool:
        """There will be another step: it may also have to tell the workers who has finished."""
        return bool(self.requests or self._finished_ids)

    # Arrivals and departures

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.connector.on_new_request(request)

    def finish(self, request: Request, status: Status) -> None:
        """From outside the step: an abort, or a failed load under policy fail."""
        if request.finished:
            return
        delay = request.status is Status.WAITING_FOR_REMOTE_KVS and request.request_id not in self._received_ids
        self._received_ids.discard(request.request_id)
        self._failed_ids.discard(request.request_id)
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        request.status = status
        self._free(request, delay=delay)

    def _free(self, request: Request, *, delay: bool = False) -> None:
        blocks = request.blocks[: -(-request.num_computed // BLOCK)]
        held, request.params_out = self.connector.request_finished_all_groups(request, (list(blocks),))
        self._finished_ids.add(request.request_id)
        if not held and not delay:
            self._free_blocks(request)

    def _free_blocks(self, request: Request) -> None:
        assert request.finished
        assert not request.freed, f"{request.request_id} was freed twice"
        request.freed = True
        self.pool.give_back(request.blocks)
        request.blocks = []
        self.ended[request.request_id] = self.requests.pop(request.request_id)

    def preempt(self, request: Request, *, drop_stale: bool = False) -> None:
        assert request.status is Status.RUNNING
        self.running.remove(request)
        self.pool.give_back(request.blocks)
        request.blocks = []
        request.status = Status.PREEMPTED
        request.num_computed = request.placeholders = 0
        request.stale_steps = request.num_in_flight
        request.drop_stale = drop_stale or (self._kv_delivery and self._hands_off(request))
        request.preemptions += 1
        self.waiting.insert(0, request)
        self._preempted_ids.add(request.request_id)

    def _hands_off(self, request: Request) -> bool:
        return bool((request.kv_transfer_params or {}).get("do_remote_decode"))

    def reset_prefix_cache(self) -> None:
        """With running requests preempted; vLLM refuses while loads hold blocks."""
        if any(request.blocks for request in self.requests.values() if request not in self.running):
            return
        for request in list(reversed(self.running)):
            self.preempt(request, drop_stale=True)
        self.pool.reset()

    # A step

    def schedule(self) -> SimpleNamespace:
        """One SchedulerOutput, the connector's metadata included."""
        new, cached, resumed = [], [], set()
        scheduled: dict[str, int] = {}
        before = len(self._preempted_ids)
        for request in list(self.running):
            if request in self.running:
                self._schedule_running(request, scheduled, cached)
        # A step that preempts admits nobody; after a cache reset the same requests come back in the same step.
        for request in list(self.waiting) if len(self._preempted_ids) == before else ():
            if not self._admit(request):
                continue
            was_preempted = request.status is Status.PREEMPTED
            if not self._start(request, scheduled):
                continue
            entry = SimpleNamespace(
                req_id=request.request_id,
                block_ids=(list(request.blocks),),
                num_computed_tokens=request.num_computed,
            )
            if was_preempted and self.shape == "v1":
                resumed.add(request.request_id)
                cached.append((request, (list(request.blocks),), request.num_computed))
            else:
                new.append(entry)
        output = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[request.request_id for request, _, _ in cached],
                resumed_req_ids=resumed,
                new_block_ids=[blocks for _, blocks, _ in cached],
                num_computed_tokens=[computed for _, _, computed in cached],
            ),
            num_scheduled_tokens=scheduled,
            preempted_req_ids=self._preempted_ids or (None if self.shape == "v2-0.26" else set()),
            finished_req_ids=self._finished_ids,
        )
        output.kv_connector_metadata = self.connector.build_connector_meta(output)
        for request_id, count in scheduled.items():
            request = self.requests[request_id]
            request.num_computed += count
            request.num_in_flight += 1
            if request.num_computed >= len(request.tokens) + request.placeholders:
                request.placeholders += 1
            self.pool.cache(request.tokens, request.blocks, request.num_computed)
        self._finished_ids, self._preempted_ids = set(), set()
        return output

    def _schedule_running(self, request: Request, scheduled: dict[str, int], cached: list[Any]) -> None:
        wanted = len(request.tokens) + request.placeholders - request.num_computed
        if wanted <= 0 or len(request.outputs) + request.placeholders >= request.max_tokens:
            return
        wanted = min(wanted, self._chunk)
        need = -(-(request.num_computed + wanted) // BLOCK) - len(request.blocks)
        while need > 0 and not self.pool.can_allocate(need):
            victim = self.running[-1]
            if victim.request_id in scheduled:
                return  # only those that come later can be taken back in this step
            self.preempt(victim)
            if victim is request:
                return
        gained = self.pool.allocate(max(need, 0))
        request.blocks = request.blocks + gained
        scheduled[request.request_id] = wanted
        cached.append((request, (gained,) if gained else None, request.num_computed))

    def _admit(self, request: Request) -> bool:
        """Whether a waiting request may be looked at; takes up what a load has brought."""
        if request.status is not Status.WAITING_FOR_REMOTE_KVS:
            return True
        if request.request_id not in self._received_ids:
            return False
        self._received_ids.discard(request.request_id)
        if request.request_id in self._failed_ids:
            self._failed_ids.discard(request.request_id)
            if not request.num_computed:
                self.pool.give_back(request.blocks)
                request.blocks = []
            else:
                self.pool.cache(request.tokens, request.blocks, request.num_computed)
        else:
            self.pool.cache(request.tokens, request.blocks, request.num_computed)
        if request.num_computed == len(request.tokens):
            request.num_computed -= 1
        request.status = Status.PREEMPTED if request.preemptions else Status.WAITING
        return True

    def _start(self, request: Request, scheduled: dict[str, int]) -> bool:
        """Allocates for a waiting request; True if it is scheduled in this step."""
        tokens, hits, external, load = request.tokens, [], 0, False
        computed = request.num_computed
        if computed == 0:
            hits = self.pool.hit(tokens)
            computed = len(hits) * BLOCK
            answer = self.connector.get_num_new_matched_tokens(request, computed)
            assert isinstance(answer, tuple), answer
            found, load = answer
            if found is None:
                assert not load
                return False
            external = found
            assert external >= 0, f"a negative count for {request.request_id}"
            assert load is (external > 0), "a load of nothing, or a synchronous one"
            assert computed + external <= len(tokens)
        end = computed + external if load else min(len(tokens), computed + self._chunk)
        need = -(-end // BLOCK) - len(request.blocks or hits)
        if not self.pool.can_allocate(need, hits):
            return False
        request.blocks = [*request.blocks, *self.pool.allocate(max(need, 0), hits)]
        self.connector.update_state_after_alloc(
            request, SimpleNamespace(get_block_ids=lambda: (list(request.blocks),)), external
        )
        if load:
            assert request.loads == 0, f"{request.request_id} is loaded twice"
            request.loads += 1
            request.num_computed = computed + external
            request.status = Status.WAITING_FOR_REMOTE_KVS
            return False
        self.waiting.remove(request)
        self.running.append(request)
        request.status = Status.RUNNING
        request.num_computed = computed
        scheduled[request.request_id] = end - computed
        return True

    def update(self, output: SimpleNamespace, results: Sequence[SimpleNamespace]) -> None:
        """update_from_output: results of all ranks of this step."""
        full = self._count(results)
        failed = self._fail(full["failed"])
        failed |= self._invalidate(set().union(*(result.invalid_block_ids for result in results)), output)
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None:
                continue
            request.num_in_flight -= 1
            stale = request.stale_steps > 0
            request.stale_steps -= stale
            if request.finished or request_id in failed or (stale and request.drop_stale):
                continue
            start = self._start_of(output, request_id)
            if start + count >= len(request.tokens):
                self._append(request, stale=stale)
        if self.policy == "fail":
            for request_id in failed:
                self.finish(self.requests[request_id], Status.FINISHED_ERROR)
        self._reports(results, full)

    def _start_of(self, output: SimpleNamespace, request_id: str) -> int:
        for new in output.scheduled_new_reqs:
            if new.req_id == request_id:
                return int(new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        return int(cached.num_computed_tokens[cached.req_ids.index(request_id)])

    def _append(self, request: Request, *, stale: bool) -> None:
        request.outputs.append(next_token(request.tokens))
        if not stale:
            request.placeholders -= 1
        if len(request.outputs) >= request.max_tokens:
            for queue in (self.waiting, self.running):
                if request in queue:
                    queue.remove(request)
            request.status = Status.FINISHED_LENGTH_CAPPED
            self._free(request)

    def _invalidate(self, invalid: set[int], output: SimpleNamespace) -> set[str]:
        failed = set()
        loading = [r for r in self.requests.values() if r.finished or r.status is Status.WAITING_FOR_REMOTE_KVS]
        strangers = invalid - {block for request in loading for block in request.blocks}
        assert not strangers, f"blocks {strangers} are named as invalid, but no load holds them"
        for request in self.requests.values():
            hit = [i for i, block in enumerate(request.blocks) if block in invalid]
            if not hit:
                continue
            if request.status is Status.RUNNING:
                raise AssertionError(f"invalid blocks {invalid} hit {request.request_id}, which is running")
            if request.status is not Status.WAITING_FOR_REMOTE_KVS:
                continue
            if hit[0] * BLOCK >= request.num_computed:
                continue
            request.num_computed = hit[0] * BLOCK
            if self.policy == "fail":
                failed.add(request.request_id)
            else:
                self._failed_ids.add(request.request_id)
        return failed

    def _fail(self, request_ids: set[str]) -> set[str]:
        """Failed loads by name, told together with their report."""
        loads = {
            name for name in request_ids
            if name in self.requests and self.requests[name].status is Status.WAITING_FOR_REMOTE_KVS
        }  # fmt: skip
        if self.policy == "fail":
            return loads
        for name in loads:
            self.requests[name].num_computed = 0
        self._failed_ids |= loads
        return set()

    def _count(self, results: Sequence[SimpleNamespace]) -> dict[str, set[str]]:
        """Counts reports as the executor does."""
        full: dict[str, set[str]] = {"recving": set(), "sending": set()}
        for result in results:
            self._failed_pending |= result.failed_recving
            assert result.failed_recving <= set(result.finished_recving or ())
            for kind in ("recving", "sending"):
                for request_id in getattr(result, f"finished_{kind}") or ():
                    count = self._counts[kind, request_id] = self._counts.get((kind, request_id), 0) + 1
                    assert count <= self._world_size
                    if count == self._world_size:
                        del self._counts[kind, request_id]
                        full[kind].add(request_id)
        full["failed"] = self._failed_pending & full["recving"]
        self._failed_pending -= full["failed"]
        return full

    def _reports(self, results: Sequence[SimpleNamespace], full: dict[str, set[str]]) -> None:
        """Hands full reports to the connector, and applies them."""
        self.connector.update_connector_output(
            SimpleNamespace(
                finished_recving=full["recving"] or None,
                finished_sending=full["sending"] or None,
                kv_connector_worker_meta=_aggregated(results),
            )
        )
        for request_id in full["recving"]:
            assert request_id in self.requests, f"{request_id} was reported as received, the engine does not hold it"
            request = self.requests[request_id]
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                assert request_id not in self._received_ids, f"{request_id} was reported twice"
                self._received_ids.add(request_id)
            else:
                assert request.finished
                self._free_blocks(request)
        for request_id in full["sending"]:
            assert request_id in self.requests, f"{request_id} was reported as sent, the engine does not hold it"
            self._free_blocks(self.requests[request_id])


def _aggregated(results: Sequence[SimpleNamespace]) -> Any:
    """What the ranks tell the scheduler half, as one."""
    found = None
    for result in results:
        meta = result.kv_connector_worker_meta
        found = meta if found is None else found.aggregate(meta) if meta is not None else found
    return found
