"""Measures one running engine pair: warm-up, cells, ageing, and what the engines say about each."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp

from kvpush.bench import workload
from kvpush.bench.client import Client
from kvpush.bench.engines import EngineError, Pair
from kvpush.bench.environment import now_iso
from kvpush.bench.handoffs import handoff_records
from kvpush.bench.load import run_closed_loop, run_open_loop
from kvpush.bench.observe import LogTail, Transfers, increase, parse_transfers, read_counters
from kvpush.bench.raw import CellResult, Load, rounded
from kvpush.bench.record import RequestRecord, median
from kvpush.bench.workload import Cell
from kvpush.transfer.trace import TransferTrace

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# A generator later than this may have shaped the result; the cell says so.
LATE_WARNING_MS = 10.0
# The engines' last log lines and counters of a cell come after the last answer.
SETTLE_S = 1.0
WARM_UP_ISLS = (512, 512)
WARM_UP_OSL = 8
WARM_UP_ATTEMPTS = 3
# vLLM closes idle connections after 5 s; one that is reused at that moment would fail.
KEEPALIVE_S = 2.0


class TimeIsUp(Exception):
    """The time limit was reached; what is there is valid."""


class PairSession:
    """Drives one engine pair. deadline_s: on `time.monotonic()`; nothing is begun after it."""

    def __init__(self, pair: Pair, vocabulary: int, seed: int, osl: int, deadline_s: float, timeout_s: float) -> None:
        self.pair = pair
        self.vocabulary = vocabulary
        self.seed = seed
        self.osl = osl
        self.deadline_s = deadline_s
        self.timeout_s = timeout_s
        self.legs = pair.legs()
        self.logs = LogTail(pair.logs())
        self.traces = pair.traces()
        self.started_s = 0.0

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[Client]:
        # No total timeout: the client bounds each request as a whole.
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            yield Client(session, self.pair.prefill_url, self.pair.decode_url, self.pair.model, self.timeout_s)

    def _check_time(self) -> None:
        if time.monotonic() >= self.deadline_s:
            raise TimeIsUp

    async def warm_up(self, isls: Sequence[int]) -> Load:
        """Two short requests one leg after the other, then one of each length in the way that is measured.

        The first contact of two engines may time out on a busy machine, so each is tried a few times; what failed is
        counted. Raises EngineError if one does not succeed: then nothing measured later would mean anything.
        """
        self._check_time()
        longest = self.pair.max_model_len - WARM_UP_OSL
        lengths = [min(isl, longest) for isl in (*WARM_UP_ISLS, *sorted(set(isls)))]
        began = time.monotonic()
        records: list[RequestRecord] = []
        async with self._client() as client:
            for planned in workload.warm_up(self.seed, lengths, WARM_UP_OSL, self.vocabulary):
                records += await self._until_answered(client, planned)
        self._forget()
        return _load(records, began)

    async def _until_answered(self, client: Client, planned: workload.Planned) -> list[RequestRecord]:
        tried: list[RequestRecord] = []
        while not tried or tried[-1].error is not None:
            if len(tried) == WARM_UP_ATTEMPTS:
                raise EngineError(f"warm-up request of {planned.isl} tokens failed: {tried[-1].error}")
            self._check_time()
            tried.append(await client.send(planned, self.legs, time.monotonic(), 0.0))
        return tried

    def _forget(self) -> None:
        """What the engines have said about requests that are not measured."""
        self.logs.new_lines()
        self.traces.new()

    async def age(self, n: int, concurrency: int) -> Load:
        """Mixed requests that shuffle both block pools."""
        self._check_time()
        requests = workload.ageing(self.seed, n, self.pair.max_model_len, self.vocabulary)
        began = time.monotonic()
        async with self._client() as client:
            records = await run_closed_loop(self._send(client), requests, concurrency, self.deadline_s)
        load = _load(records, began)
        self._forget()
        if len(records) < n:
            raise TimeIsUp
        return load

    def _send(self, client: Client) -> Callable[[workload.Planned, float, float], Any]:
        async def send(planned: workload.Planned, started_s: float, scheduled_s: float) -> RequestRecord:
            self.started_s = started_s
            return await client.send(planned, self.legs, started_s, scheduled_s)

        return send

    async def measure(self, pool: str, cell: Cell, repeat: int = 0) -> CellResult:
        """Runs one cell. Never raises for failed requests: they are in the result.

        Each repeat has arrival times and prompts of its own, the same for every connector.
        """
        self._check_time()
        requests = workload.open_loop(self.seed + repeat, cell, self.osl, self.vocabulary)
        before = await self._counters()
        date = now_iso()
        began = time.monotonic()
        async with self._client() as client:
            records = await run_open_loop(self._send(client), requests, self.deadline_s)
        wall_s = time.monotonic() - began
        await asyncio.sleep(SETTLE_S)
        traces = await asyncio.to_thread(self.traces.new)
        after = await self._counters()
        late_max_ms = max((record.late_ms for record in records), default=0.0)
        result = CellResult(
            pool=pool,
            isl=cell.isl,
            qps=cell.qps,
            n=cell.n,
            osl=self.osl,
            seed=self.seed + repeat,
            repeat=repeat,
            started_s=round(self.started_s, 6),
            date=date,
            complete=len(records) == cell.n and all(record.error != "cancelled" for record in records),
            wall_s=round(wall_s, 3),
            late_max_ms=round(late_max_ms, 3),
            requests=rounded(records),
            transfers=self._transfers(traces),
            handoffs=handoff_records(traces, records, self.started_s),
            prefill_counters=increase(before[0], after[0]),
            decode_counters=increase(before[1], after[1]),
            dead_engines=self.pair.dead(),
        )
        result.warnings = cell_warnings(result)
        return result

    def _transfers(self, traces: Sequence[TransferTrace]) -> Transfers | None:
        """What our engines say; their logs say it best, but those of engines elsewhere are not here."""
        if not self.pair.connector.ours:
            return None
        return parse_transfers(self.logs.new_lines()) if self.pair.logs() else counted(traces)

    async def _counters(self) -> list[dict[str, float]]:
        return [await asyncio.to_thread(_counters_of, url) for url in (self.pair.prefill_url, self.pair.decode_url)]


def _counters_of(url: str) -> dict[str, float]:
    """A dead engine has none; that it died is reported elsewhere."""
    try:
        return read_counters(url)
    except OSError:
        return {}


def _load(records: Sequence[RequestRecord], began_s: float) -> Load:
    failures = Counter(record.error for record in records if record.error is not None)
    return Load(
        requests=len(records),
        errors=sum(failures.values()),
        wall_s=round(time.monotonic() - began_s, 3),
        failures=dict(failures),
    )


def counted(traces: Sequence[TransferTrace]) -> Transfers:
    """The same numbers from the engines' records."""
    sent = [trace for trace in traces if trace.outcome == "sent"]
    received = [trace for trace in traces if trace.outcome == "received"]
    failures = Counter(trace.outcome for trace in traces if trace.outcome.startswith("failed"))
    return Transfers(
        committed=len(sent),
        committed_tokens=sum(trace.num_tokens for trace in sent),
        committed_bytes=sum(trace.num_bytes for trace in sent),
        writes=sum(trace.num_writes for trace in sent),
        received=len(received),
        received_tokens=sum(trace.num_tokens for trace in received),
        failed=sum(failures.values()),
        failures=dict(failures),
    )


