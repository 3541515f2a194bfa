"""The real `openai` client in front of the router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from router_fakes import OUTPUT, Answer, Cluster, async_test, cluster, eventually, vllm_error

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.unit

TEXT = "<hello>" + "".join(OUTPUT)
MESSAGES = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def clients(it: Cluster) -> AsyncIterator[object]:
    async with openai.AsyncOpenAI(base_url=it.url + "/v1", api_key="k", max_retries=0, timeout=10.0) as client:
        yield client


@async_test
async def test_completions() -> None:
    async with cluster() as it, clients(it) as client:
        answer = await client.completions.create(model="fake", prompt="hello", max_tokens=5, n=2)
        assert [choice.text for choice in answer.choices] == [TEXT, TEXT]
        assert answer.usage.completion_tokens == 10
        parts = []
        async for chunk in await client.completions.create(model="fake", prompt="hello", max_tokens=5, stream=True):
            parts.append(chunk.choices[0].text)
        assert "".join(parts) == TEXT
        assert it.d[0].seen[0].headers["Authorization"] == "Bearer k"


@async_test
async def test_chat() -> None:
    async with cluster() as it, clients(it) as client:
        answer = await client.chat.completions.create(model="fake", messages=MESSAGES, max_completion_tokens=5)
        assert answer.choices[0].message.content == TEXT
        parts, usage = [], None
        stream = await client.chat.completions.create(
            model="fake", messages=MESSAGES, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            parts += [choice.delta.content for choice in chunk.choices]
            usage = chunk.usage or usage
        assert "".join(parts) == TEXT
        assert usage.completion_tokens == 5


@async_test
async def test_several_prompts() -> None:
    async with cluster() as it, clients(it) as client:
        answer = await client.completions.create(model="fake", prompt=["x", "y"], max_tokens=2)
        assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "<x>one"), (1, "<y>one")]
        texts = ["", ""]
        async for chunk in await client.completions.create(model="fake", prompt=["x", "y"], max_tokens=2, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == ["<x>one", "<y>one"]


@async_test
async def test_errors_have_their_class_and_message() -> None:
    async with cluster() as it, clients(it) as client:
        it.d[0].answer = it.p[0].answer = Answer(400, vllm_error(400, "prompt too long"))
        with pytest.raises(openai.BadRequestError, match="prompt too long"):
            await client.completions.create(model="fake", prompt="hello")
        it.p[0].answer = Answer(500, vllm_error(500, "dead"))
        it.d[0].answer = Answer()
        with pytest.raises(openai.InternalServerError, match="dead"):
            await client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
            await client.embeddings.create(model="fake", input="x")


@async_test
async def test_a_stream_that_breaks_raises() -> None:
    async with cluster() as it, clients(it) as client:
        it.d[0].answer = Answer(fail_after=2)
        parts = []

        async def read() -> None:
            async for chunk in await client.completions.create(model="fake", prompt="hello", stream=True):
                parts.append(chunk.choices[0].text)

        with pytest.raises(openai.APIError, match="engine died"):
            await read()
        assert parts == ["<hello>", "one"]


@async_test
async def test_closing_a_stream_cancels_it() -> None:
    async with cluster() as it, clients(it) as client:
        it.d[0].answer = Answer(token_pause_s=0.2)
        stream = await client.completions.create(model="fake", prompt="hello", stream=True)
        async for _ in stream:
            break
        await stream.close()
        await eventually(lambda: it.d[0].only().cancelled)
        await eventually(it.idle)


@async_test
async def test_models() -> None:
    async with cluster() as it, clients(it) as client:
        assert [model.id async for model in client.models.list()] == ["fake"]
