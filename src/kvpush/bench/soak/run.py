"""The course of a soak: references, load and faults, rest, and what must hold then."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvpush.bench.soak import watch as watching
from kvpush.bench.soak.deployment import ROLES, ROUTER, Deployment
from kvpush.bench.soak.faults import Faults
from kvpush.bench.soak.link import DECODE, PREFILL, Link
from kvpush.bench.soak.prompts import ask_one_engine, draw
from kvpush.bench.soak.traffic import Traffic
from kvpush.bench.soak.watch import Watch

PROMPTS = 40
# Load without faults before anything is taken down: connections are made, code is loaded, pools are touched.
WARM_UP_S = 20.0
# After the last fault: what is still held then is held for ever.
FREE_TIMEOUT_S = 75.0
# Idle connections between router and engines close after a few seconds, and peers that have died are forgotten.
REST_S = 8.0
HANDLES_TIMEOUT_S = 40.0
# Nothing is killed in this share at the end, so that one life of each process is long.
QUIET_SHARE = 0.4
# vLLM closes a connection that is idle for 5 s; a client that uses it at that moment sees an error that is none.
KEEPALIVE_S = 2.0


@dataclass(frozen=True, slots=True)
class Course:
    """seconds: of load and faults. interval_s: between two faults. policies: the decode engine has them in turns.
    bound_s: what the router allows a request."""

    seconds: float
    interval_s: float
    policies: tuple[str, ...]
    concurrency: int
    seed: int
    bound_s: float


class Soak:
    """One run over a started deployment."""

    def __init__(self, deployment: Deployment, link: Link | None, course: Course) -> None:
        self._deployment = deployment
        self._link = link
        self._course = course
        self._problems: list[str] = []
        self._traffic: Traffic | None = None
        self._faults: Faults | None = None
        self._watch: Watch | None = None

    async def run(self) -> None:
        """Raises ReferenceError if one engine alone does not answer."""
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            await self._run(session)

    async def _run(self, session: aiohttp.ClientSession) -> None:
        course, deployment = self._course, self._deployment
        decode_url = deployment.server(DECODE).url
        began_s = time.monotonic()
        references = await ask_one_engine(session, decode_url, deployment.model, draw(course.seed, PROMPTS))
        _say(f"{len(references)} reference texts after {time.monotonic() - began_s:.0f} s")
        watch = self._watch = Watch(deployment, session)
        warm_up = Traffic(session, deployment.router_url, deployment.model, references, course.seed + 1, course.bound_s)
        warm_up.start(course.concurrency)
        await asyncio.sleep(WARM_UP_S)
        await warm_up.stop()
        if warm_up.counts["right"] != sum(warm_up.counts.values()):
            self._problems.append(f"without any fault: {dict(warm_up.counts)}, {dict(warm_up.errors)}")
        await asyncio.sleep(REST_S)
        watch.count_handles()
        _say(f"warm-up: {dict(warm_up.counts)}")
        traffic = self._traffic = Traffic(
            session, deployment.router_url, deployment.model, references, course.seed, course.bound_s
        )
        faults = self._faults = Faults(
            deployment, traffic, self._link, course.seed, lambda role: _say(f"{role} is back")
        )
        sampling = asyncio.create_task(watch.run())
        saying = asyncio.create_task(self._say_now_and_then())
        try:
            traffic.start(course.concurrency)
            await self._break_things(faults)
            await faults.settle()
            await traffic.stop()
            await self._wait_until_free(watch)
            await self._wait_for_handles(watch)
        finally:
            for task in (sampling, saying):
                task.cancel()
            await asyncio.gather(sampling, saying, return_exceptions=True)

    async def _break_things(self, faults: Faults) -> None:
        course = self._course
        each_s = course.seconds / len(course.policies)
        for number, policy in enumerate(course.policies):
            if number:
                await faults.replace_decode(policy)
                _say(f"policy {policy}")
            last = number == len(course.policies) - 1
            quiet_s = course.seconds * QUIET_SHARE if last else 0.0
            quiet_s = min(quiet_s, each_s)
            await faults.run(each_s - quiet_s, course.interval_s, kills=True)
            await faults.run(quiet_s, course.interval_s, kills=False)

    async def _wait_until_free(self, watch: Watch) -> None:
        """Waits until no engine holds anything of a request; what is still held at the end is a problem."""
        deadline_s = time.monotonic() + FREE_TIMEOUT_S
        while held := await watch.left_over():
            if time.monotonic() > deadline_s:
                self._problems.append(f"held {FREE_TIMEOUT_S:.0f} s after the last request: {held}")
                return
            await asyncio.sleep(1.0)

    @staticmethod
    async def _wait_for_handles(watch: Watch) -> None:
        """Counts handles until they are back at what they were; what is still open at the end is among the verdicts."""
        deadline_s = time.monotonic() + HANDLES_TIMEOUT_S
        watch.count_handles()
        while watching.handles_kept(watch.lives) and time.monotonic() < deadline_s:
            await asyncio.sleep(1.0)
            watch.count_handles()

    async def _say_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(30)
            traffic, faults = self._traffic, self._faults
            assert traffic is not None
            assert faults is not None
            down = [role for role in ROLES if not self._deployment.up(role)]
            note = f", down: {', '.join(down)}" if down else ""
            _say(f"{len(faults.done)} faults, {dict(traffic.counts)}, {traffic.in_flight} in flight{note}")

    def findings(self) -> dict[str, Any]:
        """The fields of the raw file that the run has filled."""
        traffic, faults, watch = self._traffic, self._faults, self._watch
        assert traffic is not None
        assert faults is not None
        assert watch is not None
        problems = [*self._problems, *faults.problems, *watching.verdicts(watch.lives)]
        for outcome in ("wrong", "stuck"):
            if traffic.counts[outcome]:
                problems.append(f"{traffic.counts[outcome]} requests were {outcome}")
        if not traffic.counts["right"]:
            problems.append("no request was answered")
        counters = watch.counters
        problems += _counted_problems(counters)
        for role in (PREFILL, DECODE, ROUTER):
            # A short run says nothing about memory, and its table shows that.
            need_s = watching.WARM_UP_S + watching.LEAST_JUDGED_S
            if self._course.seconds * QUIET_SHARE > need_s and role not in watching.judged_roles(watch.lives):
                problems.append(f"no process of the {role} lived {need_s:.0f} s: its memory was not judged")
        return {
            "outcomes": dict(traffic.counts),
            "errors": dict(traffic.errors),
            "longest_s": round(traffic.longest_s, 3),
            "bad": traffic.bad,
            "faults": faults.done,
            "processes": watching.as_json(watch.lives),
            "counters": counters,
            "problems": problems,
        }


def _counted_problems(counters: dict[str, dict[str, float]]) -> list[str]:
    """What the engines' own counters say must not be."""
    problems = []
    if not counters[PREFILL].get("kvpush_sends_total{committed}") or not counters[DECODE].get("kvpush_receives_total"):
        problems.append("nothing was handed over")
    for role, counted in counters.items():
        for name in ("kvpush_integrity_total{mismatch}", "kvpush_protocol_errors_total"):
            if counted.get(name):
                problems.append(f"{role}: {name} is {counted[name]:.0f}")
        broken = counted.get("kvpush_messages_dropped_total{internal}")
        if broken:
            problems.append(f"{role}: {broken:.0f} messages met an exception (see its log)")
    return problems


def _say(text: str) -> None:
    print(f"soak: {time.strftime('%H:%M:%S')} {text}", flush=True)
