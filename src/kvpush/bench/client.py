"""Sends one request as a router would, and times it.

The benchmark plays the router itself, so that no other process stands in the measured path.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from kvpush.bench.connectors import Legs
from kvpush.bench.record import RequestRecord
from kvpush.bench.workload import Planned

DATA = b"data: "
ERROR_TEXT_LIMIT = 300


class LegError(Exception):
    """A leg ended without the answer that was asked for."""


class Usage(msgspec.Struct):
    completion_tokens: int


class Piece(msgspec.Struct):
    """The part of a streamed completion that matters here."""

    choices: list[msgspec.Raw] = []
    usage: Usage | None = None
    error: Any = None


PIECE = msgspec.json.Decoder(Piece)


@dataclass(slots=True)
class Answer:
    """A streamed answer: when each piece came (seconds, `time.monotonic`) and how many tokens it had in all."""

    at_s: list[float] = field(default_factory=list)
    tokens: int | None = None


def body(planned: Planned, model: str, extra: Mapping[str, Any]) -> bytes:
    """The JSON body of a completion request; the prompt was encoded beforehand and is only pasted in."""
    rest = msgspec.json.encode({"model": model, "temperature": 0, "ignore_eos": True, **extra})
    return b'{"prompt":' + planned.prompt_json + b"," + rest[1:]


@dataclass(slots=True)
class Client:
    """Both engines' addresses as seen by a router. The session belongs to the caller, who closes it.

    prefill_url, decode_url: `http://host:port`. timeout_s bounds a whole request.
    """

    session: aiohttp.ClientSession
    prefill_url: str
    decode_url: str
    model: str
    timeout_s: float = 120.0

    async def send(self, planned: Planned, legs: Legs, started_s: float, scheduled_s: float) -> RequestRecord:
        """Sends both legs in the connector's order and returns the record; an error is part of it, never raised.

        started_s: `time.monotonic()` at the start of the cell. scheduled_s: seconds after it.
        """
        sent_s = time.monotonic()
        record = RequestRecord(
            index=planned.index,
            transfer_id=uuid.uuid4().hex,
            isl=planned.isl,
            osl=planned.osl,
            scheduled_s=scheduled_s,
            arrival_s=sent_s - started_s,
        )
        answer = Answer()
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._both_legs(planned, legs, record, answer, sent_s)
        except TimeoutError:
            record.error = f"no answer within {self.timeout_s:g} s"
        except (LegError, aiohttp.ClientError, OSError, ValueError) as error:
            record.error = f"{type(error).__name__}: {error}" if not isinstance(error, LegError) else str(error)
        except asyncio.CancelledError:
            # Reported rather than passed on: the generator cancels what is left at its time limit and wants the record.
            record.error = "cancelled"
        _fill_in(record, answer, sent_s)
        return record

    async def _both_legs(
        self, planned: Planned, legs: Legs, record: RequestRecord, answer: Answer, sent_s: float
    ) -> None:
        headers = {"X-Request-Id": record.transfer_id, "Content-Type": "application/json"}

        async def prefill() -> Any:
            extra = {"max_tokens": 1, "kv_transfer_params": legs.prefill(record.transfer_id)}
            returned = await self._prefill(body(planned, self.model, extra), headers)
            record.prefill_response_ms = (time.monotonic() - sent_s) * 1e3
            return returned

        async def decode(returned: Any) -> None:
            extra = {
                "max_tokens": planned.osl,
                "stream": True,
                "stream_options": {"include_usage": True},
                "kv_transfer_params": legs.decode(record.transfer_id, returned),
            }
            await self._decode(body(planned, self.model, extra), headers, answer)

        if legs.concurrent:
            await _both(prefill(), decode(None))
        else:
            returned = await prefill()
            await decode(returned)
            legs.learn(returned)

    async def _prefill(self, content: bytes, headers: Mapping[str, str]) -> Any:
        """Returns the response's `kv_transfer_params`, None if it has none."""
        async with self.session.post(f"{self.prefill_url}/v1/completions", data=content, headers=headers) as response:
            text = await response.read()
            if response.status != 200:
                raise LegError(f"prefill: HTTP {response.status}: {_shortened(text)}")
        decoded = msgspec.json.decode(text)
        if not isinstance(decoded, dict):
            raise LegError(f"prefill: not a completion: {_shortened(text)}")
        return decoded.get("kv_transfer_params")

    async def _decode(self, content: bytes, headers: Mapping[str, str], answer: Answer) -> None:
        """Fills `answer` as the pieces come, so that a broken answer leaves its beginning."""
        async with self.session.post(f"{self.decode_url}/v1/completions", data=content, headers=headers) as response:
            if response.status != 200:
                raise LegError(f"decode: HTTP {response.status}: {_shortened(await response.read())}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                now_s = time.monotonic()
                piece = PIECE.decode(line[len(DATA) :])
                if piece.error is not None:
                    raise LegError(f"decode: {_shortened(line)}")
                if piece.choices:
                    answer.at_s.append(now_s)
                if piece.usage is not None:
                    answer.tokens = piece.usage.completion_tokens


async def _both(prefill: Any, decode: Any) -> None:
    """Runs two legs at once; the first to fail ends the other, because alone it would only wait for its peer."""
    tasks = [asyncio.ensure_future(prefill), asyncio.ensure_future(decode)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _fill_in(record: RequestRecord, answer: Answer, sent_s: float) -> None:
    """Turns the times of an answer into the record's fields and refuses one that is too short or too long."""
    record.pieces = len(answer.at_s)
    record.tokens = answer.tokens or 0
    if answer.at_s:
        record.ttft_ms = (answer.at_s[0] - sent_s) * 1e3
        record.itl_ms = [round((b - a) * 1e3, 3) for a, b in zip(answer.at_s, answer.at_s[1:], strict=False)]
        if record.tokens > 1:
            record.tpot_ms = (answer.at_s[-1] - answer.at_s[0]) * 1e3 / (record.tokens - 1)
        if record.prefill_response_ms is not None:
            record.handoff_ms = record.ttft_ms - record.prefill_response_ms
    if record.error is None and record.tokens != record.osl:
        record.error = f"{record.tokens} tokens answered, {record.osl} asked"
    elif record.error is None and not answer.at_s:
        record.error = "no token was streamed"


def _shortened(text: bytes) -> str:
    return text[:ERROR_TEXT_LIMIT].decode(errors="replace").strip()
