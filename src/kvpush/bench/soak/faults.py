"""What goes wrong in a soak: a fault every few seconds, chosen by a seeded generator among the possible ones."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

from kvpush.bench.raw import SoakFault
from kvpush.bench.soak.deployment import ROUTER, Deployment, Victims
from kvpush.bench.soak.link import DECODE, PREFILL, Link
from kvpush.bench.soak.traffic import Traffic

RESTART_TIMEOUT_S = 180.0
# Some stops and cuts end before anybody has noticed, some outlast the time after which a peer counts as lost.
STOP_S = (0.5, 14.0)
CUT_S = (0.5, 14.0)
MOST_ABORTS = 4
BURST_REQUESTS = 12
# An engine lives at least so long before it is killed: it takes half a minute to come back, and only one that lives
# for a while shows whether its memory grows.
LEAST_LIFE_S = 45.0
VICTIMS: tuple[Victims, ...] = ("all", "server", "worker")

Fault = Callable[[], Coroutine[Any, Any, None]]


class Faults:
    """Does the faults and undoes them. problems: parts that did not behave; each is a finding of its own.

    link: None leaves cuts out. on_start: called with the role after each restart of a part.
    """

    def __init__(
        self, deployment: Deployment, traffic: Traffic, link: Link | None, seed: int, on_start: Callable[[str], None]
    ) -> None:
        self.done: list[SoakFault] = []
        self.problems: list[str] = []
        self._deployment = deployment
        self._traffic = traffic
        self._link = link
        self._rng = random.Random(seed)
        self._on_start = on_start
        self._began_s = time.monotonic()
        self._running: set[asyncio.Task[None]] = set()
        self._busy: set[str] = set()  # roles that are being killed, stopped or started
        self._up_since_s = dict.fromkeys((PREFILL, DECODE), self._began_s)

    async def run(self, seconds: float, interval_s: float, *, kills: bool) -> None:
        """One fault every interval_s. kills: whether engines and router may be killed, too."""
        end_s = time.monotonic() + seconds
        while time.monotonic() + interval_s <= end_s:
            await asyncio.sleep(interval_s)
            name = self._rng.choice(self.possible(kills))
            self.begin(name)
        await asyncio.sleep(max(0.0, end_s - time.monotonic()))

    def possible(self, kills: bool) -> list[str]:
        """The faults that can be done now."""
        now_s = time.monotonic()
        names = ["abort", "burst"]
        if self._link is not None and not self._link.is_cut:
            names.append("cut")
        for role in (PREFILL, DECODE):
            if role in self._busy or not self._deployment.up(role):
                continue
            names.append(f"stop {role}")
            if kills and now_s - self._up_since_s[role] >= LEAST_LIFE_S:
                names.append(f"kill {role}")
        if kills and ROUTER not in self._busy:
            names.append("kill router")
        return names

    def begin(self, name: str) -> None:
        """Starts a fault; what undoes it comes by itself."""
        kind, _, role = name.partition(" ")
        makers: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "abort": self._abort,
            "burst": self._burst,
            "cut": self._cut,
            "stop": lambda: self._stop(role),
            "kill": lambda: self._kill(role),
        }
        self._running.add(asyncio.create_task(makers[kind]()))

    async def replace_decode(self, policy: str) -> None:
        """A planned kill: the next decode engine has another policy."""
        await self.settle()
        self._deployment.set_policy(policy)
        await self._kill(DECODE, "all", f"policy {policy}")

    async def settle(self) -> None:
        """Returns when everything that was broken works again. Whatever failed meanwhile is among the problems."""
        while self._running:
            done, self._running = await asyncio.wait(self._running)
            for task in done:
                error = task.exception()
                if error is not None:
                    self.problems.append(f"{type(error).__name__}: {error}")
        for role in (PREFILL, DECODE, ROUTER):
            if not self._deployment.up(role) and not self._deployment.server(role).alive:
                self.problems.append(str(self._deployment.server(role).death()))

    def _book(self, name: str, detail: str = "") -> None:
        self.done.append(SoakFault(at_s=round(time.monotonic() - self._began_s, 1), name=name, detail=detail))

    async def _abort(self) -> None:
        gone = self._traffic.abort(self._rng.randint(1, MOST_ABORTS))
        self._book("abort", f"{gone} clients")

    async def _burst(self) -> None:
        self._traffic.burst(BURST_REQUESTS)
        self._book("burst", f"{BURST_REQUESTS} requests")

    async def _cut(self) -> None:
        assert self._link is not None
        seconds = self._rng.uniform(*CUT_S)
        self._book("cut", f"{seconds:.1f} s")
        await asyncio.to_thread(self._link.cut)
        try:
            await asyncio.sleep(seconds)
        finally:
            await asyncio.to_thread(self._link.mend)

    async def _stop(self, role: str) -> None:
        seconds = self._rng.uniform(*STOP_S)
        self._book(f"stop {role}", f"{seconds:.1f} s")
        self._busy.add(role)
        try:
            self._deployment.stop(role)
            await asyncio.sleep(seconds)
        finally:
            self._deployment.go_on(role)
            self._busy.discard(role)

    async def _kill(self, role: str, victims: str = "", why: str = "") -> None:
        chosen = cast(Victims, victims or ("all" if role == ROUTER else self._rng.choice(VICTIMS)))
        self._book(f"kill {role}", why or chosen)
        self._busy.add(role)
        try:
            await asyncio.to_thread(self._deployment.kill, role, chosen)
        finally:
            # Whether or not it ended as it should: it is gone, and the run goes on with its successor.
            await asyncio.to_thread(self._deployment.restart, role, RESTART_TIMEOUT_S)
            self._busy.discard(role)
            self._up_since_s[role] = time.monotonic()
            self._on_start(role)


def counted(faults: Sequence[SoakFault]) -> dict[str, int]:
    """Name -> how often."""
    found: dict[str, int] = {}
    for fault in faults:
        found[fault.name] = found.get(fault.name, 0) + 1
    return dict(sorted(found.items()))
