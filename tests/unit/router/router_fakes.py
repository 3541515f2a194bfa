"""Engines that answer over real HTTP like vLLM's API server, and a router in front of them, all in one event loop.

A fake decode engine that is told `do_remote_prefill` gives its first token only when the fake prefill engine at the
given address has finished the request with the same transfer_id, as a real pair does.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from kvpush.router import RouterConfig, create_app
from kvpush.router.app import PARTS
from kvpush.router.transfer import Parts

TEST_LIMIT_S = 60.0
OUTPUT = ["one", " two", " three", " four"]


def async_test(function: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a coroutine test in a fresh loop, under a deadline."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(TEST_LIMIT_S):
                await function(*args, **kwargs)

        asyncio.run(bounded())

    return run


async def eventually(condition: Callable[[], object], limit_s: float = 15.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


@dataclass
class Seen:
    """One request that an engine got."""

    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]
    raw: bytes
    cancelled: bool = False
    finished: bool = False

    @property
    def params(self) -> dict[str, Any]:
        return self.body.get("kv_transfer_params") or {}

    @property
    def transfer_id(self) -> str:
        return self.params.get("transfer_id", "")


@dataclass
class Answer:
    """How an engine answers. `status` other than 200 answers with `error`; `die_after` drops the connection after that
    many events (0: at once, without any answer); `hang` never answers; `comment_first` begins a stream with a comment;
    `fail_after` sends an error event after that many events; without `hands_over` a prefill is an ordinary answer."""

    status: int = 200
    error: Any = None
    delay_s: float = 0.0
    hang: bool = False
    die_after: int | None = None
    fail_after: int | None = None
    comment_first: bool = False
    raw: bytes | None = None
    params: dict[str, Any] | None = None
    token_pause_s: float = 0.0
    hands_over: bool = True


def vllm_error(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}


class FakeEngine:
    """`answer` decides how each request but the probes is answered; tests change it, or replace it by a function."""

    def __init__(self, name: str, pairs: dict[str, FakeEngine], mode: str = "push") -> None:
        self.engine_id = f"{name}-1"
        self.side_channel = ("127.0.0.1", 5600 + int(name[1:]))
        self.pairs = pairs
        self.mode = mode
        self.answer: Answer | Callable[[Seen], Answer] = Answer()
        self.probe: Answer = Answer()
        self.healthy = True
        self.health_checks = 0
        self.stall_health = False
        self.api_key: str | None = None
        self.seen: list[Seen] = []
        self.probes: list[Seen] = []
        self.prefilled: dict[str, asyncio.Event] = {}
        self.concurrent = 0
        self.most_concurrent = 0
        self.url = ""
        self._runner: web.AppRunner | None = None
        self._port = 0

    # life

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"
        self.pairs[f"{self.side_channel[0]}:{self.side_channel[1]}"] = self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def restart(self) -> None:
        """Another life at the same address."""
        await self.stop()
        name, _, life = self.engine_id.rpartition("-")
        self.engine_id = f"{name}-{int(life) + 1}"
        await self.start()

    # what it tells of itself

    def identity(self) -> dict[str, Any]:
        return {
            "remote_engine_id": self.engine_id,
            "remote_host": self.side_channel[0],
            "remote_port": self.side_channel[1],
            "tp_size": 1,
            "pp_size": 1,
            "transfer_mode": self.mode,
        }

    def only(self) -> Seen:
        assert len(self.seen) == 1, self.seen
        return self.seen[0]

    # endpoints

    async def _health(self, request: web.Request) -> web.Response:
        self.health_checks += 1
        if self.stall_health:
            await asyncio.sleep(3600)
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": "fake", "object": "model", "owned_by": self.engine_id}
        return web.json_response({"object": "list", "data": [model]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        try:
            seen = Seen(request.path, json.loads(raw), request.headers, raw)
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits, for one
            return web.json_response(vllm_error(400, str(error)), status=400)
        is_probe = bool(seen.params.get("kvpush_probe"))
        (self.probes if is_probe else self.seen).append(seen)
        if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        answer = self.probe if is_probe else self.answer(seen) if callable(self.answer) else self.answer
        self.concurrent += 1
        self.most_concurrent = max(self.most_concurrent, self.concurrent)
        try:
            response = await self._respond(request, seen, answer)
            seen.finished = True
            return response
        except (asyncio.CancelledError, ConnectionError):
            seen.cancelled = True
            raise
        finally:
            self.concurrent -= 1

    async def _respond(self, request: web.Request, seen: Seen, answer: Answer) -> web.StreamResponse:
        if answer.delay_s:
            await asyncio.sleep(answer.delay_s)
        if answer.hang:
            await asyncio.sleep(3600)
        if answer.die_after == 0:
            assert request.transport is not None
            request.transport.abort()
            await asyncio.sleep(3600)
        if answer.raw is not None:
            return web.Response(status=answer.status, body=answer.raw, content_type="application/json")
        if answer.status != 200:
            return web.json_response(answer.error, status=answer.status)
        if seen.body.get("stream"):
            return await self._stream(request, seen, answer)
        await self._wait_for_kv(seen)
        return web.json_response(self._whole(seen, answer))

    async def _wait_for_kv(self, seen: Seen) -> None:
        params = seen.params
        if params.get("do_remote_prefill"):
            peer = self.pairs[f"{params['remote_host']}:{params['remote_port']}"]
            await peer.prefilled.setdefault(params["transfer_id"], asyncio.Event()).wait()
        if params.get("do_remote_decode") and "transfer_id" in params:
            self.prefilled.setdefault(params["transfer_id"], asyncio.Event()).set()

    # answers

    def _prompts(self, seen: Seen) -> list[Any]:
        if seen.path.endswith("chat/completions"):
            return [seen.body["messages"][-1]["content"]]
        prompt = seen.body["prompt"]
        return prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]

    def _tokens(self, seen: Seen, prompt: Any) -> list[str]:
        key = "max_completion_tokens" if "max_completion_tokens" in seen.body else "max_tokens"
        return [f"<{prompt}>", *OUTPUT][: seen.body.get(key) or 16]

    def _usage(self, seen: Seen) -> dict[str, Any]:
        prompts = self._prompts(seen)
        n = seen.body.get("n") or 1
        prompt_tokens = sum(len(prompt) for prompt in prompts)
        completion_tokens = sum(len(self._tokens(seen, prompt)) * n for prompt in prompts)
        total = prompt_tokens + completion_tokens
        return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}

    def _whole(self, seen: Seen, answer: Answer) -> dict[str, Any]:
        chat = seen.path.endswith("chat/completions")
        choices: list[dict[str, Any]] = []
        for prompt in self._prompts(seen):
            text = "".join(self._tokens(seen, prompt))
            for _ in range(seen.body.get("n") or 1):
                content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
                choices.append({"index": len(choices), "finish_reason": "stop", "logprobs": None, **content})
        params = answer.params
        if params is None and answer.hands_over and seen.params.get("do_remote_decode"):
            params = self.identity()
            if self.mode == "pull":
                params = {**params, "do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_request_id": "r"}
        return {
            "id": ("chatcmpl-" if chat else "cmpl-") + seen.headers.get("X-Request-Id", "none"),
            "object": "chat.completion" if chat else "text_completion",
            "created": 1,
            "model": "fake",
            "choices": choices,
            "usage": self._usage(seen),
            "kv_transfer_params": params,
        }

    async def _stream(self, request: web.Request, seen: Seen, answer: Answer) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if answer.comment_first:
            await response.write(b": keep-alive\n\n")
        await self._wait_for_kv(seen)
        number = 0
        async for payload in self._events(seen):
            if number == answer.die_after:
                assert request.transport is not None
                await response.write(b'data: {"half')
                await asyncio.sleep(0.02)
                request.transport.abort()
                await asyncio.sleep(3600)
            if number == answer.fail_after:
                await response.write(b"data: " + json.dumps(vllm_error(500, "engine died")).encode() + b"\n\n")
                break
            await response.write(b"data: " + json.dumps(payload).encode() + b"\n\n")
            await asyncio.sleep(answer.token_pause_s)
            number += 1
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _events(self, seen: Seen) -> AsyncIterator[dict[str, Any]]:
        chat = seen.path.endswith("chat/completions")
        n = seen.body.get("n") or 1
        common = {"id": "x", "object": "chat.completion.chunk" if chat else "text_completion", "created": 1}
        common |= {"model": "fake"}
        for number, prompt in enumerate(self._prompts(seen)):
            tokens = self._tokens(seen, prompt)
            for place, text in enumerate(tokens):
                for j in range(n):
                    content = {"delta": {"role": "assistant", "content": text}} if chat else {"text": text}
                    reason = "stop" if place == len(tokens) - 1 else None
                    yield {**common, "choices": [{"index": number * n + j, "finish_reason": reason, **content}]}
        if (seen.body.get("stream_options") or {}).get("include_usage"):
            yield {**common, "choices": [], "usage": self._usage(seen)}


@dataclass
class Cluster:
    """A router with its engines and a client session."""

    p: list[FakeEngine]
    d: list[FakeEngine]
    url: str
    http: aiohttp.ClientSession
    parts: Parts
    config: RouterConfig
    extra: dict[str, Any] = field(default_factory=dict)

    async def post(self, body: Any, path: str = "/v1/completions", **kwargs: Any) -> tuple[int, Any, Mapping[str, str]]:
        """Status, decoded JSON and headers of the answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.url + path, data=data, **kwargs) as response:
            return response.status, json.loads(await response.read()), response.headers

    async def stream(self, body: dict[str, Any], path: str = "/v1/completions") -> list[Any]:
        """The payloads of a stream; `[DONE]` as that text."""
        async with self.http.post(self.url + path, json={**body, "stream": True}) as response:
            text = await response.text()
            assert response.status == 200, text
            assert response.content_type == "text/event-stream"
        found = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in found]

    async def status(self) -> dict[str, Any]:
        async with self.http.get(self.url + "/kvpush/status") as response:
            content: dict[str, Any] = await response.json()
            return content

    def idle(self) -> bool:
        """Whether nothing is left open, in the router or at the engines."""
        backends = [*self.parts.prefill.backends, *self.parts.decode.backends]
        open_legs = sum(backend.in_flight for backend in backends) + len(self.parts.background)
        return open_legs + self.parts.metrics.in_flight + sum(e.concurrent for e in [*self.p, *self.d]) == 0


