"""The answer to one client, which may fail before or after its first byte."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from aiohttp import web

from kvpush.router import sse
from kvpush.router.errors import ApiError, error_body


class ClientGoneError(Exception):
    """The client has closed its connection."""


class Reply:
    """Sends a stream whose headers leave with its first bytes, so that a failure before them still has a status."""

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        self.headers = dict(headers)
        self.outcome = "ok"  # of an answer that was sent to its end
        self._request = request
        self._stream: web.StreamResponse | None = None
        self._tail = b""

    async def write(self, chunk: bytes, content_type: str) -> None:
        """Raises ClientGoneError."""
        try:
            if self._stream is None:
                headers = {**self.headers, "Content-Type": content_type, "Cache-Control": "no-cache"}
                self._stream = web.StreamResponse(headers=headers)
                await self._stream.prepare(self._request)
            await self._stream.write(chunk)
        except ConnectionError as error:
            raise ClientGoneError from error
        self._tail = (self._tail + chunk)[-len(sse.END) :]

    async def end(self) -> web.StreamResponse:
        assert self._stream is not None
        try:
            await self._stream.write_eof()
        except ConnectionError as error:
            raise ClientGoneError from error
        return self._stream

    def whole(self, body: bytes, content_type: str) -> web.StreamResponse:
        return web.Response(body=body, headers={**self.headers, "Content-Type": content_type})

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """An error answer, or an error event at the end of a stream that has begun."""
        if self._stream is None:
            headers = {**self.headers, "Content-Type": error.content_type}
            return web.Response(status=error.status, body=error.body, headers=headers)
        # Ends an event that the engine has left incomplete.
        start = b"" if self._tail == sse.END else sse.END
        try:
            await self._stream.write(start + sse.event(_one_line(error)))
            await self._stream.write_eof()
        except ConnectionError as gone:
            raise ClientGoneError from gone
        return self._stream


def _one_line(error: ApiError) -> bytes:
    """The error as compact JSON: a line break would end the event."""
    try:
        content = msgspec.json.decode(error.body)
    except msgspec.DecodeError:
        content = None
    if isinstance(content, dict) and "error" in content:
        return msgspec.json.encode(content)
    return error_body(error.status, error.body.decode(errors="replace") or str(error))
