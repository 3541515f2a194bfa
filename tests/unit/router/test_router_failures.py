"""Whatever an engine does, the client has an answer in time, and nothing is left open."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from router_fakes import Answer, Cluster, Seen, async_test, cluster, eventually, vllm_error

pytestmark = pytest.mark.unit

HELLO = {"prompt": "hello", "max_tokens": 3}
STREAM = {**HELLO, "stream": True}
BOTH_WAYS = pytest.mark.parametrize("body", [HELLO, STREAM], ids=["whole", "stream"])


def outcomes(it: Cluster) -> dict[str, int]:
    return {outcome: count for (_, outcome), count in it.parts.metrics.requests.items()}


@BOTH_WAYS
@async_test
async def test_a_prompt_that_both_refuse_gets_the_decode_engines_400(body: dict[str, Any]) -> None:
    async with cluster() as it:
        it.p[0].answer = Answer(400, vllm_error(400, "you asked for 1 token"))
        it.d[0].answer = Answer(400, vllm_error(400, "you asked for 3 tokens"), delay_s=0.02)
        status, answer, _ = await it.post(body)
        assert (status, answer) == (400, vllm_error(400, "you asked for 3 tokens"))
        await eventually(it.idle)
        assert outcomes(it) == {"client_error": 1}


@BOTH_WAYS
@async_test
async def test_a_refusal_by_the_prefill_engine_alone_is_passed_on(body: dict[str, Any]) -> None:
    async with cluster() as it:
        it.p[0].answer = Answer(404, vllm_error(404, "no such model"))
        status, answer, _ = await it.post(body)
        assert (status, answer) == (404, vllm_error(404, "no such model"))
        await eventually(lambda: it.d[0].only().cancelled)
        await eventually(it.idle)


@BOTH_WAYS
@async_test
async def test_a_prefill_engine_that_hands_nothing_over_is_an_error_at_once(body: dict[str, Any]) -> None:
    async with cluster() as it:
        await it.post(HELLO)  # its identity is known
        it.d[0].answer = Answer(delay_s=20)
        it.p[0].answer = Answer(hands_over=False)
        status, answer, _ = await it.post(body)
        assert status == 502
        assert "without handing its KV over" in answer["error"]["message"]
        await eventually(it.idle)


@pytest.mark.parametrize(("code", "expected"), [(500, 502), (503, 503), (302, 502)])
@BOTH_WAYS
@async_test
async def test_a_failing_prefill_engine_ends_the_decode_leg(body: dict[str, Any], code: int, expected: int) -> None:
    async with cluster() as it:
        it.p[0].answer = Answer(code, vllm_error(code, "out of cheese"), delay_s=0.05)
        status, answer, _ = await it.post(body)
        assert status == expected
        assert "out of cheese" in answer["error"]["message"]
        await eventually(lambda: it.d[0].only().cancelled)
        await eventually(it.idle)
        assert outcomes(it) == {"prefill_failed": 1}
        assert it.parts.records.as_list()[-1]["status"] == "prefill_failed"


@BOTH_WAYS
@async_test
async def test_a_failing_decode_engine_ends_the_prefill_leg_and_is_mirrored(body: dict[str, Any]) -> None:
    async with cluster() as it:
        it.p[0].answer = Answer(hang=True)
        it.d[0].answer = Answer(500, vllm_error(500, "load failed"), delay_s=0.05)
        status, answer, _ = await it.post(body)
        assert (status, answer) == (500, vllm_error(500, "load failed"))
        await eventually(lambda: it.p[0].only().cancelled)
        await eventually(it.idle)
        assert outcomes(it) == {"decode_failed": 1}


@pytest.mark.parametrize("role", ["p", "d"])
@BOTH_WAYS
@async_test
async def test_a_connection_that_breaks_ends_the_other_leg(body: dict[str, Any], role: str) -> None:
    async with cluster() as it:
        broken, other = (it.p[0], it.d[0]) if role == "p" else (it.d[0], it.p[0])
        broken.answer = Answer(die_after=0, delay_s=0.05)
        other.answer = Answer(hang=True)
        status, answer, _ = await it.post(body)
        assert status == 502
        assert ("prefill" if role == "p" else "decode") in answer["error"]["message"]
        await eventually(lambda: other.only().cancelled)
        await eventually(it.idle)


@pytest.mark.parametrize("role", ["p", "d"])
@BOTH_WAYS
@async_test
async def test_an_engine_that_is_not_there(body: dict[str, Any], role: str) -> None:
    async with cluster(identity_wait_s=0.2) as it:
        gone = it.p[0] if role == "p" else it.d[0]
        await gone.stop()
        first, _, _ = await it.post(body)
        second, answer, _ = await it.post(body)
        assert (first, second) in ((502, 503), (503, 503))
        assert gone.url in answer["error"]["message"]
        await eventually(it.idle)


@pytest.mark.parametrize("role", ["p", "d"])
@BOTH_WAYS
@async_test
async def test_an_engine_that_never_answers(body: dict[str, Any], role: str) -> None:
    async with cluster(request_timeout_s=0.3) as it:
        silent = it.p[0] if role == "p" else it.d[0]
        silent.answer = Answer(hang=True)
        status, answer, _ = await it.post(body)
        assert status == 504
        assert "request_timeout_s" in answer["error"]["message"]
        await eventually(lambda: it.d[0].only().cancelled)
        await eventually(it.idle)
        assert outcomes(it) == {"timeout": 1}
        assert it.parts.metrics.transfers == {"timeout": 1}


@async_test
async def test_an_error_event_before_the_first_token_becomes_a_status() -> None:
    async with cluster() as it:
        it.d[0].answer = Answer(fail_after=0)
        status, answer, _ = await it.post(STREAM)
        assert (status, answer) == (500, vllm_error(500, "engine died"))
        await eventually(it.idle)


@async_test
async def test_an_error_event_after_a_token_is_passed_on_and_counted() -> None:
    async with cluster() as it:
        it.d[0].answer = Answer(fail_after=2)
        events = await it.stream(HELLO)
        assert [event == "[DONE]" or "error" in event for event in events] == [False, False, True, True]
        await eventually(it.idle)
        assert outcomes(it) == {"stream_error": 1}


@async_test
async def test_a_decode_engine_that_dies_in_a_stream_leaves_an_error_event() -> None:
    async with cluster() as it:
        it.d[0].answer = Answer(die_after=2)
        async with it.http.post(it.url + "/v1/completions", json=STREAM) as response:
            text = await response.text()
            assert response.status == 200
        blocks = text.split("\n\n")
        assert [json.loads(block[6:])["choices"][0]["text"] for block in blocks[:2]] == ["<hello>", "one"]
        assert blocks[2] == 'data: {"half'  # as it came
        assert json.loads(blocks[3].removeprefix("data: "))["error"]["code"] == 502
        assert blocks[4:] == [""]
        await eventually(it.idle)
        assert outcomes(it) == {"decode_failed": 1}


@async_test
async def test_a_prefill_engine_that_dies_before_the_first_token_of_a_stream_that_has_begun() -> None:
    async with cluster() as it:
        it.d[0].answer = Answer(comment_first=True)
        it.p[0].answer = Answer(500, vllm_error(500, "dead"), delay_s=0.2)
        async with it.http.post(it.url + "/v1/completions", json=STREAM) as response:
            assert response.status == 200
            comment, error, rest = (await response.text()).split("\n\n")
        assert comment == ": keep-alive"
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == 502
        assert rest == ""
        await eventually(lambda: it.d[0].only().cancelled)
        await eventually(it.idle)


@async_test
async def test_a_prefill_leg_that_fails_after_the_first_token_hurts_nobody() -> None:
    async with cluster() as it:

        def prefill(seen: Seen) -> Answer:
            it.p[0].prefilled.setdefault(seen.transfer_id, asyncio.Event()).set()
            return Answer(500, vllm_error(500, "late"), delay_s=0.15)

        it.p[0].answer = prefill
        it.d[0].answer = Answer(token_pause_s=0.1)
        events = await it.stream(HELLO)
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "<hello>one two"
        await eventually(it.idle)
        assert outcomes(it) == {"ok": 1}
        assert it.parts.metrics.late_prefill_failures == 1


@BOTH_WAYS
@async_test
async def test_a_prefill_leg_that_nobody_needs_any_more_is_cancelled(body: dict[str, Any]) -> None:
    async with cluster(prefill_grace_s=0.5) as it:

        def prefill(seen: Seen) -> Answer:
            it.p[0].prefilled.setdefault(seen.transfer_id, asyncio.Event()).set()
            return Answer(hang=True)

        it.p[0].answer = prefill
        async with it.http.post(it.url + "/v1/completions", json=body) as response:
            assert response.status == 200
            assert "two" in await response.text()
        assert not it.p[0].only().cancelled
        await eventually(lambda: it.p[0].only().cancelled)
        await eventually(it.idle)


@pytest.mark.parametrize("role", ["p", "d"])
@async_test
async def test_an_answer_that_is_no_completion(role: str) -> None:
    async with cluster() as it:
        engine = it.p[0] if role == "p" else it.d[0]
        engine.answer = Answer(raw=b"<html>")
        async with it.http.post(it.url + "/v1/completions", json=HELLO) as response:
            text = await response.text()
        if role == "p":
            assert response.status == 502
            assert "<html>" in json.loads(text)["error"]["message"]
        else:
            assert (response.status, text) == (200, "<html>")  # a single answer is passed on unread
        await eventually(it.idle)


@pytest.mark.parametrize("role", ["p", "d"])
@async_test
async def test_retries_take_a_fresh_transfer(role: str) -> None:
    async with cluster(retries=2) as it:
        engine = it.p[0] if role == "p" else it.d[0]
        engine.answer = lambda seen: Answer(500, vllm_error(500, "once")) if len(engine.seen) < 3 else Answer()
        status, answer, headers = await it.post(HELLO)
        assert status == 200
        assert answer["choices"][0]["text"] == "<hello>one two"
        assert len({seen.transfer_id for seen in engine.seen}) == 3
        assert headers["x-kvpush-transfer-id"] == it.d[0].seen[-1].transfer_id
        assert it.parts.metrics.retries == 2
        await eventually(it.idle)


@async_test
async def test_what_the_client_did_wrong_is_not_retried() -> None:
    async with cluster(retries=2) as it:
        it.d[0].answer = Answer(400, vllm_error(400, "no"))
        assert (await it.post(HELLO))[0] == 400
        assert len(it.d[0].seen) == 1


@async_test
async def test_pull_does_not_ask_the_decode_engine_when_prefill_fails() -> None:
    async with cluster(mode="pull") as it:
        it.p[0].answer = Answer(400, vllm_error(400, "too long"))
        assert (await it.post(HELLO))[:2] == (400, vllm_error(400, "too long"))
        it.p[0].answer = Answer(die_after=0)
        assert (await it.post(HELLO))[0] == 502
        assert not it.d[0].seen
        await eventually(it.idle)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "JSON object"),
        (b"[1]", "JSON object"),
        (b'{"prompt": ', "JSON object"),
        (b'{"prompt": "\xff"}', "JSON object"),
        (b"[" * 100_000, "JSON object"),
        (json.dumps({"prompt": ["a"] * 5}).encode(), "5 prompts"),
    ],
)
@async_test
async def test_bodies_that_are_refused(body: bytes, message: str) -> None:
    async with cluster(max_prompts=4) as it:
        status, answer, _ = await it.post(body)
        assert status == 400
        assert message in answer["error"]["message"]
        assert not it.p[0].seen
        assert not it.d[0].seen
        assert outcomes(it) == {"rejected": 1}


@async_test
async def test_a_body_above_the_limit() -> None:
    async with cluster(max_body_bytes=1000) as it:
        assert (await it.post({**HELLO, "user": "x" * 500}))[0] == 200
        status, answer, _ = await it.post({**HELLO, "user": "x" * 1000})
        assert (status, answer["error"]["code"]) == (413, 413)
        assert outcomes(it) == {"ok": 1, "rejected": 1}


@async_test
async def test_more_requests_than_the_limit() -> None:
    async with cluster(max_in_flight=2) as it:
        it.p[0].answer = Answer(delay_s=0.2)
        answers = await asyncio.gather(*(it.post(HELLO) for _ in range(3)))
        assert sorted(status for status, _, _ in answers) == [200, 200, 503]
        assert (await it.post(HELLO))[0] == 200


@pytest.mark.parametrize("n", [0, -1, "many", 1.5, [], 1e400])
@async_test
async def test_an_impossible_n_is_left_to_the_decode_engine(n: Any) -> None:
    async with cluster() as it:
        it.d[0].answer = Answer(400, vllm_error(400, "n must be positive"))
        body = json.dumps({**HELLO, "n": n}).replace("Infinity", "1e400").encode()
        status, answer, _ = await it.post(body)
        assert (status, answer["error"]["message"]) == (400, "n must be positive")
        assert not it.p[0].seen
        assert it.parts.metrics.local == {"malformed": 1}


@BOTH_WAYS
@pytest.mark.parametrize("waiting_for", ["p", "d"])
@async_test
async def test_a_client_that_leaves_cancels_both_legs(body: dict[str, Any], waiting_for: str) -> None:
    async with cluster() as it:
        silent, other = (it.p[0], it.d[0]) if waiting_for == "p" else (it.d[0], it.p[0])
        silent.answer = Answer(hang=True)
        if waiting_for == "d":
            other.answer = Answer(hang=True)
        for _ in range(20):
            request = asyncio.create_task(it.post(body))
            before = len(it.d[0].seen)
            await eventually(lambda before=before: len(it.d[0].seen) > before and len(it.p[0].seen) > before)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
        await eventually(it.idle)
        assert all(seen.cancelled for engine in (it.p[0], it.d[0]) for seen in engine.seen)
        assert outcomes(it) == {"cancelled": 20}
        assert it.parts.metrics.transfers == {"cancelled": 20}


@async_test
async def test_a_client_that_leaves_in_the_middle_of_a_stream() -> None:
    async with cluster() as it:
        it.d[0].answer = Answer(token_pause_s=0.2)
        async with it.http.post(it.url + "/v1/completions", json={**STREAM, "max_tokens": 5}) as response:
            assert (await response.content.readuntil(b"\n\n")).startswith(b"data: ")
            response.close()
        await eventually(lambda: it.d[0].only().cancelled)
        await eventually(it.idle)
        assert it.parts.records.as_list()[-1]["status"] == "cancelled"


@async_test
async def test_a_timeout_in_the_middle_of_a_stream() -> None:
    async with cluster(request_timeout_s=1.0) as it:
        it.d[0].answer = Answer(token_pause_s=0.4)
        events = await it.stream({**HELLO, "max_tokens": 5})
        assert events[-1]["error"]["code"] == 504
        assert 1 <= len(events) - 1 < 5
        await eventually(lambda: it.d[0].only().cancelled)
        await eventually(it.idle)
        assert outcomes(it) == {"timeout": 1}