def moved(result: CellResult) -> int | None:
    """How many requests' KV the engines say they have moved, None if they do not tell."""
    if result.transfers is not None:
        return min(result.transfers.committed, result.transfers.received)
    counts = [
        counters["vllm:nixl_xfer_time_seconds_count"]
        for counters in (result.prefill_counters, result.decode_counters)
        if "vllm:nixl_xfer_time_seconds_count" in counters
    ]
    return round(max(counts)) if counts else None


def engines_say(result: CellResult) -> str:
    """The engines' own numbers of a cell in one line, per transfer; empty if they have none."""
    ours, parts = result.transfers, []
    if ours is not None and ours.committed:
        each = ours.committed_bytes / ours.committed / 1e6
        parts = [f"{ours.committed} committed, {ours.received} received", f"{each:.1f} MB"]
        parts.append(f"{ours.writes / ours.committed:.1f} writes")
        names = sorted({name for spans in ours.spans_ms.values() for name in spans})
        for name in names:
            values = [spans[name] for spans in ours.spans_ms.values() if name in spans]
            parts.append(f"{name} p50 {median(values):.2f} ms")
    for counters in (result.prefill_counters, result.decode_counters):
        for name, total in counters.items():
            count = counters.get(f"{name.removesuffix('_sum')}_count")
            if name.endswith("_sum") and count:
                parts.append(f"{name.removeprefix('vllm:').removesuffix('_sum')} {total / count:.6g}")
    return ", ".join(parts)


def cell_warnings(result: CellResult) -> list[str]:
    """Everything that should make a reader doubt the cell."""
    found = []
    if result.errors:
        kinds = Counter(record.error for record in result.errors)
        worst = "; ".join(f"{count} x {error}" for error, count in kinds.most_common(3))
        found.append(f"{len(result.errors)} of {len(result.requests)} requests failed: {worst}")
    if not result.complete:
        found.append(f"stopped by the time limit after {len(result.requests)} of {result.n} requests")
    if result.late_max_ms > LATE_WARNING_MS:
        late = sum(record.late_ms > LATE_WARNING_MS for record in result.requests)
        found.append(f"the generator was behind its schedule {late} times, at most {result.late_max_ms:.1f} ms")
    if result.dead_engines:
        found.append(f"engines that ended by themselves: {', '.join(result.dead_engines)}")
    transfers, good = moved(result), len(result.requests) - len(result.errors)
    if transfers is None:
        found.append("the engines report no transfer at all: was the KV cache recomputed?")
    elif transfers < good:
        found.append(f"{transfers} transfers for {good} answered requests: the others were recomputed or not logged")
    if result.transfers is not None and result.transfers.failed:
        found.append(f"{result.transfers.failed} failed transfers: {result.transfers.failures}")
    return found
