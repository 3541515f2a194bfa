"""What the processes of a soak hold: memory, handles, and the engines' own counts. Read from outside."""

from __future__ import annotations

import asyncio
import os
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvpush.bench.raw import SoakProcess
from kvpush.bench.soak.deployment import ROLES, ROUTER, Deployment
from kvpush.bench.soak.link import DECODE, PREFILL

SAMPLE_INTERVAL_S = 5.0
# An engine's memory grows while its pool is used for the first time and while the allocator finds its high-water mark.
WARM_UP_S = 100.0
LEAST_JUDGED_S = 120.0
EDGE_S = 30.0
MOST_GROWTH = 0.05
# Handles of a process at rest may differ by sockets that are just being closed.
SPARE_HANDLES = 2
GONE = ("vllm:kv_cache_usage_perc", "kvpush_open_transfers", "kvpush_open_writes", "kvpush_quarantined_blocks")
"""Gauges of an engine that must be 0 when every request has ended."""
SUMMED = re.compile(r"kvpush_\w+_total")
SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
REASON = re.compile(r'reason="([^"]*)"')


@dataclass(slots=True)
class Life:
    """One process from its start to its end. samples: (seconds after its start, bytes of memory of its own)."""

    role: str
    kind: str
    pid: int
    began_s: float
    samples: list[tuple[float, int]] = field(default_factory=list)
    handles_first: int | None = None
    handles_last: int | None = None

    @property
    def name(self) -> str:
        return self.role if self.kind == self.role else f"{self.role} {self.kind}"

    @property
    def judged(self) -> bool:
        """Long enough after its warm-up to say whether it grows."""
        return bool(self.samples) and self.samples[-1][0] >= WARM_UP_S + LEAST_JUDGED_S

    @property
    def growth(self) -> float | None:
        """Growth from the first EDGE_S after the warm-up to the last EDGE_S, as a share; None if not judged."""
        if not self.judged:
            return None
        last_s = self.samples[-1][0]
        first = [size for at_s, size in self.samples if WARM_UP_S <= at_s <= WARM_UP_S + EDGE_S]
        last = [size for at_s, size in self.samples if at_s >= last_s - EDGE_S]
        if not first or not statistics.median(first):
            return None
        return statistics.median(last) / statistics.median(first) - 1

    def result(self) -> SoakProcess:
        sizes = [size for _, size in self.samples] or [0]
        growth = self.growth
        return SoakProcess(
            role=self.role,
            kind=self.kind,
            lived_s=round(self.samples[-1][0], 1) if self.samples else 0.0,
            first_bytes=sizes[0],
            last_bytes=sizes[-1],
            growth=None if growth is None else round(growth, 4),
            handles_first=self.handles_first,
            handles_last=self.handles_last,
        )


