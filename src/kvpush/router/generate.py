"""The two endpoints that make text."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from contextlib import aclosing

from aiohttp import web

from kvpush.router import legs
from kvpush.router.config import RouterConfig
from kvpush.router.dispatch import open_transfer
from kvpush.router.errors import ApiError
from kvpush.router.merge import all_answers, merged_events
from kvpush.router.prompts import StreamMerger, merge_answers, split
from kvpush.router.reply import ClientGoneError, Reply
from kvpush.router.transfer import Call, Parts

TRANSFER_HEADER = "x-kvpush-transfer-id"
PREFILL_HEADER = "x-kvpush-prefill-ms"

# Passed on to both engines. A data parallel rank is not: it means another thing at each.
FORWARDED = ("Authorization", "traceparent", "tracestate", "X-Session-ID", "X-Vllm-Priority")

MAX_HEADER_LENGTH = 4096


class Generate:
    """Handlers of `/v1/completions` and `/v1/chat/completions`."""

    def __init__(self, config: RouterConfig, parts: Callable[[], Parts]) -> None:
        self._config = config
        self._parts = parts

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._counted(request, chat=False)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._counted(request, chat=True)

    async def _counted(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        """Answers a request, whatever happens, and counts how it ended."""
        metrics = self._parts().metrics
        started_s = asyncio.get_running_loop().time()
        request_id = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        echoed = {"X-Request-Id": request_id} if _is_text(request_id) else {}
        reply = Reply(request, echoed)
        outcome = "internal_error"
        metrics.in_flight += 1
        try:
            if metrics.in_flight > self._config.max_in_flight:
                message = f"The router already serves {self._config.max_in_flight} requests (max_in_flight)"
                raise ApiError(503, message, outcome="rejected")
            async with asyncio.timeout_at(started_s + self._config.request_timeout_s):
                response = await self._answer(request, reply, request_id, started_s, chat=chat)
            outcome = reply.outcome
        except ApiError as error:
            outcome = error.outcome
            response = await reply.fail(error)
        except TimeoutError:
            outcome = "timeout"
            message = f"No answer within {self._config.request_timeout_s} s (request_timeout_s)"
            response = await reply.fail(ApiError(504, message, outcome=outcome))
        except (asyncio.CancelledError, ClientGoneError):
            outcome = "cancelled"
            raise
        except web.HTTPException:
            outcome = "rejected"
            raise
        finally:
            metrics.in_flight -= 1
            metrics.requests[request.path, outcome] += 1
        return response

    async def _answer(
        self, request: web.Request, reply: Reply, request_id: str, started_s: float, *, chat: bool
    ) -> web.StreamResponse:
        parts = self._parts()
        _text("X-Request-Id", request_id)
        try:
            data = await request.read()
        except web.RequestPayloadError:
            message = "The body is not what its Content-Encoding or Transfer-Encoding says, or was cut off"
            raise ApiError(400, message, outcome="rejected") from None
        body, dropped = legs.drop_client_params(legs.parse_body(data))
        parts.metrics.client_params_dropped += dropped
        local = legs.local_reason(body, chat=chat)
        if local is not None:
            parts.metrics.local[local] += 1
        bodies = None if chat or local is not None else split(body, self._config.max_prompts)
        transfer_id = uuid.uuid4().hex
        headers = {name: _text(name, request.headers[name]) for name in FORWARDED if name in request.headers}
        headers["Content-Type"] = "application/json"

        def call(body: legs.Body, suffix: str) -> Call:
            return Call(
                path=request.path,
                chat=chat,
                body=body,
                headers={**headers, "X-Request-Id": request_id + suffix},
                request_id=request_id + suffix,
                transfer_id=transfer_id + suffix,
                started_s=started_s,
                deadline_s=started_s + self._config.request_timeout_s,
                local_reason=local,
            )

        if bodies is None:
            return await self._one(reply, call(body, ""))
        reply.headers[TRANSFER_HEADER] = transfer_id
        calls = [call(each, f"-{index}") for index, each in enumerate(bodies)]
        consumers = legs.consumer_count(body) or 1
        if not legs.is_on(body, "stream"):
            answers = await all_answers(parts, calls)
            return reply.whole(merge_answers(answers, consumers, f"cmpl-{request_id}"), "application/json")
        async with aclosing(merged_events(parts, calls, StreamMerger(consumers, f"cmpl-{request_id}"))) as events:
            async for event in events:
                await reply.write(event, "text/event-stream; charset=utf-8")
        return await reply.end()

    async def _one(self, reply: Reply, call: Call) -> web.StreamResponse:
        transfer = await open_transfer(self._parts(), call)
        outcome = "cancelled"
        try:
            reply.headers[TRANSFER_HEADER] = transfer.transfer_id
            if transfer.body is None:
                async for chunk in transfer.chunks():
                    await reply.write(chunk, transfer.content_type)
                outcome = reply.outcome = "stream_error" if transfer.told_error else "ok"
                return await reply.end()
            if transfer.record.prefill_ms is not None:
                reply.headers[PREFILL_HEADER] = f"{transfer.record.prefill_ms:.3f}"
            outcome = "ok"
            return reply.whole(transfer.body, transfer.content_type)
        except ApiError as error:
            outcome = error.outcome
            raise
        finally:
            await transfer.close(outcome)


def _is_text(value: str) -> bool:
    """Whether a header's value can be sent on: the bytes of some cannot."""
    return len(value) <= MAX_HEADER_LENGTH and value.isprintable()


def _text(name: str, value: str) -> str:
    """Raises ApiError (400) naming the header."""
    if not _is_text(value):
        message = f"The header {name} is longer than {MAX_HEADER_LENGTH} characters, or holds what is no printable text"
        raise ApiError(400, message, outcome="rejected")
    return value
