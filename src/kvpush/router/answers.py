"""How the router reads what engines answer."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec

from kvpush.router.backend import CONNECTION_ERRORS, PREFILL, Backend, excerpt
from kvpush.router.errors import ApiError, MirroredError


class Usage(msgspec.Struct):
    """Of an answer's usage what a record needs."""

    prompt_tokens: int | None = None


class PrefillAnswer(msgspec.Struct):
    """What the router reads of a prefill leg's answer."""

    kv_transfer_params: dict[str, Any] | None = None
    usage: Usage | None = None


async def read_all(backend: Backend, response: aiohttp.ClientResponse) -> bytes:
    """The whole body of an answer. Raises ApiError if the connection breaks."""
    try:
        return await response.read()
    except CONNECTION_ERRORS as error:
        raise backend.broken(error) from error
    finally:
        if not response.content.at_eof():
            response.close()


def refused(backend: Backend, response: aiohttp.ClientResponse, body: bytes) -> ApiError:
    """What the client gets for an answer other than 200.

    The engine's own answer, except that a prefill engine's failure is ours: the client knows nothing of such engines.
    """
    content_type = response.headers.get("Content-Type", "application/json")
    if response.status < 400 or (backend.role == PREFILL and response.status >= 500):
        status = 503 if response.status == 503 else 502
        message = f"The {backend.role} engine answered {response.status}: {excerpt(body)}"
        return ApiError(status, message, outcome=f"{backend.role}_failed", retryable=True)
    return mirrored(backend, response.status, body, content_type)


def mirrored(backend: Backend, status: int, body: bytes, content_type: str) -> MirroredError:
    """An engine's error answer, to be passed on as it is."""
    outcome = "client_error" if status < 500 else f"{backend.role}_failed"
    return MirroredError(status, body, content_type, outcome=outcome, retryable=status >= 500)
