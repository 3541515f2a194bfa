"""The router as a process: its line, its signals, its command line."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from router_fakes import Answer, FakeEngine, async_test, eventually

pytestmark = pytest.mark.unit

HELLO = {"prompt": "hello", "max_tokens": 3}
SOURCE = str(Path(__file__).parents[3] / "src")


async def spawn(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvpush.router", *arguments),
        env={**os.environ, "PYTHONPATH": SOURCE, "NO_COLOR": "1", "COLUMNS": "200"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@asynccontextmanager
async def routers(p: FakeEngine, d: FakeEngine, *more: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    await p.start()
    await d.start()
    d.pairs = p.pairs
    process = await spawn("--prefill", p.url, "--decode", d.url, "--mode", "push", "--port", "0", *more)
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 15)).decode()
        found = re.fullmatch(r"kvpush router ready on (http://127\.0\.0\.1:\d+)\n", line)
        assert found, line
        yield process, found[1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
        await p.stop()
        await d.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@async_test
async def test_it_serves_and_ends_on_a_signal(number: signal.Signals) -> None:
    p, d = FakeEngine("p0", {}), FakeEngine("d0", {})
    async with routers(p, d) as (process, url), aiohttp.ClientSession() as http:
        async with http.post(url + "/v1/completions", json=HELLO) as response:
            assert (await response.json())["choices"][0]["text"] == "<hello>one two"
        process.send_signal(number)
        out, err = await asyncio.wait_for(process.communicate(), 10)
        assert process.returncode == 0
        assert out == b""
        assert b"Traceback" not in err, err
        assert b"Unclosed" not in err, err


@async_test
async def test_requests_in_flight_may_end_after_the_signal() -> None:
    p, d = FakeEngine("p0", {}), FakeEngine("d0", {})
    d.answer = Answer(token_pause_s=0.2)
    async with routers(p, d) as (process, url), aiohttp.ClientSession() as http:
        async with http.post(url + "/v1/completions", json={**HELLO, "stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            process.terminate()
            assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
        with pytest.raises(aiohttp.ClientConnectionError):
            await http.get(url + "/health")
        await asyncio.wait_for(process.wait(), 10)
        assert process.returncode == 0


@pytest.mark.parametrize("signals", [1, 2])
@async_test
async def test_requests_that_take_too_long_are_cancelled(signals: int) -> None:
    p, d = FakeEngine("p0", {}), FakeEngine("d0", {})
    d.answer = p.answer = Answer(hang=True)
    patience = "0.3" if signals == 1 else "60"
    async with routers(p, d, "--shutdown-timeout-s", patience) as (process, url), aiohttp.ClientSession() as http:
        request = asyncio.create_task(http.post(url + "/v1/completions", json=HELLO))
        await eventually(lambda: d.seen and p.seen)
        for _ in range(signals):
            process.terminate()
            await asyncio.sleep(0.1)
        await asyncio.wait_for(process.wait(), 10)
        assert process.returncode == 0
        await eventually(lambda: d.only().cancelled and p.only().cancelled)
        with pytest.raises(aiohttp.ClientError):
            await request


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--decode", "http://d:1"], "--prefill"),
        (["--prefill", "http://p:1"], "--decode"),
        (["--prefill", "p", "--decode", "http://d:1"], "--prefill: 'p' is not of the form"),
        (["--prefill", "http://p:1", "--decode", "http://d:1", "--mode", "x"], "--mode: 'x' is not one of push, pull"),
        (["--prefill", "http://p:1", "--decode", "http://d:1", "--retries", "99"], "--retries"),
        (["--prefill", "http://p:1", "--decode", "http://d:1", "--log-level", "x"], "--log-level"),
    ],
)
@async_test
async def test_bad_options_are_named(arguments: list[str], message: str) -> None:
    process = await spawn(*arguments)
    _, err = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2
    assert message in re.sub(r"[│\s]+", " ", err.decode())


@async_test
async def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = await spawn("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1", "--port", port)
        _, err = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in re.sub(r"[│\s]+", " ", err.decode())


def test_importing_the_router_loads_no_other_part_of_kvpush() -> None:
    code = (
        "import sys, kvpush.router; "
        "print(sorted(m for m in sys.modules if m.startswith('kvpush.') and not m.startswith('kvpush.router')), "
        "[m for m in ('torch', 'nixl', 'vllm', 'numpy', 'zmq') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=30)
    assert found.stdout == "[] []\n", found.stderr