class Watch:
    """Samples every process of a deployment. counters: of the engines, summed over all their lives."""

    def __init__(self, deployment: Deployment, session: aiohttp.ClientSession) -> None:
        self.lives: list[Life] = []
        self._deployment = deployment
        self._session = session
        self._current: dict[int, Life] = {}
        self._counters: dict[str, dict[str, dict[str, float]]] = {PREFILL: {}, DECODE: {}}  # role -> life -> counter

    @property
    def counters(self) -> dict[str, dict[str, float]]:
        """Role -> counter (with its reason) -> sum."""
        total: dict[str, dict[str, float]] = {}
        for role, lives in self._counters.items():
            total[role] = {}
            for counters in lives.values():
                for name, value in counters.items():
                    total[role][name] = total[role].get(name, 0.0) + value
        return total

    async def run(self) -> None:
        """Samples until it is cancelled."""
        while True:
            self.sample()
            await asyncio.gather(*(self._read_counters(role) for role in (PREFILL, DECODE)))
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    def sample(self) -> None:
        """Takes down the memory of every process that is up."""
        for life, pid in self._processes():
            size = own_memory_bytes(pid)
            if size:
                life.samples.append((round(time.monotonic() - life.began_s, 1), size))

    def count_handles(self) -> None:
        """To be called at rest: the first count of a role's kind of process is what all later ones are held against."""
        for life, pid in self._processes():
            handles = num_handles(pid)
            if handles is None:
                continue
            earlier = [one for one in self.lives if (one.role, one.kind) == (life.role, life.kind)]
            known = [one.handles_first for one in earlier if one.handles_first is not None]
            life.handles_first = known[0] if known else handles
            life.handles_last = handles

    async def left_over(self) -> dict[str, dict[str, float]]:
        """Role -> gauge -> what should be 0 and is not. An engine that does not answer is reported as such."""
        found: dict[str, dict[str, float]] = {}
        for role in (PREFILL, DECODE):
            try:
                gauges = await self._gauges(role)
            except (aiohttp.ClientError, OSError, TimeoutError):
                found[role] = {"no answer": 1.0}
                continue
            held = {name: gauges.get(name, 0.0) for name in GONE if gauges.get(name, 0.0)}
            if "vllm:kv_cache_usage_perc" not in gauges:
                held["no kv_cache_usage_perc"] = 1.0
            if held:
                found[role] = held
        return found

    async def _gauges(self, role: str) -> dict[str, float]:
        """The metrics of an engine after one more step: it publishes its numbers only when it steps."""
        url = self._deployment.server(role).url
        body = {"model": self._deployment.model, "prompt": [1], "max_tokens": 1}
        async with self._session.post(f"{url}/v1/completions", json=body) as response:
            await response.read()
        return await self._metrics(role)

    async def _metrics(self, role: str) -> dict[str, float]:
        url = self._deployment.server(role).url
        timeout = aiohttp.ClientTimeout(total=10)
        async with self._session.get(f"{url}/metrics", timeout=timeout) as response:
            return parse_metrics(await response.text())

    async def _read_counters(self, role: str) -> None:
        """Keeps the newest counters of this life: what a killed engine had counted is gone with it."""
        life = str(self._deployment.starts[role])
        if not self._deployment.up(role):
            return
        try:
            found = await self._metrics(role)
        except (aiohttp.ClientError, OSError, TimeoutError):
            return
        self._counters[role][life] = {
            name: value for name, value in found.items() if SUMMED.match(name) and not name.endswith("{}") and value
        }

    def _processes(self) -> list[tuple[Life, int]]:
        found = []
        for role in ROLES:
            if not self._deployment.up(role):
                continue
            server = self._deployment.server(role)
            for pid in server.tree():
                life = self._current.get(pid)
                if life is None:
                    kind = role if role == ROUTER else "server" if pid == server.pid else name_of(pid)
                    if "tracker" in kind:
                        continue  # Python's own helper
                    life = self._current[pid] = Life(role, kind, pid, time.monotonic())
                    self.lives.append(life)
                found.append((life, pid))
        return found


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus samples: name -> sum over labels, and name{reason} -> sum for that reason."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = SAMPLE.match(line)
        if match is None:
            continue
        name, value = match[1], float(match[3])
        found[name] = found.get(name, 0.0) + value
        reason = REASON.search(match[2] or "")
        if reason is not None:
            key = f"{name}{{{reason[1]}}}"
            found[key] = found.get(key, 0.0) + value
    return found


def own_memory_bytes(pid: int) -> int:
    """Resident memory that belongs to the process: anonymous and shared; mapped files come and go. 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/status") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
        return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
    except (OSError, KeyError, ValueError):
        return 0


def num_handles(pid: int) -> int | None:
    """Open file descriptors, None if the process is gone."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None


def name_of(pid: int) -> str:
    """The name that a process has given itself, without what is not part of one."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "gone"
    if "resource_tracker" in words:
        return "tracker"
    return words.split(" -")[0].removeprefix("VLLM::")[:40]


def verdicts(lives: Sequence[Life]) -> list[str]:
    """What is wrong with the processes' memory and handles."""
    problems = handles_kept(lives)
    for life in lives:
        growth = life.growth
        if growth is not None and growth > MOST_GROWTH:
            problems.append(f"memory of {life.name} grew by {growth:.1%} in {life.samples[-1][0]:.0f} s")
    return problems


def handles_kept(lives: Sequence[Life]) -> list[str]:
    """Which processes hold more handles than at their start."""
    return [
        f"{life.name} holds {life.handles_last} handles, {life.handles_first} at its start"
        for life in lives
        if life.handles_last is not None and life.handles_last > (life.handles_first or 0) + SPARE_HANDLES
    ]


def judged_roles(lives: Sequence[Life]) -> set[str]:
    """Roles of which a process lived long enough to judge its memory."""
    return {life.role for life in lives if life.judged}


def as_json(lives: Sequence[Life]) -> list[Any]:
    return [life.result() for life in lives]
