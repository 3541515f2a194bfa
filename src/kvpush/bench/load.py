"""Puts load on an engine pair: requests at fixed times (open loop), or always so many at once (ageing)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from kvpush.bench.record import RequestRecord
from kvpush.bench.workload import Planned

# send(planned, started_s, scheduled_s) -> record
Send = Callable[[Planned, float, float], Awaitable[RequestRecord]]

# Requests in flight at the time limit get this long to finish before they are cancelled.
LIMIT_GRACE_S = 2.0


async def run_open_loop(send: Send, requests: Sequence[Planned], deadline_s: float) -> list[RequestRecord]:
    """Sends each request at its `at_s`, whatever became of the earlier ones, and waits for all answers.

    deadline_s: on `time.monotonic()`. After it nothing more is sent, and what is in flight a little later is
    cancelled; so a shorter list than `requests` means that time ran out. Records are in order of arrival.
    """
    started_s = time.monotonic()
    tasks: list[asyncio.Task[RequestRecord]] = []

    async def one(planned: Planned) -> RequestRecord:
        return await send(planned, started_s, planned.at_s)

    for planned in requests:
        if time.monotonic() + max(0.0, started_s + planned.at_s - time.monotonic()) >= deadline_s:
            break
        await asyncio.sleep(max(0.0, started_s + planned.at_s - time.monotonic()))
        tasks.append(asyncio.create_task(one(planned)))
    return await _collect(tasks, deadline_s)


async def run_closed_loop(
    send: Send, requests: Sequence[Planned], concurrency: int, deadline_s: float
) -> list[RequestRecord]:
    """Sends the requests in order, at most `concurrency` at once. deadline_s as in `run_open_loop`."""
    started_s = time.monotonic()
    waiting = iter(requests)

    async def worker() -> list[RequestRecord]:
        done = []
        for planned in waiting:
            if time.monotonic() >= deadline_s:
                break
            done.append(await send(planned, started_s, time.monotonic() - started_s))
        return done

    workers = [asyncio.create_task(worker()) for _ in range(concurrency)]
    # Requests are short and bounded by the client's own timeout, so the workers end soon after the deadline.
    return [record for records in await asyncio.gather(*workers) for record in records]


async def _collect(tasks: Sequence[asyncio.Task[RequestRecord]], deadline_s: float) -> list[RequestRecord]:
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=max(0.0, deadline_s - time.monotonic()) + LIMIT_GRACE_S)
        for task in late:
            task.cancel()
        # A cancelled request returns its record with an error in it.
        await asyncio.gather(*tasks)
    return [task.result() for task in tasks]
