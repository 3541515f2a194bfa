"""Runs the transfers of a request with several prompts side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from typing import Any

from kvpush.router import sse
from kvpush.router.dispatch import open_transfer
from kvpush.router.errors import ApiError
from kvpush.router.prompts import StreamMerger
from kvpush.router.transfer import Call, Parts, Transfer

# Events that may wait for a slow client, before the engines' streams are read no further.
QUEUE_LIMIT = 256


async def all_answers(parts: Parts, calls: Sequence[Call]) -> list[bytes]:
    """The answer to each call, in their order. The first failure cancels the others and is raised (ApiError)."""

    async def one(call: Call) -> bytes:
        transfer = await open_transfer(parts, call)
        try:
            if transfer.body is None:
                raise ApiError(502, "The decode engine streams, but was not asked to", outcome="decode_failed")
        except ApiError as error:
            await transfer.close(error.outcome)
            raise
        await transfer.close("ok")
        return transfer.body

    return await _together([one(call) for call in calls])


async def merged_events(parts: Parts, calls: Sequence[Call], merger: StreamMerger) -> AsyncGenerator[bytes, None]:
    """The events of all calls as they come, then the merger's last ones.

    Raises ApiError. Whatever is open ends with the iterator, so close it (`contextlib.aclosing`).
    """
    queue: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue(QUEUE_LIMIT)

    async def pump(prompt: int, call: Call) -> None:
        transfer = await open_transfer(parts, call)
        outcome = "cancelled"
        try:
            async for payload in _events_of(transfer):
                event = merger.event(prompt, payload)
                if event is not None:
                    await queue.put(event)
            outcome = "ok"
        except ApiError as error:
            outcome = error.outcome
            raise
        finally:
            await transfer.close(outcome)

    async def run() -> None:
        try:
            await _together([pump(prompt, call) for prompt, call in enumerate(calls)])
        except ApiError as error:
            await queue.put(error)
        else:
            await queue.put(None)

    runner = asyncio.create_task(run())
    try:
        while (item := await queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
        yield merger.end()
    finally:
        runner.cancel()
        await asyncio.wait({runner})


async def _events_of(transfer: Transfer) -> AsyncIterator[bytes]:
    if not transfer.streaming:
        raise ApiError(502, "The decode engine was asked to stream, but does not", outcome="decode_failed")
    async for payload in sse.payloads(transfer.chunks()):
        yield payload


async def _together(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
