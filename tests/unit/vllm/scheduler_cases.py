"""Requests and scheduler outputs in the shapes of vLLM's versions, for the scheduler half alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fake_scheduler import Request

BLOCK = 4


def request(
    name: str, num_tokens: int = 10, params: dict[str, Any] | None = None, *, token: int = 5, **fields: Any
) -> Request:
    return Request(name, [token] * num_tokens, params, 1, **fields)


def produce(transfer: str = "t", consumers: int = 1) -> dict[str, Any]:
    return {"do_remote_decode": True, "transfer_id": transfer, "kvpush_consumers": consumers}


def consume(transfer: str = "t", consumers: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "transfer_id": transfer,
        "remote_host": "p",
        "remote_port": 1000,
        "kvpush_consumers": consumers,
        **more,
    }


def output(
    new: dict[str, tuple[list[int], int, int]] | None = None,
    cached: dict[str, tuple[list[int] | None, int, int]] | None = None,
    *,
    resumed: set[str] | None = None,
    preempted: set[str] | None = None,
) -> Any:
    """new, cached: request id -> (block ids, computed tokens, scheduled tokens)."""
    new, cached = new or {}, cached or {}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=computed)
            for name, (blocks, computed, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            resumed_req_ids=resumed or set(),
            new_block_ids=[None if blocks is None else (blocks,) for blocks, _, _ in cached.values()],
            num_computed_tokens=[computed for _, computed, _ in cached.values()],
        ),
        num_scheduled_tokens={name: entry[2] for name, entry in {**new, **cached}.items()},
        preempted_req_ids=preempted,
    )
