"""One prefill and two decode engines that may be killed: one fails what did not come, the other computes it itself."""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from pair import ANSWER_TIMEOUT_S, Answer, Pair, metrics, wait_until_free
from test_push import tokens

from kvpush.bench.soak.link import DECODE, PREFILL, Link
from kvpush.launch import Engine, EngineSpec, Fleet, demo_model, free_port
from kvpush.launch.ports import is_free

# Short, but far above what two busy cores need for an answer to a ping.
PEER_TIMEOUT_S = 5.0
BOUNDS = {
    "peer_timeout_s": PEER_TIMEOUT_S,
    "ping_interval_s": 0.5,
    "rendezvous_timeout_s": 6.0,
    "unclaimed_timeout_s": 8.0,
    "announced_timeout_s": 20.0,
}
# Beyond the time after which a peer is lost: for noticing, and for vLLM to pass it on.
GRACE_S = 2.0
# What computing a prompt at D may take beyond what it took D alone: several are computed at once, and P starts anew.
COMPUTE_FACTOR = 3.0
# For P to compute what is in flight: no promise of ours, but a hang is a failure all the same.
ANSWERS_S = 100.0
POLICIES = ("fail", "recompute")
PROMPT_TOKENS = 480
AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class Reference:
    """What one engine alone answers to a prompt, and how long it takes."""

    prompt: list[int]
    text: str
    took_s: float


@dataclass(frozen=True, slots=True)
class Asked:
    """A request in flight: its two legs."""

    policy: str
    reference: Reference
    prefill: asyncio.Task[None]
    answer: asyncio.Task[Answer]


class Trio:
    """All engines under one fleet; `restart` brings one back under its addresses."""

    def __init__(self, fleet: Fleet, link: Link | None = None) -> None:
        self._fleet = fleet
        self._specs = {PREFILL: self._spec(PREFILL, "prefill", None, link)}
        for policy in POLICIES:
            self._specs[policy] = self._spec(policy, "decode", policy, link)
        self.engines: dict[str, Engine] = {}
        self._references: list[Reference] = []

    @property
    def prefill(self) -> Engine:
        return self.engines[PREFILL]

    @property
    def decodes(self) -> list[Engine]:
        return [self.engines[policy] for policy in POLICIES]

    def ensure_up(self) -> None:
        """Starts whatever does not run; continues what is stopped."""
        for engine in self.engines.values():
            engine.signal_tree(signal.SIGCONT)
        down = [name for name in self._specs if name not in self.engines or not self.engines[name].alive]
        for name in down:
            self._start(name)
        self._fleet.wait_ready()

    def restart(self, name: str) -> Engine:
        """A new life of an engine that was killed, under its old addresses."""
        self._start(name)
        self._fleet.wait_ready()
        return self.engines[name]

    def kill(self, name: str) -> None:
        """SIGKILL to every process of an engine; returns when they are gone."""
        self.engines[name].signal_tree(signal.SIGKILL)
        wait_for(lambda: not self.engines[name].alive and not self.engines[name].tree(), 10.0, f"{name} is dead")

    def pair(self, session: aiohttp.ClientSession, policy: str) -> Pair:
        return Pair(session, self.prefill, self.engines[policy])

    async def references(self, session: aiohttp.ClientSession) -> list[Reference]:
        """AT_ONCE prompts and what a decode engine answers alone; asked once."""
        if not self._references:
            for number in range(AT_ONCE):
                prompt, began_s = tokens(PROMPT_TOKENS, seed=770_000 + number), time.monotonic()
                decode = self.engines[POLICIES[number % 2]]
                alone = await Pair(session, self.prefill, decode).ask(decode, prompt, cache_salt="alone")
                self._references.append(Reference(prompt, alone.text, time.monotonic() - began_s))
        return self._references

    async def begin(self, session: aiohttp.ClientSession, after_s: float = 1.0) -> list[Asked]:
        """AT_ONCE requests to each decode engine, P in the middle of computing them; returns when all are in flight."""
        asked = []
        for policy in POLICIES:
            for reference in await self.references(session):
                pair, transfer_id = self.pair(session, policy), uuid.uuid4().hex
                salt = {"cache_salt": transfer_id}  # no cache knows the prompt
                leg = asyncio.ensure_future(_ignored(pair.prefill_leg(reference.prompt, transfer_id, **salt)))
                answer = asyncio.ensure_future(pair.decode_leg(reference.prompt, transfer_id, **salt))
                asked.append(Asked(policy, reference, leg, answer))
        await asyncio.sleep(after_s)
        assert not any(one.answer.done() for one in asked), "P was too fast: not all is in flight"
        return asked

    async def works(self, session: aiohttp.ClientSession, policy: str) -> None:
        """A request with a hand-over is answered as one engine alone answers it."""
        decode, reference = self.engines[policy], (await self.references(session))[0]
        before = await metrics(session, decode)
        salt = {"cache_salt": uuid.uuid4().hex}
        _, answer = await self.pair(session, policy).both(reference.prompt, shared=salt)
        assert answer.text == reference.text
        after = await metrics(session, decode)
        # Under `recompute` the text alone would not show that it was handed over.
        assert after["kvpush_receives_total"] - before.get("kvpush_receives_total", 0) == 1

    def _start(self, name: str) -> None:
        spec, old = self._specs[name], self.engines.get(name)
        if old is not None:
            self._fleet.remove(old)
        if not spec.prefix:
            wait_for(lambda: is_free(spec.port), 15.0, f"port {spec.port} is free again")
        self.engines[name] = self._fleet.engine(spec)

    @staticmethod
    def _spec(name: str, role: Any, policy: str | None, link: Link | None) -> EngineSpec:
        options: dict[str, Any] = {"integrity": "always", **BOUNDS}
        place: dict[str, Any] = {}
        if link is not None:
            end = link.ends[PREFILL if name == PREFILL else DECODE]
            options["side_channel_host"] = end.link_address
            place = {"host": end.host_address, "prefix": end.prefix, "env": end.environment}
        return EngineSpec(
            model=str(demo_model()),
            role=role,
            name=name,
            port=free_port(),
            side_channel_port=free_port(),
            connector_options=options,
            load_failure_policy=policy,
            dtype="float32",
            max_model_len=1024,
            extra_args=("--max-num-batched-tokens", "128", "--enable-prefix-caching"),
            **place,
        )


