"""Clients of a soak judge what they get: nothing that must not be passes for an answer or for an error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvpush.bench.soak.prompts import ANSWER_TOKENS, LONGEST_TOKENS, Reference, draw, margin
from kvpush.bench.soak.traffic import Answer, Traffic, judge

pytestmark = pytest.mark.unit

REFERENCE = Reference((5, 6, 7), " a right text")


def answer(*texts: str, **changes: Any) -> Answer:
    values: dict[str, Any] = {"status": 200, "reasons": ["length"] * len(texts), "ended": True}
    return Answer(texts=list(texts), **{**values, **changes})


@pytest.mark.parametrize(
    ("given", "choices", "late", "outcome"),
    [
        (answer(REFERENCE.text), 1, False, "right"),
        (answer(REFERENCE.text, REFERENCE.text), 2, False, "right"),
        (answer(" another text"), 1, False, "wrong"),
        (answer(REFERENCE.text, " another text"), 2, False, "wrong"),
        (answer(REFERENCE.text), 2, False, "wrong"),
        (answer(" a right"), 1, False, "wrong"),
        (answer(), 1, False, "wrong"),
        (answer(REFERENCE.text, reasons=["abort"]), 1, False, "wrong"),
        (answer(" a right", ended=False, reasons=[None]), 1, False, "wrong"),  # a stream that ends without a word
        (answer(" a right", ended=False, error="in the stream: x"), 1, False, "error"),
        (answer(" another", ended=False, error="in the stream: x"), 1, False, "wrong"),
        (answer(status=500, error="500: x"), 1, False, "error"),
        (answer(status=504, error="504: x"), 1, False, "stuck"),
        (answer(status=502, error="502: x"), 1, True, "stuck"),
    ],
)
def test_judgement(given: Answer, choices: int, late: bool, outcome: str) -> None:
    assert judge(REFERENCE, given, choices, late) == outcome


Behave = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def soaked(behave: Behave, during: Callable[[Traffic], Awaitable[None]], bound_s: float = 20.0) -> Traffic:
    """Traffic against a server that behaves so, while `during` runs."""

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["max_tokens"] == ANSWER_TOKENS
        return await behave(request, body)

    async def whole() -> Traffic:
        app = web.Application()
        app.router.add_post("/v1/completions", completions)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            async with aiohttp.ClientSession() as session:
                traffic = Traffic(session, url, "m", [REFERENCE], 3, bound_s)
                traffic.start(3)
                await during(traffic)
                await traffic.stop()
            return traffic
        finally:
            await runner.cleanup()

    return asyncio.run(asyncio.wait_for(whole(), 60.0))


async def good(request: web.Request, body: dict[str, Any], text: str = REFERENCE.text) -> web.StreamResponse:
    choices = range(body.get("n", 1))
    if not body["stream"]:
        content = [{"index": index, "text": text, "finish_reason": "length"} for index in choices]
        return web.json_response({"choices": content})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for index in choices:
        for piece, reason in ((text[:4], None), (text[4:], "length")):
            chunk = {"choices": [{"index": index, "text": piece, "finish_reason": reason}]}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


def enough(requests: int) -> Callable[[Traffic], Awaitable[None]]:
    async def during(traffic: Traffic) -> None:
        while sum(traffic.counts.values()) < requests:
            await asyncio.sleep(0.005)

    return during


def test_right_answers_of_every_kind() -> None:
    traffic = soaked(good, enough(120))
    assert set(traffic.counts) == {"right"}
    assert traffic.bad == []


def test_one_wrong_text_among_many_is_found() -> None:
    asked = 0

    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        return await good(request, body, " a right tEXT" if asked == 30 else REFERENCE.text)

    traffic = soaked(behave, enough(60))
    assert traffic.counts["wrong"] == 1
    assert len(traffic.bad) == 1
    assert set(traffic.bad[0].texts) == {" a right tEXT"}


def test_errors_are_told_apart_from_answers() -> None:
    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no engine"}}, status=503)

    traffic = soaked(behave, enough(5))
    assert set(traffic.counts) == {"error"}
    assert set(traffic.errors) == {"503: no engine"}


def test_a_connection_that_breaks_is_an_error() -> None:
    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    traffic = soaked(behave, enough(5))
    assert set(traffic.counts) == {"error"}


def test_clients_that_leave_are_counted_as_such() -> None:
    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(1.0)
        return await good(request, body)

    async def during(traffic: Traffic) -> None:
        while traffic.in_flight < 3:
            await asyncio.sleep(0.005)
        assert traffic.abort(2) == 2

    traffic = soaked(behave, during)
    assert traffic.counts == {"aborted": 2, "right": 1}


def test_a_request_that_never_ends_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpush.bench.soak.traffic.BOUND_MARGIN_S", 0.2)

    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(3600)
        raise AssertionError

    async def during(traffic: Traffic) -> None:
        while traffic.in_flight < 3:
            await asyncio.sleep(0.005)

    traffic = soaked(behave, during, bound_s=0.2)
    assert traffic.counts == {"stuck": 3}


def test_a_burst_asks_so_many_more() -> None:
    async def during(traffic: Traffic) -> None:
        await traffic.stop()
        before = sum(traffic.counts.values())
        traffic.burst(7)
        await traffic.stop()
        assert sum(traffic.counts.values()) == before + 7

    soaked(good, during)


def test_prompts_are_drawn_from_the_seed_in_all_lengths() -> None:
    prompts = draw(7, 200)
    assert prompts == draw(7, 200)
    assert prompts != draw(8, 200)
    lengths = [len(prompt) for prompt in prompts]
    assert min(lengths) < 5
    assert 1200 < max(lengths) <= LONGEST_TOKENS + 1
    starts = [prompt[:40] for prompt in prompts if len(prompt) > 40]
    assert len(starts) - len(set(starts)) > 50  # many begin alike


def test_the_margin_is_the_smallest_one() -> None:
    assert margin([{"a": -0.1, "b": -2.1}, {"a": -1.0, "b": -1.25}]) == pytest.approx(0.25)
    assert margin([{"a": -0.1}]) == 0.0  # unknown
    assert margin([]) == 0.0
