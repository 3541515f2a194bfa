"""Two real engines, each both producer and consumer, and a client that plays the router."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvpush.launch import Engine

Prompt = str | list[int]

# Far above what an answer takes on two busy cores; a hang is a failure all the same.
ANSWER_TIMEOUT_S = 120.0

# Short bounds, so that the tests of what never comes end soon; long enough for two busy cores.
BOUNDS = {
    "rendezvous_timeout_s": 8.0,
    "unclaimed_timeout_s": 15.0,
    "announced_timeout_s": 30.0,
    "peer_timeout_s": 15.0,
    "ping_interval_s": 1.0,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine answered. texts: one for each choice; error: the message of an answer that is none."""

    status: int
    body: dict[str, Any]

    @property
    def texts(self) -> list[str]:
        return [choice["text"] for choice in self.body["choices"]] if self.status == 200 else []

    @property
    def text(self) -> str:
        assert self.status == 200, f"{self.status}: {self.body}"
        return self.texts[0]


class Pair:
    """Sends the two legs of a request to a prefill and a decode engine."""

    def __init__(self, session: aiohttp.ClientSession, prefill: Engine, decode: Engine) -> None:
        self.session = session
        self.prefill = prefill
        self.decode = decode

    async def ask(self, engine: Engine, prompt: Prompt, **fields: Any) -> Answer:
        """One completion, greedy unless the fields say otherwise."""
        body = {"model": engine.spec.model, "prompt": prompt, "temperature": 0, "max_tokens": 8, **fields}
        async with self.session.post(f"{engine.url}/v1/completions", json=body) as response:
            return Answer(response.status, await response.json())

    async def prefill_leg(self, prompt: Prompt, transfer_id: str, consumers: int = 1, **fields: Any) -> Answer:
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer_id,
            "transfer_mode": "push",
            "kvpush_consumers": consumers,
        }
        return await self.ask(self.prefill, prompt, **{"max_tokens": 1, "kv_transfer_params": params, **fields})

    def decode_params(self, transfer_id: str, consumers: int = 1) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_host": self.prefill.spec.connector_options.get("side_channel_host", "127.0.0.1"),
            "remote_port": self.prefill.spec.side_channel_port,
            "transfer_mode": "push",
            "kvpush_consumers": consumers,
        }

    async def decode_leg(self, prompt: Prompt, transfer_id: str, consumers: int = 1, **fields: Any) -> Answer:
        params = self.decode_params(transfer_id, consumers)
        return await self.ask(self.decode, prompt, **{"kv_transfer_params": params, **fields})

    async def both(
        self, prompt: Prompt, *, consumers: int = 1, prefill_after_s: float = 0.0, decode_after_s: float = 0.0,
        shared: dict[str, Any] | None = None, **fields: Any,
    ) -> tuple[Answer, Answer]:  # fmt: skip
        """Both legs at once, or one of them later; returns (prefill's answer, decode's answer).

        shared: fields of both legs (they enter the prompt's identity); fields: of the decode leg.
        """
        transfer_id = uuid.uuid4().hex

        async def first() -> Answer:
            await asyncio.sleep(prefill_after_s)
            return await self.prefill_leg(prompt, transfer_id, consumers, **(shared or {}))

        async def second() -> Answer:
            await asyncio.sleep(decode_after_s)
            return await self.decode_leg(prompt, transfer_id, consumers, **(shared or {}), **fields)

        return await asyncio.gather(first(), second())


async def metrics(session: aiohttp.ClientSession, engine: Engine) -> dict[str, float]:
    """An engine's Prometheus samples: "name" -> sum over labels, and "name{reason}" -> sum for that reason."""
    found: dict[str, float] = {}
    async with session.get(f"{engine.url}/metrics") as response:
        for line in (await response.text()).splitlines():
            match = re.match(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$", line)
            if match is None:
                continue
            name, labels, value = match[1], match[2] or "", float(match[3])
            found[name] = found.get(name, 0.0) + value
            reason = re.search(r'reason="([^"]*)"', labels)
            if reason is not None:
                found[f"{name}{{{reason[1]}}}"] = found.get(f"{name}{{{reason[1]}}}", 0.0) + value
    return found


async def used_cache(session: aiohttp.ClientSession, engine: Engine) -> float:
    """Share of the KV cache whose blocks belong to a request."""
    return (await metrics(session, engine))["vllm:kv_cache_usage_perc"]


async def wait_until_free(session: aiohttp.ClientSession, engines: Sequence[Engine], within_s: float) -> None:
    """Waits until no block of any engine belongs to a request.

    An engine publishes its numbers only when it steps, so each gets a one-token request now and then.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        used = {}
        for engine in engines:
            body = {"model": engine.spec.model, "prompt": [1], "max_tokens": 1}
            async with session.post(f"{engine.url}/v1/completions", json=body) as response:
                assert response.status == 200
            used[engine.spec.label] = await used_cache(session, engine)
        if not any(used.values()):
            return
        assert time.monotonic() < deadline_s, f"blocks are still held after {within_s} s: {used}"
        await asyncio.sleep(0.3)
