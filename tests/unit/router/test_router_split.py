"""Several prompts in one request: one transfer each, one answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_fakes import Answer, Seen, async_test, cluster, eventually, vllm_error

from kvpush.router import legs
from kvpush.router.errors import ApiError
from kvpush.router.prompts import StreamMerger, add_usage, merge_answers, split

pytestmark = pytest.mark.unit


def texts_of(events: list[Any], count: int) -> list[str]:
    texts = [""] * count
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


@pytest.mark.parametrize("prompts", [["a", "b", "c"], [[1, 2], [3], [4, 5, 6]]], ids=["strings", "token lists"])
@pytest.mark.parametrize("n", [1, 2])
@async_test
async def test_a_list_is_answered_as_by_one_engine(prompts: list[Any], n: int) -> None:
    async with cluster() as it:
        body = {"prompt": prompts, "n": n, "max_tokens": 4}
        status, answer, headers = await it.post(body, headers={"X-Request-Id": "mine"})
        assert status == 200
        async with it.http.post(it.d[0].url + "/v1/completions", json=body, headers={"X-Request-Id": "mine"}) as direct:
            assert answer == await direct.json()
        d = it.d[0].seen[: len(prompts)]
        assert sorted((seen.body["prompt"] for seen in d), key=str) == sorted(prompts, key=str)
        assert {seen.transfer_id for seen in d} == {seen.transfer_id for seen in it.p[0].seen}
        assert len({seen.transfer_id for seen in d}) == len(prompts)
        assert all(seen.transfer_id.startswith(headers["x-kvpush-transfer-id"] + "-") for seen in d)
        assert {seen.params["kvpush_consumers"] for seen in d} == {n}
        assert {seen.headers["X-Request-Id"] for seen in d} == {f"mine-{i}" for i in range(len(prompts))}
        await eventually(it.idle)


@pytest.mark.parametrize("prompt", [["a"], [[1, 2]], [1, 2, 3], "a", [], [["a"], 1]])
@async_test
async def test_what_is_one_prompt_stays_as_it_is(prompt: Any) -> None:
    async with cluster() as it:
        it.d[0].answer = it.p[0].answer = Answer(400, vllm_error(400, "whatever"))
        await it.post({"prompt": prompt})
        if prompt != [["a"], 1]:
            assert it.d[0].only().body["prompt"] == prompt
            assert it.p[0].only().body["prompt"] == prompt


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("usage", [False, True])
@async_test
async def test_a_streamed_list(n: int, usage: bool) -> None:
    async with cluster(prefills=2, decodes=2) as it:

        def slow_first(seen: Seen) -> Answer:
            return Answer(token_pause_s=0.05 if seen.body["prompt"] == "a" else 0.0)

        for engine in it.d:
            engine.answer = slow_first
        body: dict[str, Any] = {"prompt": ["a", "b"], "n": n, "max_tokens": 4}
        if usage:
            body["stream_options"] = {"include_usage": True}
        events = await it.stream(body)
        assert events.count("[DONE]") == 1
        assert events.pop() == "[DONE]"
        if usage:
            last = events.pop()
            assert last["choices"] == []
            assert last["usage"] == {"prompt_tokens": 2, "completion_tokens": 8 * n, "total_tokens": 2 + 8 * n}
        assert all(event.get("usage") is None for event in events)
        assert texts_of(events, 2 * n) == ["<a>one two three"] * n + ["<b>one two three"] * n
        assert len({event["id"] for event in events}) == 1
        # The slow stream does not hold the fast one back.
        assert [event["choices"][0]["index"] // n for event in events][-1] == 0
        await eventually(it.idle)


@pytest.mark.parametrize("stream", [False, True])
@async_test
async def test_one_prompt_that_fails_ends_all(stream: bool) -> None:
    async with cluster() as it:

        def answer(seen: Seen) -> Answer:
            if seen.body["prompt"] == "bad":
                return Answer(400, vllm_error(400, "bad prompt"), delay_s=0.1)
            return Answer(hang=True)

        it.d[0].answer = it.p[0].answer = answer
        status, content, _ = await it.post({"prompt": ["good", "bad", "good"], "stream": stream})
        assert (status, content) == (400, vllm_error(400, "bad prompt"))
        await eventually(lambda: sum(s.cancelled for e in (it.p[0], it.d[0]) for s in e.seen) == 4)
        await eventually(it.idle)


@async_test
async def test_one_stream_that_breaks_ends_all_with_an_error_event() -> None:
    async with cluster() as it:

        def answer(seen: Seen) -> Answer:
            return Answer(die_after=2) if seen.body["prompt"] == "bad" else Answer(token_pause_s=0.2)

        it.d[0].answer = answer
        events = await it.stream({"prompt": ["good", "bad"], "max_tokens": 5})
        assert events[-1]["error"]["code"] == 502
        assert "[DONE]" not in events
        await eventually(it.idle)
        assert any(seen.cancelled for seen in it.d[0].seen if seen.body["prompt"] == "good")


@async_test
async def test_an_error_event_of_one_stream_ends_all() -> None:
    async with cluster() as it:
        it.d[0].answer = lambda s: Answer(fail_after=1) if s.body["prompt"] == "bad" else Answer(token_pause_s=0.2)
        events = await it.stream({"prompt": ["good", "bad"], "max_tokens": 5})
        assert events[-1] == vllm_error(500, "engine died")
        await eventually(it.idle)


@pytest.mark.parametrize("stream", [False, True])
@async_test
async def test_a_client_that_leaves_cancels_all(stream: bool) -> None:
    async with cluster() as it:
        it.d[0].answer = Answer(token_pause_s=0.3) if stream else Answer(hang=True)
        it.p[0].answer = Answer(delay_s=0.05)
        request = asyncio.create_task(it.post({"prompt": ["a", "b", "c"], "max_tokens": 5, "stream": stream}))
        await eventually(lambda: len(it.d[0].seen) == 3 and all(seen.finished for seen in it.p[0].seen))
        await asyncio.sleep(0.1)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await eventually(it.idle)
        assert all(seen.cancelled for seen in it.d[0].seen)


@async_test
async def test_lists_that_cannot_be_transferred_go_whole_to_the_decode_engine() -> None:
    async with cluster() as it:
        status, answer, _ = await it.post({"prompt": ["a", "b"], "echo": True, "logprobs": 1, "max_tokens": 2})
        assert status == 200
        assert len(answer["choices"]) == 2
        assert it.d[0].only().body["prompt"] == ["a", "b"]


@async_test
async def test_pull_splits_too() -> None:
    async with cluster(mode="pull") as it:
        events = await it.stream({"prompt": ["a", "b"], "max_tokens": 2})
        assert texts_of(events[:-1], 2) == ["<a>one", "<b>one"]


@settings(deadline=None)
@given(st.lists(st.text(max_size=5) | st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=2, max_size=6))
def test_splitting_keeps_every_prompt_and_all_else(prompts: list[Any]) -> None:
    body = legs.parse_body(json.dumps({"model": "m", "prompt": prompts, "n": 2}).encode())
    parts = split(body, 6)
    assert parts is not None
    decoded = [json.loads(legs.encode(part)) for part in parts]
    assert decoded == [{"model": "m", "prompt": prompt, "n": 2} for prompt in prompts]
    with pytest.raises(ApiError, match="at most 1"):
        split(body, 1)


usages = st.fixed_dictionaries(
    {"prompt_tokens": st.integers(0, 9), "completion_tokens": st.integers(0, 9)},
    optional={"prompt_tokens_details": st.none() | st.fixed_dictionaries({"cached_tokens": st.integers(0, 9)})},
)


@settings(deadline=None)
@given(st.lists(usages, min_size=1, max_size=5))
def test_usage_is_summed_field_by_field(parts: list[dict[str, Any]]) -> None:
    total = add_usage(parts)
    assert total["prompt_tokens"] == sum(part["prompt_tokens"] for part in parts)
    details = [part["prompt_tokens_details"] for part in parts if part.get("prompt_tokens_details")]
    if details:
        assert total["prompt_tokens_details"] == {"cached_tokens": sum(each["cached_tokens"] for each in details)}


@pytest.mark.parametrize("answer", [b"x", b"[]", b"{}", b'{"choices": {}}', b'{"choices": [{"text": "no index"}]}'])
def test_answers_that_are_no_completions_are_refused(answer: bytes) -> None:
    with pytest.raises(ApiError, match="decode engine's answer"):
        merge_answers([answer], 1, "id")
    with pytest.raises(ApiError, match="decode engine's answer"):
        StreamMerger(1, "id").event(0, answer)


def test_choices_are_sorted_within_a_prompt() -> None:
    answer = msgspec.json.encode({"choices": [{"index": 1, "text": "b"}, {"index": 0, "text": "a"}], "usage": None})
    merged = json.loads(merge_answers([answer, answer], 2, "id"))
    assert [(choice["index"], choice["text"]) for choice in merged["choices"]] == [
        (0, "a"),
        (1, "b"),
        (2, "a"),
        (3, "b"),
    ]
