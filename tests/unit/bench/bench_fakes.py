"""Engines that only speak HTTP, and records made by hand, for the benchmark's tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from kvpush.bench.client import Client
from kvpush.bench.environment import Environment
from kvpush.bench.raw import CellResult, ServeRaw, SoakFault, SoakProcess, SoakRaw, TransferRaw, TransferRow
from kvpush.bench.record import RequestRecord

DEADLINE_S = 30.0


def with_deadline(make: Callable[[], Awaitable[Any]]) -> Any:
    """Runs a coroutine function to its end, at most DEADLINE_S."""

    async def bounded() -> Any:
        return await asyncio.wait_for(make(), DEADLINE_S)

    return asyncio.run(bounded())


@dataclass
class FakeEngine:
    """Answers completions. `bodies` and `request_ids` hold what it was asked, `events` the order of both engines'.

    returned: the prefill leg's kv_transfer_params. fail_on: request numbers answered with 500. missing: tokens that
    every streamed answer lacks. wait_for: another engine must have been asked as often before this one answers.
    break_off: the stream ends with an error piece after its first token.
    """

    name: str
    events: list[str]
    returned: Any = None
    delay_s: float = 0.0
    fail_on: frozenset[int] = frozenset()
    missing: int = 0
    per_piece: int = 1
    break_off: bool = False
    hang: bool = False
    wait_for: FakeEngine | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    cancelled: int = 0
    url: str = ""

    async def completions(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._answer(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        self.request_ids.append(request.headers.get("X-Request-Id", ""))
        self.events.append(f"{self.name} asked")
        if self.hang:
            await asyncio.sleep(3600)
        while self.wait_for is not None and len(self.wait_for.bodies) <= number:
            await asyncio.sleep(0.001)
        await asyncio.sleep(self.delay_s)
        if number in self.fail_on:
            return web.json_response({"error": "engine says no"}, status=500)
        self.events.append(f"{self.name} answers")
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": "t9"}], "kv_transfer_params": self.returned})
        return await self._stream(request, body)

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        tokens = body["max_tokens"] - self.missing
        for _ in range(0, tokens, self.per_piece):
            await response.write(b'data: {"choices":[{"index":0,"text":" t5"}]}\n\n')
            if self.break_off:
                await response.write(b'data: {"error":{"message":"engine died"}}\n\n')
                return response
            await asyncio.sleep(0.001)
        if body.get("stream_options", {}).get("include_usage"):
            await response.write(
                f'data: {{"choices":[],"usage":{{"prompt_tokens":3,"completion_tokens":{tokens}}}}}\n\n'.encode()
            )
        await response.write(b"data: [DONE]\n\n")
        return response


class Engines:
    """Both fakes behind real sockets, and a client on them; an async context manager."""

    def __init__(self, prefill: FakeEngine, decode: FakeEngine, timeout_s: float = 10.0) -> None:
        self.fakes = (prefill, decode)
        self.timeout_s = timeout_s
        self.runners: list[web.AppRunner] = []

    async def __aenter__(self) -> Client:
        for fake in self.fakes:
            app = web.Application(client_max_size=2**24)
            app.router.add_post("/v1/completions", fake.completions)
            runner = web.AppRunner(app, handler_cancellation=True)
            await runner.setup()
            self.runners.append(runner)
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self.session = aiohttp.ClientSession()
        return Client(self.session, self.fakes[0].url, self.fakes[1].url, "a-model", self.timeout_s)

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
        for runner in self.runners:
            await runner.cleanup()


def record(index: int = 0, **changes: Any) -> RequestRecord:
    """A good request: 10 ms prefill, 25 ms to the first token, 2 ms per token, 4 tokens."""
    values: dict[str, Any] = {
        "index": index,
        "transfer_id": f"t{index}",
        "isl": 64,
        "osl": 4,
        "scheduled_s": float(index),
        "arrival_s": float(index),
        "prefill_response_ms": 10.0,
        "ttft_ms": 25.0,
        "handoff_ms": 15.0,
        "itl_ms": [2.0, 2.0, 2.0],
        "tpot_ms": 2.0,
        "tokens": 4,
        "pieces": 4,
    }
    return RequestRecord(**{**values, **changes})


def cell(records: list[RequestRecord], **changes: Any) -> CellResult:
    values: dict[str, Any] = {
        "pool": "fresh",
        "isl": 64,
        "qps": 2.0,
        "n": len(records),
        "osl": 4,
        "seed": 1,
        "date": "2026-01-02T03:04:05Z",
        "complete": True,
        "wall_s": 1.0,
        "late_max_ms": 0.5,
        "requests": records,
    }
    return CellResult(**{**values, **changes})


FACTS = Environment(
    python="3.12.1",
    kvpush="0.1.0",
    revision="abc",
    versions={"vllm": "0.26.0"},
    gpus=["H200", "H200"],
    driver="580",
    cpu="some",
    cpus=2,
    kernel="6",
)


def serve_raw(connector: str, cells: list[CellResult], **changes: Any) -> ServeRaw:
    values: dict[str, Any] = {
        "shape": "0.6b",
        "connector": connector,
        "date": "2026-01-02T03:00:00Z",
        "command": "python -m kvpush.bench.serve --some",
        "environment": FACTS,
        "cells": cells,
    }
    return ServeRaw(**{**values, **changes})


def transfer_raw(**changes: Any) -> TransferRaw:
    values: dict[str, Any] = {
        "device": "h200",
        "tokens": 1024,
        "table": "random",
        "path": "direct",
        "regions": 36,
        "page_bytes": 65_536,
        "block_size": 16,
        "bytes": 150_994_944,
        "descriptors": 2304,
        "runs": 2304,
        "ms": 12.0,
        "gb_s": 12.58,
        "single_ms": 0.7,
        "samples_ms": [11.0, 12.0, 13.0],
        "verified": True,
    }
    return TransferRaw(
        date="2026-01-02T03:04:05Z",
        command="python -m kvpush.bench.transfer",
        rows=[TransferRow(**{**values, **changes})],
    )


def soak_raw(**changes: Any) -> SoakRaw:
    values: dict[str, Any] = {
        "date": "2026-01-02T03:04:05Z",
        "command": "python -m kvpush.bench.soak --seed 1",
        "environment": FACTS,
        "seed": 1,
        "minutes": 15.0,
        "policies": ["fail", "recompute"],
        "integrity": "always",
        "link": "tcp",
        "concurrency": 8,
        "outcomes": {"right": 90, "error": 8, "aborted": 2},
        "errors": {"502: no engine": 8},
        "longest_s": 12.5,
        "bad": [],
        "faults": [SoakFault(at_s=10.0, name="kill decode", detail="all")],
        "processes": [
            SoakProcess(
                role="decode", kind="Worker", lived_s=500.0, first_bytes=10**9, last_bytes=10**9 + 5, growth=0.001,
                handles_first=40, handles_last=40,
            )
        ],
        "counters": {"prefill": {"kvpush_sends_total{committed}": 80.0}, "decode": {"kvpush_receives_total": 80.0}},
        "problems": [],
    }  # fmt: skip
    return SoakRaw(**{**values, **changes})


def write_json(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path
