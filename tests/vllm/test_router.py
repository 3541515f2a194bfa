"""Real HTTP clients through the router to two real engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import aiohttp
import openai
import pytest
from pair import Pair, metrics
from test_push import words

from kvpush.launch import Engine, Fleet, RouterProcess

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

Ends = tuple[Engine, Engine]
Runner = Callable[..., None]


@pytest.fixture(scope="module")
def router(fleet: Fleet, engines: Ends) -> Iterator[RouterProcess]:
    """The caching engine prefills, the plain one decodes."""
    caching, plain = engines
    started = fleet.router([caching], [plain])
    fleet.wait_ready()
    yield started
    fleet.remove(started)


def test_completions_and_chat_through_the_openai_client(run: Runner, engines: Ends, router: RouterProcess) -> None:
    prefill, decode = engines

    async def test(session: aiohttp.ClientSession) -> None:
        before = await metrics(session, prefill)
        model = decode.spec.model
        through = openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=100)
        alone = openai.AsyncOpenAI(base_url=f"{decode.url}/v1", api_key="none", max_retries=0, timeout=100)
        prompt = words(110, seed=301)
        chat = [{"role": "user", "content": f"What is this about? {words(80, seed=302)}"}]

        async def four(client: openai.AsyncOpenAI) -> list[str]:
            whole = await client.completions.create(model=model, prompt=prompt, max_tokens=8, temperature=0)
            said = await client.chat.completions.create(
                model=model,
                messages=chat,
                max_completion_tokens=8,
                temperature=0,  # type: ignore[arg-type]
            )
            texts = [whole.choices[0].text, said.choices[0].message.content or ""]
            stream = await client.completions.create(
                model=model, prompt=prompt, max_tokens=8, temperature=0, stream=True,
                stream_options={"include_usage": True},
            )  # fmt: skip
            chunks = [chunk async for chunk in stream]
            texts.append("".join(chunk.choices[0].text for chunk in chunks if chunk.choices))
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == 8
            spoken = await client.chat.completions.create(
                model=model,
                messages=chat,
                max_completion_tokens=8,
                temperature=0,
                stream=True,  # type: ignore[arg-type]
            )
            texts.append("".join([c.choices[0].delta.content or "" async for c in spoken if c.choices]))
            return texts

        assert await four(through) == await four(alone)
        after = await metrics(session, prefill)
        assert after["kvpush_sends_total{committed}"] - before.get("kvpush_sends_total{committed}", 0) == 4

    run(test)


def test_lists_and_samples(run: Runner, engines: Ends, router: RouterProcess) -> None:
    prefill, decode = engines

    async def test(session: aiohttp.ClientSession) -> None:
        pair = Pair(session, prefill, decode)
        prompts = [words(70, seed=311), words(40, seed=312), words(90, seed=313)]
        fields = {"n": 2, "temperature": 0.7, "seed": 3, "max_tokens": 6}
        alone = [await pair.ask(decode, prompt, **fields) for prompt in prompts]
        body = {"model": decode.spec.model, "prompt": prompts, **fields}
        async with session.post(f"{router.url}/v1/completions", json=body) as response:
            assert response.status == 200
            choices = (await response.json())["choices"]
        assert [choice["index"] for choice in choices] == list(range(6))
        assert [choice["text"] for choice in choices] == [text for answer in alone for text in answer.texts]

    run(test, free_within_s=8.0)


def test_errors_and_leaving(run: Runner, engines: Ends, router: RouterProcess) -> None:
    _prefill, decode = engines

    async def test(session: aiohttp.ClientSession) -> None:
        url = f"{router.url}/v1/completions"
        model = decode.spec.model
        async with session.post(url, json={"model": model, "prompt": words(4000, seed=321)}) as response:
            assert response.status == 400  # longer than the model's context
        async with session.post(url, json={"model": "nobody", "prompt": "x"}) as response:
            assert response.status == 404
        async with session.post(url, data=b"{") as response:
            assert response.status == 400
        async with session.get(f"{router.url}/health") as response:
            assert response.status == 200
        for after_s in (0.05, 0.2, 0.5, 1.0):
            request = asyncio.ensure_future(session.post(url, json={"model": model, "prompt": words(500, seed=322)}))
            await asyncio.sleep(after_s)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)

    run(test, free_within_s=20.0)
