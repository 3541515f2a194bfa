"""Serves the application until a signal ends it, and the command line in front of that."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Annotated

import typer
from aiohttp import web

from kvpush.router.app import create_app
from kvpush.router.config import ConfigError, RouterConfig


def run_router(config: RouterConfig) -> None:
    """Serves until SIGTERM or SIGINT.

    Then it takes no more requests, gives those in flight `shutdown_timeout_s` to end, and returns. A second signal ends
    them at once.

    Prints one line, `kvpush router ready on http://HOST:PORT`, when it listens. Raises OSError if the port is taken.
    """
    asyncio.run(_serve(config))


async def _serve(config: RouterConfig) -> None:
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    runner = web.AppRunner(
        create_app(config), handler_cancellation=True, access_log=None, shutdown_timeout=config.shutdown_timeout_s
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, config.host, config.port, backlog=1024)
        await site.start()
        host = f"[{config.host}]" if ":" in config.host else config.host
        print(f"kvpush router ready on http://{host}:{runner.addresses[0][1]}", flush=True)
        await stop.wait()
    finally:
        # Cancelling the cleanup while it waits for requests makes it end them.
        cleanup = asyncio.create_task(runner.cleanup())
        urgent = asyncio.create_task(hurry.wait())
        await asyncio.wait({cleanup, urgent}, return_when=asyncio.FIRST_COMPLETED)
        urgent.cancel()
        cleanup.cancel() if not cleanup.done() else cleanup.result()


def router_command(
    prefill: Annotated[list[str], typer.Option(help="URL of a prefill engine; repeat it for several.")],
    decode: Annotated[list[str], typer.Option(help="URL of a decode engine; repeat it for several.")],
    mode: Annotated[str, typer.Option(help="push: both legs at once. pull: decode after prefill.")] = "push",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="KVPUSH_ENGINE_API_KEY", help="Bearer token for the router's own requests to the engines."),
    ] = None,
    request_timeout_s: Annotated[float, typer.Option(help="From a request's arrival to its last byte.")] = 600.0,
    connect_timeout_s: Annotated[float, typer.Option(help="For a connection to an engine.")] = 5.0,
    probe_timeout_s: Annotated[float, typer.Option(help="For one probe or health check.")] = 10.0,
    identity_wait_s: Annotated[float, typer.Option(help="How long a request waits for a usable engine.")] = 10.0,
    health_interval_s: Annotated[float, typer.Option(help="Between two health checks of an engine.")] = 2.0,
    condition_interval_s: Annotated[
        float, typer.Option(help="Between two questions to a decode engine whether it may load KV.")
    ] = 10.0,
    prefill_grace_s: Annotated[float, typer.Option(help="How long a prefill leg may outlive its decode leg.")] = 1.0,
    shutdown_timeout_s: Annotated[
        float, typer.Option(help="What requests in flight get when the router stops.")
    ] = 10.0,
    retries: Annotated[int, typer.Option(help="Dispatches anew when an engine fails before the first byte.")] = 1,
    max_body_bytes: Annotated[int, typer.Option(help="Largest request body.")] = 64 * 1024 * 1024,
    max_in_flight: Annotated[int, typer.Option(help="Most requests at once.")] = 4096,
    max_prompts: Annotated[int, typer.Option(help="Most prompts in one request.")] = 256,
    recent_records: Annotated[int, typer.Option(help="Transfers that /kvpush/status remembers.")] = 256,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Route OpenAI requests to prefill and decode engines."""
    options = dict(locals())
    level = logging.getLevelNamesMapping().get(options.pop("log_level").upper())
    if level is None:
        raise typer.BadParameter(f"{log_level!r} is no log level", param_hint="--log-level")
    options["prefill"], options["decode"] = tuple(prefill), tuple(decode)
    try:
        config = RouterConfig(**options)
    except ConfigError as error:
        option, _, message = str(error).partition(": ")
        raise typer.BadParameter(message, param_hint="--" + option.replace("_", "-")) from None
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        run_router(config)
    except OSError as error:
        raise typer.BadParameter(
            f"cannot listen on {host}:{port}: {error.strerror or error}", param_hint="--port"
        ) from None
