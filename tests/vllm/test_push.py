"""What a pair answers is what one engine answers, token for token, whatever the prompt and whoever comes first."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable

import aiohttp
import pytest
from pair import Pair, metrics

from kvpush.launch import Engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]

Ends = tuple[Engine, Engine]
Runner = Callable[..., None]
BLOCK = 32

# Around block borders (32), around a chunk border (512), and some long ones: 50 in all.
# fmt: off
LENGTHS = [
    1, 2, 3, 5, 8, 16, 24, 31, 32, 33, 34, 40, 47, 55, 63, 64, 65, 66, 70, 75, 80, 85, 90, 95, 96, 97, 100, 103, 106,
    109, 112, 115, 118, 121, 124, 126, 127, 128, 129, 135, 145, 159, 160, 161, 191, 193, 257, 511, 513, 2000,
]
# fmt: on
TEXT = (
    "the river carried small boats past the old town where people sold bread and told stories about winter while "
    "children counted stones and nobody asked why the clock above the bridge had stopped at noon many years ago"
)
WORDS = TEXT.split()


def tokens(length: int, seed: int) -> list[int]:
    """A prompt of exactly so many tokens, different for each seed."""
    rng = random.Random(seed)
    return [rng.randrange(100, 40_000) for _ in range(length)]


def words(count: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(count))


def test_fifty_prompts_of_every_length(run: Runner, ends: Ends) -> None:
    assert len(LENGTHS) == 50
    prefill, decode = ends

    async def test(session: aiohttp.ClientSession) -> None:
        pair = Pair(session, prefill, decode)
        before = await metrics(session, prefill)
        limit = asyncio.Semaphore(4)

        async def one(length: int) -> tuple[int, str, str]:
            prompt = tokens(length, seed=length)
            async with limit:
                # Another salt keeps the reference out of the cache that the pair's request looks into.
                alone = await pair.ask(decode, prompt, max_tokens=5, cache_salt=f"alone-{uuid.uuid4().hex}")
                answer = (await pair.both(prompt, max_tokens=5))[1]
            return length, alone.text, answer.text

        results = await asyncio.gather(*(one(length) for length in LENGTHS))
        wrong = [(length, alone, pushed) for length, alone, pushed in results if alone != pushed]
        assert wrong == []
        after = await metrics(session, prefill)
        committed = "kvpush_sends_total{committed}"
        # Prompts of up to one block are computed at D: less than a transfer is worth.
        pushed = sum(length > BLOCK for length in LENGTHS)
        assert after[committed] - before.get(committed, 0) == pushed
        assert after["kvpush_bytes_written_total"] > before.get("kvpush_bytes_written_total", 0)

    run(test)


def test_sixteen_at_once(run: Runner, ends: Ends) -> None:
    prefill, decode = ends

    async def test(session: aiohttp.ClientSession) -> None:
        pair = Pair(session, prefill, decode)
        prompts = [words(60 + 9 * i, seed=1000 + i) for i in range(16)]
        alone = [await pair.ask(decode, prompt, cache_salt="alone") for prompt in prompts]
        pushed = await asyncio.gather(*(pair.both(prompt) for prompt in prompts))
        assert [answer.text for _, answer in pushed] == [answer.text for answer in alone]

    run(test)


@pytest.mark.parametrize("late", ["prefill", "decode"])
def test_either_leg_may_come_first(run: Runner, ends: Ends, late: str) -> None:
    prefill, decode = ends

    async def test(session: aiohttp.ClientSession) -> None:
        pair = Pair(session, prefill, decode)
        prompt = words(150, seed=7 if late == "prefill" else 8)
        alone = await pair.ask(decode, prompt, cache_salt="alone")
        delay = {"prefill_after_s": 1.5} if late == "prefill" else {"decode_after_s": 2.5}
        _, answer = await pair.both(prompt, **delay)
        assert answer.text == alone.text

    run(test)


def test_partial_prefix_hit_moves_the_rest_only(run: Runner, engines: Ends) -> None:
    decode, prefill = engines  # the caching engine decodes

    async def test(session: aiohttp.ClientSession) -> None:
        pair = Pair(session, prefill, decode)
        shared = tokens(4 * BLOCK, seed=21)
        whole = shared + tokens(3 * BLOCK + 5, seed=22)
        alone = await pair.ask(prefill, whole)
        await pair.ask(decode, [*shared, 11, 12, 13])  # fills D's cache with the first four blocks
        before = await metrics(session, decode)
        _, answer = await pair.both(whole)
        after = await metrics(session, decode)
        assert answer.text == alone.text
        blocks = 4  # three whole ones and the one with five tokens
        moved = after["kvpush_bytes_received_total"] - before.get("kvpush_bytes_received_total", 0)
        assert moved == blocks * BLOCK * 46_080  # 30 layers x 3 heads x 2 x 64 x 4 bytes
        assert after["kvpush_integrity_total{ok}"] > before.get("kvpush_integrity_total{ok}", 0)

    run(test)


def test_full_prefix_hit_moves_nothing_and_frees_p(run: Runner, engines: Ends) -> None:
    decode, prefill = engines

    async def test(session: aiohttp.ClientSession) -> None:
        pair = Pair(session, prefill, decode)
        prompt = tokens(5 * BLOCK + 3, seed=31)
        alone = await pair.ask(decode, prompt)  # and fills D's cache
        before = await metrics(session, prefill)
        _, answer = await pair.both(prompt)
        assert answer.text == alone.text
        after = await metrics(session, prefill)
        assert after.get("kvpush_bytes_written_total", 0) == before.get("kvpush_bytes_written_total", 0)

    run(test, free_within_s=3.0)  # well before the unclaimed timeout


def test_three_samples_are_prefilled_once(run: Runner, ends: Ends) -> None:
    prefill, decode = ends

    async def test(session: aiohttp.ClientSession) -> None:
        pair = Pair(session, prefill, decode)
        prompt = words(120, seed=41)
        fields = {"n": 3, "temperature": 0.8, "seed": 5}
        alone = await pair.ask(decode, prompt, cache_salt="alone", **fields)
        before = await metrics(session, prefill)
        _, answer = await pair.both(prompt, consumers=3, **fields)
        assert answer.texts == alone.texts
        after = await metrics(session, prefill)
        assert after["vllm:request_success_total"] - before["vllm:request_success_total"] == 1

    run(test, free_within_s=4.0)


def test_parameters_of_the_decode_leg(run: Runner, engines: Ends) -> None:
    prefill, decode = engines

    async def test(session: aiohttp.ClientSession) -> None:
        pair = Pair(session, prefill, decode)
        prompt = words(90, seed=51)
        for fields in (
            {"max_tokens": 1},
            {"max_tokens": 12, "stop": [" the", "."]},
            {"max_tokens": 12, "min_tokens": 12},
            {"max_tokens": 6, "logprobs": 2},
            {"max_tokens": 8, "temperature": 0.9, "seed": 17},
        ):
            alone = await pair.ask(decode, prompt, **fields)
            _, answer = await pair.both(prompt, **fields)
            assert answer.text == alone.text, fields
            assert answer.body["choices"][0]["finish_reason"] == alone.body["choices"][0]["finish_reason"]

    run(test)
