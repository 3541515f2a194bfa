"""The engines that all tests of this folder share: starting a pair takes half a minute."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import aiohttp
import pytest
from pair import ANSWER_TIMEOUT_S, BOUNDS, wait_until_free

from kvpush.launch import Engine, EngineSpec, Fleet, demo_model, free_port

T = TypeVar("T")


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Ends everything that was started with it; logs lie in pytest's temporary folder."""
    with Fleet(log_dir=Path(tmp_path_factory.mktemp("engines"))) as started:
        yield started


@pytest.fixture(scope="session")
def engines(fleet: Fleet) -> tuple[Engine, Engine]:
    """(caching, plain): two kv_both engines, one with prefix caching and one without.

    In float32, so that greedy text of one engine and of a pair can be compared token for token. What goes to the plain
    one is staged, what goes to the caching one takes the path that is faster here, which is the direct one.
    """
    model = str(demo_model())

    def spec(name: str, path: str, *extra: str) -> EngineSpec:
        return EngineSpec(
            model=model,
            role="both",
            name=name,
            port=free_port(),
            side_channel_port=free_port(),
            connector_options={"integrity": "always", "path": path, **BOUNDS},
            dtype="float32",
            max_model_len=2560,
            # Short chunks: long prompts take several, and mixed batches cut them anywhere.
            extra_args=("--max-num-batched-tokens", "512", *extra),
        )

    caching = fleet.engine(spec("caching", "auto", "--enable-prefix-caching"))
    plain = fleet.engine(spec("plain", "staged", "--no-enable-prefix-caching"))
    fleet.wait_ready()
    return caching, plain


@pytest.fixture
def run(engines: tuple[Engine, Engine]) -> Callable[..., None]:
    """Runs a test's coroutine with a session; afterwards no block of either engine may belong to a request."""

    def runner(test: Callable[[aiohttp.ClientSession], Awaitable[None]], free_within_s: float = 15.0) -> None:
        async def whole() -> None:
            timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
            # vLLM closes idle connections after 5 s; on busy cores a request can meet one that is just being closed.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
                await test(session)
                await wait_until_free(session, engines, free_within_s)

        asyncio.run(whole())

    return runner


@pytest.fixture(params=["cache-on", "cache-off"])
def ends(request: pytest.FixtureRequest, engines: tuple[Engine, Engine]) -> tuple[Engine, Engine]:
    """(prefill, decode) with prefix caching at the decode engine on or off."""
    caching, plain = engines
    return (plain, caching) if request.param == "cache-on" else (caching, plain)
