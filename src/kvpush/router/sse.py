"""Server-sent events, as far as OpenAI's streams use them: `data: JSON` and `data: [DONE]`, split by an empty line."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

DONE: Final = b"[DONE]"
END: Final = b"\n\n"
# Quotes inside a JSON text are escaped, so no generated text can look like this.
_ERROR_START: Final = b'data: {"error"'


def event(payload: bytes) -> bytes:
    return b"data: " + payload + END


def has_token(chunk: bytes) -> bool:
    """Whether bytes of a stream hold data; comments that keep the connection alive do not count."""
    return chunk.startswith(b"data:") or b"\ndata:" in chunk


def has_error(chunk: bytes) -> bool:
    return _ERROR_START in chunk


def error_payload(chunk: bytes) -> bytes | None:
    """The JSON of an error event that the bytes begin with, None if it is another event or incomplete."""
    if not chunk.startswith(_ERROR_START) or END not in chunk:
        return None
    return chunk[len(b"data: ") : chunk.index(END)]


async def payloads(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The payload of each event; comments are left out, and so is an event that the stream's end cuts off."""
    buffer = b""
    async for chunk in chunks:
        buffer += chunk
        if b"\r" in buffer:
            buffer = buffer.replace(b"\r\n", b"\n")
        *complete, buffer = buffer.split(END)
        for block in complete:
            lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)
