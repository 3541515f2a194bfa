"""Events survive any cutting of the bytes, and errors are seen in them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpush.router import sse

pytestmark = pytest.mark.unit


async def _cut(stream: bytes, sizes: list[int]) -> AsyncIterator[bytes]:
    place = 0
    for size in sizes:
        yield stream[place : place + size]
        place += size
    yield stream[place:]


@settings(deadline=None)
@given(
    st.lists(st.text(alphabet='ab{}": é\\', min_size=1).map(str.strip).filter(bool), max_size=6),
    st.lists(st.integers(1, 7), max_size=30),
    st.booleans(),
)
def test_payloads_do_not_depend_on_where_the_bytes_are_cut(texts: list[str], sizes: list[int], crlf: bool) -> None:
    stream = b": comment\n\n" + b"".join(sse.event(text.encode()) for text in texts) + b"data: cut off"
    if crlf:
        stream = stream.replace(b"\n", b"\r\n")

    async def collect() -> list[bytes]:
        return [payload async for payload in sse.payloads(_cut(stream, sizes))]

    assert asyncio.run(collect()) == [text.encode() for text in texts]


@pytest.mark.parametrize(
    ("chunk", "token", "error"),
    [
        (b": keep-alive\n\n", False, False),
        (b'data: {"choices": []}\n\n', True, False),
        (b': keep-alive\n\ndata: {"error": 1}\n\n', True, True),
        (b'data: {"text": "data: {\\"error\\""}\n\n', True, False),
        (b"", False, False),
    ],
)
def test_what_a_chunk_holds(chunk: bytes, token: bool, error: bool) -> None:
    assert (sse.has_token(chunk), sse.has_error(chunk)) == (token, error)


def test_only_a_whole_error_event_at_the_beginning_is_taken_apart() -> None:
    assert sse.error_payload(b'data: {"error": 1}\n\ndata: [DONE]\n\n') == b'{"error": 1}'
    assert sse.error_payload(b'data: {"error": 1}\n') is None
    assert sse.error_payload(b'data: {"choices": []}\n\ndata: {"error": 1}\n\n') is None