@asynccontextmanager
async def cluster(
    prefills: int = 1,
    decodes: int = 1,
    mode: str = "push",
    *,
    wait_ready: bool = True,
    setup: Callable[[list[FakeEngine], list[FakeEngine]], None] | None = None,
    **options: Any,
) -> AsyncIterator[Cluster]:
    pairs: dict[str, FakeEngine] = {}
    p = [FakeEngine(f"p{i}", pairs, mode) for i in range(prefills)]
    for engine in p:
        await engine.start()
    d = [FakeEngine(f"d{i}", {}, mode) for i in range(decodes)]
    for engine in d:
        await engine.start()
        engine.pairs = pairs
    if setup is not None:
        setup(p, d)
    defaults: dict[str, Any] = {"identity_wait_s": 2.0, "health_interval_s": 0.1, "probe_timeout_s": 1.0}
    defaults |= {"retries": 0}  # one failure is one failure, unless a test is about retries
    defaults |= {"shutdown_timeout_s": 0.1, "prefill_grace_s": 0.2, "request_timeout_s": 20.0, "port": 0}
    urls = {"prefill": tuple(e.url for e in p), "decode": tuple(e.url for e in d), "mode": mode}
    config = RouterConfig(**{**defaults, **urls, **options})
    app = create_app(config)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.05)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            parts = app[PARTS]
            found = Cluster(p, d, f"http://127.0.0.1:{runner.addresses[0][1]}", http, parts, config)
            if wait_ready:
                await eventually(lambda: all(b.ready for b in [*parts.prefill.backends, *parts.decode.backends]))
            yield found
    finally:
        await runner.cleanup()
        for engine in [*p, *d]:
            await engine.stop()
