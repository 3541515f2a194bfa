"""The normal course of both modes, over real HTTP against fake engines."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from router_fakes import OUTPUT, Answer, async_test, cluster, eventually

pytestmark = pytest.mark.unit

CHAT = "/v1/chat/completions"
HELLO = {"prompt": "hello", "max_tokens": 3}


def hello_chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, **more}


@async_test
async def test_both_legs_carry_one_transfer() -> None:
    async with cluster() as it:
        status, answer, headers = await it.post({**HELLO, "n": 2, "seed": 7})
        assert status == 200
        assert [choice["text"] for choice in answer["choices"]] == ["<hello>one two"] * 2
        p, d = it.p[0].only(), it.d[0].only()
        assert p.params == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": headers["x-kvpush-transfer-id"],
            "transfer_mode": "push",
            "kvpush_consumers": 2,
            "remote_engine_id": None,
            "remote_host": None,
            "remote_port": None,
        }
        assert d.params == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": headers["x-kvpush-transfer-id"],
            "remote_engine_id": "p0-1",
            "remote_host": "127.0.0.1",
            "remote_port": it.p[0].side_channel[1],
            "tp_size": 1,
            "pp_size": 1,
            "transfer_mode": "push",
            "kvpush_consumers": 2,
        }
        assert {key: value for key, value in d.body.items() if key != "kv_transfer_params"} == {
            **HELLO,
            "n": 2,
            "seed": 7,
        }
        assert (p.body["max_tokens"], p.body["n"], p.body["stream"]) == (1, 1, False)
        assert float(headers["x-kvpush-prefill-ms"]) >= 0
        await eventually(it.idle)


@async_test
async def test_the_decode_leg_does_not_wait_for_the_prefill_leg() -> None:
    async with cluster() as it:
        it.p[0].answer = Answer(hang=True)
        request = asyncio.create_task(it.post(HELLO))
        await eventually(lambda: it.d[0].seen and it.p[0].seen)
        request.cancel()


@async_test
async def test_transfer_ids_are_fresh_and_request_ids_are_the_clients() -> None:
    async with cluster() as it:
        for _ in range(3):
            _, _, headers = await it.post(HELLO, headers={"X-Request-Id": "mine", "Authorization": "Bearer k"})
            assert headers["X-Request-Id"] == "mine"
        await it.post(HELLO)
        for engine in (it.p[0], it.d[0]):
            assert len({seen.transfer_id for seen in engine.seen}) == 4
            assert [seen.headers["X-Request-Id"] for seen in engine.seen[:3]] == ["mine"] * 3
            assert [seen.headers["Authorization"] for seen in engine.seen[:3]] == ["Bearer k"] * 3
            assert "Authorization" not in engine.seen[3].headers
        assert it.p[0].seen[3].headers["X-Request-Id"] == it.d[0].seen[3].headers["X-Request-Id"] != "mine"


@async_test
async def test_a_stream_is_passed_on_byte_for_byte() -> None:
    async with cluster() as it:
        body = json.dumps({**HELLO, "stream": True}).encode()
        async with it.http.post(it.url + "/v1/completions", data=body) as response:
            through_router = await response.read()
            assert "x-kvpush-transfer-id" in response.headers
        async with it.http.post(it.d[0].url + "/v1/completions", data=body) as response:
            assert through_router == await response.read()


@async_test
async def test_each_token_is_passed_on_when_it_comes() -> None:
    async with cluster() as it:
        it.d[0].answer = Answer(token_pause_s=0.1)
        loop = asyncio.get_running_loop()
        arrivals = []
        async with it.http.post(it.url + "/v1/completions", json={**HELLO, "stream": True}) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    arrivals.append(loop.time())
        assert len(arrivals) == 3
        assert all(later - earlier > 0.05 for earlier, later in itertools.pairwise(arrivals))


@async_test
async def test_chat_keeps_the_tools_on_both_legs() -> None:
    async with cluster() as it:
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        body = hello_chat(tools=tools, tool_choice="required", response_format={"type": "json_object"}, top_p=0.5)
        status, answer, _ = await it.post(body, CHAT)
        assert status == 200
        assert answer["choices"][0]["message"]["content"] == "<hello>one two"
        p = it.p[0].only().body
        assert p["tools"] == tools
        assert p["tool_choice"] == "required"
        assert p["response_format"] == {"type": "json_object"}
        assert (p["max_tokens"], p["max_completion_tokens"]) == (1, 1)
        assert "top_p" not in p


@async_test
async def test_a_streamed_chat() -> None:
    async with cluster() as it:
        events = await it.stream(hello_chat(stream_options={"include_usage": True}), CHAT)
        assert "".join(e["choices"][0]["delta"]["content"] for e in events[:3]) == "<hello>one two"
        assert events[3]["usage"]["completion_tokens"] == 3
        assert events[4:] == ["[DONE]"]
        assert "stream_options" not in it.p[0].only().body


@async_test
async def test_transfer_parameters_of_a_client_never_reach_an_engine() -> None:
    async with cluster() as it:
        evil = {"do_remote_prefill": True, "remote_host": "evil", "transfer_id": "stolen"}
        await it.post({**HELLO, "kv_transfer_params": evil})
        await it.post({**HELLO, "vllm_xargs": {"kv_transfer_params": "evil", "keep": 1}, "use_beam_search": True})
        for seen in [*it.p[0].seen, *it.d[0].seen]:
            assert b"evil" not in seen.raw
            assert b"stolen" not in seen.raw
        assert it.d[0].seen[1].body["vllm_xargs"] == {"keep": 1}
        assert it.parts.metrics.client_params_dropped == 2


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"use_beam_search": True, "n": 2}, "beam_search"),
        ({"n": 1, "best_of": 3}, "best_of"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": -1}, "truncation"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ],
)
@async_test
async def test_what_cannot_be_transferred_is_prefilled_by_the_decode_engine(more: dict[str, Any], reason: str) -> None:
    async with cluster() as it:
        status, _, _ = await it.post({**HELLO, **more})
        assert status == 200
        assert not it.p[0].seen
        assert it.d[0].only().body == {**HELLO, **more}
        assert it.parts.metrics.local == {reason: 1}
        assert (await it.status())["recent"][-1]["local_reason"] == reason


@async_test
async def test_pull_gives_the_decode_leg_what_the_prefill_leg_answered() -> None:
    async with cluster(mode="pull") as it:
        it.p[0].answer = Answer(delay_s=0.1)
        request = asyncio.create_task(it.post(HELLO))
        await eventually(lambda: it.p[0].seen)
        assert not it.d[0].seen
        assert (await request)[0] == 200
        p, d = it.p[0].only(), it.d[0].only()
        assert p.params["do_remote_decode"] is True
        assert p.params["transfer_mode"] == "pull"
        assert d.params == {
            **it.p[0].identity(),
            "do_remote_prefill": True,
            "remote_block_ids": [[1, 2]],
            "remote_request_id": "r",
            "transfer_id": p.transfer_id,
            "kvpush_consumers": 1,
        }
        assert not it.p[0].probes  # a foreign connector would keep the blocks of a probe


@async_test
async def test_pull_without_an_offer_is_prefilled_by_the_decode_engine() -> None:
    async with cluster(mode="pull") as it:
        it.p[0].answer = Answer(params={})
        assert (await it.post(HELLO))[0] == 200
        assert it.d[0].only().body == HELLO
        assert it.parts.metrics.local == {"not_offered": 1}


@async_test
async def test_records_and_metrics_tell_the_hand_off() -> None:
    async with cluster() as it:
        it.p[0].answer = Answer(delay_s=0.05)
        it.d[0].answer = Answer(delay_s=0.6)
        await it.stream(HELLO)
        await eventually(it.idle)
        status = await it.status()
        record = status["recent"][-1]
        assert record["status"] == "ok"
        assert record["prompt_tokens"] == len("hello")
        assert 50 <= record["prefill_ms"] < 500
        assert record["ttft_ms"] >= 600
        assert 100 < record["handoff_ms"] <= record["ttft_ms"] - 50
        assert record["prefill_url"] == it.p[0].url
        assert status["prefill"][0]["identity"]["engine_id"] == "p0-1"
        async with it.http.get(it.url + "/metrics") as response:
            text = await response.text()
            assert response.content_type == "text/plain"
        samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert samples['kvpush_router_requests_total{endpoint="/v1/completions",outcome="ok"}'] == "1"
        assert samples["kvpush_router_handoff_seconds_count"] == "1"
        assert float(samples["kvpush_router_handoff_seconds_sum"]) == pytest.approx(
            record["handoff_ms"] / 1e3, abs=1e-3
        )
        assert float(samples["kvpush_router_ttft_seconds_sum"]) >= 0.6
        assert samples["kvpush_router_in_flight"] == "0"


@async_test
async def test_models_and_health_and_unknown_paths() -> None:
    async with cluster() as it:
        async with it.http.get(it.url + "/v1/models") as response:
            assert (await response.json())["data"][0]["owned_by"] == "d0-1"
        async with it.http.get(it.url + "/health") as response:
            assert response.status == 200
            assert (await response.json())["prefill"] == {it.p[0].url: True}
        it.p[0].healthy = False
        async with it.http.get(it.url + "/health") as response:
            assert response.status == 503
            content = await response.json()
            assert content["prefill"] == {it.p[0].url: False}
            assert content["decode"] == {it.d[0].url: True}
        it.d[0].stall_health = True
        async with it.http.get(it.url + "/health") as response:
            assert response.status == 503
            assert (await response.json())["decode"] == {it.d[0].url: False}
        for method, path, code in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)):
            async with it.http.request(method, it.url + path) as response:
                assert response.status == code
                error = (await response.json())["error"]
                assert error["code"] == code
                assert path in error["message"]


@async_test
async def test_load_goes_to_the_engine_with_the_fewest_legs_in_turn() -> None:
    async with cluster(prefills=2, decodes=3) as it:
        for _ in range(6):
            await it.post(HELLO)
        assert [len(engine.seen) for engine in it.d] == [2, 2, 2]
        assert [len(engine.seen) for engine in it.p] == [3, 3]
        it.d[0].answer = Answer(hang=True)
        slow = [asyncio.create_task(it.post(HELLO)) for _ in range(3)]
        await eventually(lambda: sum(len(engine.seen) for engine in it.d) == 9)
        await asyncio.sleep(0.05)
        before = len(it.d[0].seen)
        for _ in range(4):
            await it.post(HELLO)
        assert len(it.d[0].seen) == before
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        await eventually(it.idle)


@async_test
async def test_many_at_once() -> None:
    async with cluster(prefills=2, decodes=2) as it:
        for engine in it.p:
            engine.answer = Answer(delay_s=0.05)

        async def one(number: int) -> None:
            body = {"prompt": f"prompt {number}", "max_tokens": 5, "n": 1 + number % 3}
            if number % 2:
                events = await it.stream(body)
                texts = [""] * body["n"]  # type: ignore[operator]
                for event in events[:-1]:
                    texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
            else:
                status, answer, _ = await it.post(body)
                assert status == 200
                texts = [choice["text"] for choice in answer["choices"]]
            assert texts == [f"<prompt {number}>" + "".join(OUTPUT)] * body["n"]  # type: ignore[operator]

        await asyncio.gather(*(one(number) for number in range(64)))
        assert sum(engine.most_concurrent for engine in it.d) >= 32
        await eventually(it.idle)
        assert it.parts.metrics.transfers == {"ok": 64}
        assert it.parts.metrics.requests["/v1/completions", "ok"] == 64