async def _ignored(leg: Awaitable[Answer]) -> None:
    """P's own answer matters to nobody here, and P may be gone before it."""
    try:
        await leg
    except (aiohttp.ClientError, OSError):
        pass


async def expect_ends(asked: list[Asked], policy: str, lost_s: float) -> None:
    """Every request of this policy ends in time after `lost_s`, when P was lost: with an error, or computed at D."""
    mine = [one for one in asked if one.policy == policy]
    compute_s = sum(one.reference.took_s for one in mine) * COMPUTE_FACTOR if policy == "recompute" else 0.0
    bound_s = PEER_TIMEOUT_S + GRACE_S + compute_s
    done, pending = await asyncio.wait(
        [one.answer for one in mine], timeout=max(0.0, lost_s + bound_s - time.monotonic())
    )
    assert not pending, f"{len(pending)} of {len(mine)} requests under {policy} did not end within {bound_s:.1f} s"
    for one in mine:
        answer = one.answer.result()
        if policy == "fail":
            assert answer.status == 500
        else:
            assert answer.text == one.reference.text
    assert len(done) == len(mine)


async def still_waits(asked: list[Asked], policy: str) -> None:
    assert not any(one.answer.done() for one in asked if one.policy == policy)


async def expect_right(asked: list[Asked], policy: str, within_s: float) -> None:
    """Every request of this policy is answered, as one engine alone answers it."""
    mine = [one for one in asked if one.policy == policy]
    _, pending = await asyncio.wait([one.answer for one in mine], timeout=within_s)
    assert not pending, f"{len(pending)} of {len(mine)} requests were not answered within {within_s} s"
    for one in mine:
        assert one.answer.result().text == one.reference.text


@contextmanager
def trio_at(log_dir: Path, link: Link | None = None) -> Iterator[Trio]:
    with Fleet(log_dir=log_dir) as fleet:
        trio = Trio(fleet, link)
        trio.ensure_up()
        yield trio


def run(test: Callable[[aiohttp.ClientSession], Awaitable[None]]) -> None:
    async def whole() -> None:
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
        # No connection is kept: the engine behind it may be another one next time.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            await test(session)

    asyncio.run(whole())


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


async def blocks_are_held(session: aiohttp.ClientSession, engines: list[Engine], within_s: float) -> None:
    """Waits until each engine says that blocks of it are in quarantine."""
    deadline_s = time.monotonic() + within_s
    for engine in engines:
        while not (await metrics(session, engine)).get("kvpush_quarantined_blocks"):
            assert time.monotonic() < deadline_s, f"{engine.name} holds nothing in quarantine"
            await asyncio.sleep(0.2)


async def nothing_is_held(session: aiohttp.ClientSession, engines: list[Engine], within_s: float) -> None:
    """Every block is back, and no hand-over is open."""
    await wait_until_free(session, engines, within_s)
    for engine in engines:
        found = await metrics(session, engine)
        for gauge in ("kvpush_open_transfers", "kvpush_open_writes", "kvpush_quarantined_blocks"):
            assert found.get(gauge, 0) == 0, f"{engine.name}: {gauge}"
