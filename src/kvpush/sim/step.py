"""One engine step as it goes from the scheduler to the ranks and back, and what the connector is shown of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal, Protocol

from kvpush.sim.request import Request
from kvpush.transfer.commands import BlockTable, Command, Progress
from kvpush.transfer.quarantine import Quarantine, Rank


class Half(Protocol):
    """The connector's scheduler half, both roles."""

    @property
    def idle(self) -> bool: ...
    def on_new_request(self, request: Any) -> None: ...
    def matched_tokens(self, request_id: str, num_computed_tokens: int) -> tuple[int | None, bool]: ...
    def on_allocated(self, request_id: str, blocks: BlockTable, num_external_tokens: int) -> None: ...
    def on_step(self, output: Any) -> tuple[list[Command], list[Progress]]: ...
    def on_reported(self, received: Iterable[str] | None) -> None: ...
    def on_failed(self, failed: Iterable[str]) -> None: ...
    def on_quarantines(self, quarantines: Mapping[Rank, Quarantine]) -> bool: ...
    def on_finished(self, request: Any, block_ids: BlockTable) -> bool: ...


class EngineDied(AssertionError):
    """vLLM would have ended here, with all its requests."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How this engine schedules. overlap: a step is scheduled before the output of the one before is processed.

    v2: the model runner that brings resumed requests back as new ones. full_isl: a prompt is admitted only if all of it
    fits. defer_free: blocks that a step in flight may write are held back (role consumer or both). drop_stale: what a
    preempted request that is handed over had in flight is computed again. failed_recving: it hears of failed loads by
    request, too.
    """

    chunk: int
    budget: int
    max_running: int
    policy: Literal["fail", "recompute"]
    overlap: bool
    v2: bool
    full_isl: bool
    defer_free: bool
    drop_stale: bool
    failed_recving: bool = True


@dataclass(slots=True)
class Entry:
    """What a step computes for one request: tokens [start, end) into this table. samples: it yields a token."""

    request: Request
    start: int
    end: int
    table: list[int]
    samples: bool


@dataclass(slots=True)
class Step:
    """One engine step.

    before, after: the connector's metadata. fresh: blocks that hold what others left in them. reports: (request, which,
    rank); sent, received: those that every rank has made by now; failed: those of received that a rank calls failed.
    failures: loads that have failed in this step. quarantines: what ranks hold, where that has changed. pending: ranks
    that have not finished it.
    """

    number: int
    entries: list[Entry]
    finished_ids: set[str]
    before: list[Command] = field(default_factory=list)
    after: list[Progress] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    reports: list[tuple[str, str, int]] = field(default_factory=list)
    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failures: set[str] = field(default_factory=set)
    invalid: set[int] = field(default_factory=set)
    quarantines: dict[Rank, Quarantine] = field(default_factory=dict)
    pending: int = 1
    done: bool = False


def scheduler_output(
    entries: Sequence[Entry],
    new: Sequence[tuple[Request, int]],
    cached: Sequence[tuple[Request, list[int] | None, int]],
    resumed: set[str],
    preempted_ids: set[str],
    finished_ids: set[str],
) -> SimpleNamespace:
    """What vLLM's SchedulerOutput tells a connector.

    new: requests that the ranks have not seen, and their first token; cached: the others, with the blocks that they
    gain (or all of them, for those in `resumed`) and their first token.
    """
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=request.request_id, num_computed_tokens=start, block_ids=(list(request.blocks),))
            for request, start in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[request.request_id for request, _, _ in cached],
            new_block_ids=[None if blocks is None else (blocks,) for _, blocks, _ in cached],
            num_computed_tokens=[start for _, _, start in cached],
            resumed_req_ids=resumed,
        ),
        num_scheduled_tokens={entry.request.request_id: entry.end - entry.start for entry in entries},
        preempted_req_ids=preempted_ids,
        finished_req_ids=finished_ids,
    )
