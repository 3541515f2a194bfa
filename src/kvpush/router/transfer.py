"""One dispatch of one prompt to a pair of engines: two requests that succeed or end together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from kvpush.router import legs, sse
from kvpush.router.answers import PrefillAnswer, mirrored, read_all, refused
from kvpush.router.backend import CONNECTION_ERRORS, Backend, excerpt
from kvpush.router.config import RouterConfig
from kvpush.router.errors import ApiError, status_in
from kvpush.router.metrics import Metrics
from kvpush.router.pool import Pool
from kvpush.router.records import Records, TransferRecord

# How long a refusal by the prefill engine waits for the decode engine's own, which names the client's own parameters.
REFUSAL_GRACE_S = 0.1


@dataclass(frozen=True, slots=True)
class Call:
    """What one prompt of a client's request asks for. Times are of the event loop's clock."""

    path: str
    chat: bool
    body: legs.Body
    headers: Mapping[str, str]
    request_id: str
    transfer_id: str
    started_s: float
    deadline_s: float
    local_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """What transfers share; owned by the application."""

    config: RouterConfig
    prefill: Pool
    decode: Pool
    metrics: Metrics
    records: Records
    background: set[asyncio.Task[Any]]


class Transfer:
    """Call `open`, use `body` or `chunks`, then `close`, in every case. Used by one task."""

    def __init__(self, parts: Parts, call: Call, transfer_id: str) -> None:
        self.transfer_id = transfer_id
        self.body: bytes | None = None
        self.content_type = "application/json"
        self.told_error = False  # the stream passed on holds an error event
        self._parts = parts
        self._call = call
        self._consumers = legs.consumer_count(call.body) or 1
        self._dispatched_s = asyncio.get_running_loop().time()
        self._prefill_done_s: float | None = None
        self._first_token_s: float | None = None
        self._decode_backend: Backend | None = None
        self._decode_task: asyncio.Task[None] | None = None
        self._prefill_task: asyncio.Task[Mapping[str, Any] | None] | None = None
        self._response: aiohttp.ClientResponse | None = None
        self._first_chunk = b""
        self._closed = False
        self.record = TransferRecord(
            transfer_id=transfer_id,
            request_id=call.request_id,
            mode=parts.config.mode,
            local_reason=call.local_reason,
            started_unix_s=time.time(),
        )

    @property
    def streaming(self) -> bool:
        """Whether the decode engine answers with a stream of events; otherwise `body` holds its answer."""
        return self.body is None

    async def open(self) -> None:
        """Returns once there is something to give to the client. Raises ApiError; then the transfer is closed."""
        try:
            await self._open()
        except BaseException as error:
            await self.close(error.outcome if isinstance(error, ApiError) else "cancelled")
            raise

    async def chunks(self) -> AsyncIterator[bytes]:
        """The bytes of the stream, as they come. Raises ApiError if an engine fails."""
        chunk = self._first_chunk
        while chunk:
            if self._first_token_s is None and sse.has_token(chunk):
                self._first_token_s = self._now()
                self.record.ttft_ms = _milliseconds(self._first_token_s - self._call.started_s)
                self._parts.metrics.ttft.add(self._first_token_s - self._call.started_s)
                self._note_handoff()
            self.told_error = self.told_error or sse.has_error(chunk)
            yield chunk
            chunk = await self._next_chunk()

    async def close(self, outcome: str) -> None:
        """Ends whatever is still open, at both engines, and writes the record. Later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        if outcome == "cancelled" and self._now() >= self._call.deadline_s:
            outcome = "timeout"
        ended: list[asyncio.Task[Any]] = []
        if self._decode_task is not None and not self._decode_task.done():
            self._decode_task.cancel()
            ended.append(self._decode_task)
        if self._response is not None:
            # Closing the connection is how an engine learns that its request is not wanted any more.
            self._response.close()
        if self._prefill_task is not None and not self._prefill_task.done():
            if outcome == "ok":
                grace = asyncio.get_running_loop().call_later(
                    self._parts.config.prefill_grace_s, self._prefill_task.cancel
                )
                self._prefill_task.add_done_callback(lambda _: grace.cancel())
            else:
                self._prefill_task.cancel()
                ended.append(self._prefill_task)
        if self._decode_backend is not None:
            self._parts.decode.release(self._decode_backend)
        self.record.status = outcome
        self.record.total_ms = _milliseconds(self._now() - self._call.started_s)
        self._parts.records.add(self.record)
        self._parts.metrics.transfers[outcome] += 1
        if ended:
            await asyncio.wait(ended)

    async def _open(self) -> None:
        call, parts = self._call, self._parts
        wait_s = parts.config.identity_wait_s
        if call.local_reason is not None:
            self._use_decode(await parts.decode.acquire(wait_s))
            await self._decode(None)
        elif parts.config.mode == "pull":
            await self._pull(wait_s)
        else:
            await self._push(wait_s)

    async def _push(self, wait_s: float) -> None:
        """Sends both legs at once."""
        self._use_decode(await self._parts.decode.acquire(wait_s))
        # The prefill engine last: nothing may happen between reading its identity and dispatching.
        prefill = await self._parts.prefill.acquire(wait_s, self._call.headers.get("Authorization"))
        assert prefill.identity is not None
        params = legs.push_decode_params(self.transfer_id, self._consumers, prefill.identity)
        self._decode_task = asyncio.create_task(self._decode(params))
        self._decode_task.add_done_callback(_seen)
        self._start_prefill(prefill)
        await self._first_of_both()

    async def _pull(self, wait_s: float) -> None:
        """Sends the decode leg with what the prefill leg has answered."""
        prefill = await self._parts.prefill.acquire(wait_s, self._call.headers.get("Authorization"))
        answered = await self._start_prefill(prefill)
        self._use_decode(await self._parts.decode.acquire(wait_s))
        if answered:
            await self._decode(legs.pull_decode_params(self.transfer_id, self._consumers, answered))
        else:
            self.record.local_reason = "not_offered"
            self._parts.metrics.local["not_offered"] += 1
            await self._decode(None)

    def _use_decode(self, backend: Backend) -> None:
        self._decode_backend = backend
        self.record.decode_url = backend.url

    def _start_prefill(self, backend: Backend) -> asyncio.Task[Mapping[str, Any] | None]:
        """Takes over one leg that the pool has counted on the backend."""
        params = legs.prefill_params(self._parts.config.mode, self.transfer_id, self._consumers)
        self.record.prefill_url = backend.url
        self._dispatched_s = self._now()
        task = asyncio.create_task(self._prefill(backend, params))
        self._parts.background.add(task)
        task.add_done_callback(lambda _: self._parts.prefill.release(backend))
        task.add_done_callback(self._prefill_ended)
        self._prefill_task = task
        return task

    async def _first_of_both(self) -> None:
        """Waits for the decode leg, unless the prefill leg fails first."""
        decode, prefill = self._decode_task, self._prefill_task
        assert decode is not None
        assert prefill is not None
        await asyncio.wait({decode, prefill}, return_when=asyncio.FIRST_COMPLETED)
        error = prefill.exception() if not decode.done() else None
        if error is not None:
            if isinstance(error, ApiError) and error.status < 500:
                await asyncio.wait({decode}, timeout=REFUSAL_GRACE_S)
            if not decode.done():
                raise error
        await decode

    async def _prefill(self, backend: Backend, params: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Runs the prefill leg and returns the transfer parameters of its answer."""
        call = self._call
        body = legs.encode(legs.prefill_body(call.body, params, chat=call.chat))
        response = await backend.request("POST", call.path, data=body, headers=call.headers)
        answer = await read_all(backend, response)
        if response.status != 200:
            raise refused(backend, response, answer)
        self._prefill_done_s = self._now()
        self.record.prefill_ms = _milliseconds(self._prefill_done_s - self._dispatched_s)
        self._parts.metrics.prefill.add(self._prefill_done_s - self._dispatched_s)
        self._note_handoff()
        try:
            content = msgspec.json.decode(answer, type=PrefillAnswer)
        except msgspec.DecodeError as error:
            message = f"The prefill engine's answer is no completion ({error}): {excerpt(answer)}"
            raise ApiError(502, message, outcome="prefill_failed", retryable=True) from None
        self.record.prompt_tokens = content.usage.prompt_tokens if content.usage else None
        backend.saw(content.kv_transfer_params)
        if content.kv_transfer_params is None and self._parts.config.mode == "push":
            # Its role, or its connector, is another one: the decode engine would wait for KV that never comes.
            message = f"The prefill engine at {backend.url} answered without handing its KV over: see its log"
            raise ApiError(502, message, outcome="prefill_failed", retryable=True)
        return content.kv_transfer_params

    async def _decode(self, params: Mapping[str, Any] | None) -> None:
        """Runs the decode leg up to the first bytes that the client can have."""
        call, backend = self._call, self._decode_backend
        assert backend is not None
        body = legs.encode(legs.decode_body(call.body, params))
        response = await backend.request("POST", call.path, data=body, headers=call.headers)
        if response.status != 200:
            raise refused(backend, response, await read_all(backend, response))
        self.content_type = response.headers.get("Content-Type", self.content_type)
        if response.content_type != "text/event-stream":
            self.body = await read_all(backend, response)
            return
        self._response = response
        self._first_chunk = await self._read()
        payload = sse.error_payload(self._first_chunk)
        if payload is not None:
            # The engine failed before the first token, after it had said 200. Our client can still have a status.
            raise mirrored(backend, status_in(payload), payload, "application/json")
        if not self._first_chunk:
            raise ApiError(502, "The decode engine's stream is empty", outcome="decode_failed", retryable=True)

    async def _next_chunk(self) -> bytes:
        prefill = self._prefill_task
        if self._first_token_s is not None or prefill is None or prefill.done():
            return await self._read()
        # Only comments so far: the prefill leg can still fail, and the decode engine might wait for it in vain.
        read = asyncio.create_task(self._read())
        try:
            await asyncio.wait({read, prefill}, return_when=asyncio.FIRST_COMPLETED)
            if not read.done() and (error := prefill.exception()) is not None:
                raise error
            return await read
        finally:
            read.cancel()

    async def _read(self) -> bytes:
        assert self._response is not None
        assert self._decode_backend is not None
        try:
            return await self._response.content.readany()
        except CONNECTION_ERRORS as error:
            raise self._decode_backend.broken(error) from error

    def _prefill_ended(self, task: asyncio.Task[Any]) -> None:
        self._parts.background.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        if self._first_token_s is not None or self.record.status == "ok":
            # The decode engine has its KV: nothing that happens at the prefill engine can hurt the answer now.
            self._parts.metrics.late_prefill_failures += 1

    def _note_handoff(self) -> None:
        if self._first_token_s is None or self._prefill_done_s is None:
            return
        self.record.handoff_ms = _milliseconds(self._first_token_s - self._prefill_done_s)
        self._parts.metrics.handoff.add(self._first_token_s - self._prefill_done_s)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _seen(task: asyncio.Task[Any]) -> None:
    """Marks an exception as looked at: of two legs that fail, one is reported."""
    if not task.cancelled():
        task.exception()


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 3)
