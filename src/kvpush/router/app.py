"""The router as an aiohttp application: its state, its endpoints."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
from aiohttp import web

from kvpush.router.backend import CONNECTION_ERRORS, DECODE, PREFILL, Backend
from kvpush.router.config import RouterConfig
from kvpush.router.errors import JSON, ApiError, error_body
from kvpush.router.generate import Generate
from kvpush.router.metrics import Metrics
from kvpush.router.pool import Pool
from kvpush.router.records import Records
from kvpush.router.transfer import Parts

log = logging.getLogger(__name__)

PARTS: web.AppKey[Parts] = web.AppKey("parts", Parts)

# vLLM's HTTP server drops connections that were idle for 5 s; a request must not meet one at that moment.
KEEPALIVE_S = 3.0
# Whoever asks the router for its health has limits of its own.
HEALTH_LIMIT_S = 2.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def create_app(config: RouterConfig) -> web.Application:
    """The router's application.

    Serve it with `handler_cancellation=True`: only then is a client that leaves noticed at once.
    """
    app = web.Application(middlewares=[_json_errors], client_max_size=config.max_body_bytes)
    app.cleanup_ctx.append(_run_parts(config))
    generate = Generate(config, lambda: app[PARTS])
    app.router.add_post("/v1/completions", generate.completions)
    app.router.add_post("/v1/chat/completions", generate.chat)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", metrics_page)
    app.router.add_get("/kvpush/status", status)
    return app


def _run_parts(config: RouterConfig) -> Callable[[web.Application], AsyncIterator[None]]:
    async def run(app: web.Application) -> AsyncIterator[None]:
        metrics = Metrics()
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"},
        )

        def make(role: str, url: str, on_change: Callable[[], None]) -> Backend:
            return Backend(role, url, session, config, metrics, on_change)

        parts = Parts(
            config=config,
            prefill=Pool(PREFILL, config.prefill, make),
            decode=Pool(DECODE, config.decode, make),
            metrics=metrics,
            records=Records(config.recent_records),
            background=set(),
        )
        app[PARTS] = parts
        watches = [
            asyncio.create_task(backend.watch()) for backend in (*parts.prefill.backends, *parts.decode.backends)
        ]
        yield
        ending = [*watches, *parts.background]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await session.close()

    return run


async def models(request: web.Request) -> web.StreamResponse:
    """What the decode engine serves."""
    parts = request.app[PARTS]
    headers = {name: request.headers[name] for name in ("Authorization",) if name in request.headers}
    backend = await parts.decode.acquire(parts.config.identity_wait_s)
    try:
        async with asyncio.timeout(parts.config.probe_timeout_s):
            response = await backend.request("GET", "/v1/models", headers=headers)
            try:
                body = await response.read()
            except CONNECTION_ERRORS as error:
                raise backend.broken(error) from error
            finally:
                response.release()
    except TimeoutError:
        raise ApiError(504, f"{backend.url}/v1/models did not answer in time", outcome="timeout") from None
    finally:
        parts.decode.release(backend)
    content_type = response.headers.get("Content-Type", JSON)
    return web.Response(status=response.status, body=body, headers={"Content-Type": content_type})


async def health(request: web.Request) -> web.StreamResponse:
    """200 if at least one engine of each role answers now; the JSON says which do, and which load no KV and why."""
    parts = request.app[PARTS]

    async def answers(backend: Backend) -> bool:
        try:
            return await backend.healthy(min(HEALTH_LIMIT_S, parts.config.probe_timeout_s))
        except CONNECTION_ERRORS:
            return False

    backends = [*parts.prefill.backends, *parts.decode.backends]
    found = await asyncio.gather(*map(answers, backends))
    engines: dict[str, dict[str, bool]] = {PREFILL: {}, DECODE: {}}
    for backend, up in zip(backends, found, strict=True):
        engines[backend.role][backend.url] = up
    healthy = all(any(ups.values()) for ups in engines.values())
    unhealthy = {backend.url: backend.unhealthy for backend in backends if backend.unhealthy}
    answer = {
        "status": "ok" if healthy else "unavailable",
        **engines,
        **({"unhealthy": unhealthy} if unhealthy else {}),
    }
    return web.json_response(answer, status=200 if healthy else 503)


async def metrics_page(request: web.Request) -> web.StreamResponse:
    parts = request.app[PARTS]
    backends = [*parts.prefill.backends, *parts.decode.backends]
    text = parts.metrics.text(
        [(each.role, each.url, each.in_flight, each.ready, bool(each.unhealthy)) for each in backends]
    )
    return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def status(request: web.Request) -> web.StreamResponse:
    parts = request.app[PARTS]
    return web.json_response(
        {
            "mode": parts.config.mode,
            "prefill": parts.prefill.as_list(),
            "decode": parts.decode.as_list(),
            "counters": parts.metrics.as_dict(),
            "recent": parts.records.as_list(),
        }
    )


@web.middleware
async def _json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives every error the form that OpenAI's clients read."""
    try:
        return await handler(request)
    except ApiError as error:
        return web.Response(status=error.status, body=error.body, headers={"Content-Type": error.content_type})
    except web.HTTPException as error:
        if error.status < 400:
            raise
        what = f"{request.method} {request.path}: {error.reason}"
        headers = {"Content-Type": JSON, **{name: error.headers[name] for name in ("Allow",) if name in error.headers}}
        return web.Response(status=error.status, body=error_body(error.status, what), headers=headers)
    except Exception:
        incident = uuid.uuid4().hex
        log.exception("%s %s failed in the router (incident %s)", request.method, request.path, incident)
        body = error_body(500, f"The router failed (incident {incident} in its log)")
        return web.Response(status=500, body=body, headers={"Content-Type": JSON})
