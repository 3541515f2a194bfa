"""Legs that do not fit, do not come, or leave: an answer or an error within the bounds, and every block comes back."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from pair import BOUNDS, Pair, metrics
from test_push import words

from kvpush.launch import Engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

Ends = tuple[Engine, Engine]
Runner = Callable[..., None]


def test_two_prompts_under_one_transfer_are_refused(run: Runner, engines: Ends) -> None:
    prefill, decode = engines

    async def test(session: aiohttp.ClientSession) -> None:
        pair = Pair(session, prefill, decode)
        before = await metrics(session, decode)
        for mine, theirs, fields in (
            (words(90, seed=61), words(90, seed=62), {}),
            (words(90, seed=63), words(90, seed=63), {"cache_salt": "another tenant"}),
        ):
            transfer_id = uuid.uuid4().hex
            answers = await asyncio.gather(
                pair.prefill_leg(theirs, transfer_id), pair.decode_leg(mine, transfer_id, **fields)
            )
            assert answers[0].status == 200
            assert answers[1].status == 500  # vLLM's answer to a failed load; never a text
        after = await metrics(session, decode)
        refused = "kvpush_loads_failed_total{prompt_mismatch}"
        assert after[refused] - before.get(refused, 0) == 2

    # P keeps its half until the unclaimed timeout: the right consumer might still come.
    run(test, free_within_s=BOUNDS["unclaimed_timeout_s"] + 5)


def test_decode_leg_without_prefill_leg(run: Runner, engines: Ends) -> None:
    prefill, decode = engines

    async def test(session: aiohttp.ClientSession) -> None:
        pair = Pair(session, prefill, decode)
        started_s = time.monotonic()
        answer = await pair.decode_leg(words(90, seed=71), uuid.uuid4().hex)
        assert answer.status == 500
        assert time.monotonic() - started_s < BOUNDS["rendezvous_timeout_s"] + 5

    run(test, free_within_s=3.0)


def test_prefill_leg_without_decode_leg(run: Runner, engines: Ends) -> None:
    prefill, decode = engines

    async def test(session: aiohttp.ClientSession) -> None:
        answer = await Pair(session, prefill, decode).prefill_leg(words(90, seed=72), uuid.uuid4().hex)
        assert answer.status == 200

    run(test, free_within_s=BOUNDS["unclaimed_timeout_s"] + 4)


def test_wrong_address_and_wrong_engine(run: Runner, engines: Ends) -> None:
    prefill, decode = engines

    async def test(session: aiohttp.ClientSession) -> None:
        pair = Pair(session, prefill, decode)
        good = pair.decode_params("x")
        for change in (
            {"remote_port": 1},  # nobody listens
            {"remote_host": "8.8.8.8"},  # not on the allow list
            {"remote_engine_id": "somebody-else"},
            {"remote_port": decode.spec.side_channel_port},  # itself
        ):
            params = {**good, "transfer_id": uuid.uuid4().hex, **change}
            answer = await pair.ask(decode, words(90, seed=73), kv_transfer_params=params)
            assert answer.status == 500, change
        # and afterwards it works
        prompt = words(90, seed=74)
        alone = await pair.ask(decode, prompt)
        assert (await pair.both(prompt))[1].text == alone.text

    run(test, free_within_s=5.0)


@pytest.mark.parametrize("leg", ["do_remote_prefill", "do_remote_decode"])
def test_malformed_parameters_mean_local_prefill(run: Runner, engines: Ends, leg: str) -> None:
    prefill, decode = engines

    async def test(session: aiohttp.ClientSession) -> None:
        pair = Pair(session, prefill, decode)
        prompt = words(60, seed=81)
        alone = await pair.ask(decode, prompt)
        good: dict[str, Any] = {leg: True, "transfer_id": "t", "remote_host": "127.0.0.1", "remote_port": 1234}
        bad: list[dict[str, Any]] = [
            {"transfer_id": 5},
            {"transfer_id": "x" * 100_000},
            {"transfer_id": ""},
            {"kvpush_consumers": 0},
            {"kvpush_consumers": "many"},
            {"transfer_mode": "pull"},
            {"do_remote_prefill": True, "do_remote_decode": True},
            {leg: "yes"},
        ]
        if leg == "do_remote_prefill":
            bad += [{"remote_host": None}, {"remote_host": 7}, {"remote_port": 0}, {"remote_port": "80"}]
        for change in bad:
            answer = await pair.ask(decode, prompt, kv_transfer_params={**good, **change})
            assert answer.text == alone.text, change
        answer = await pair.ask(decode, prompt, kv_transfer_params=["no", "map"])
        assert answer.status == 400

    run(test, free_within_s=5.0)


def test_clients_that_leave(run: Runner, ends: Ends) -> None:
    """Aborts at D while it waits, at P while it computes, and of both; phantoms follow each of them."""
    prefill, decode = ends

    async def test(session: aiohttp.ClientSession) -> None:
        pair = Pair(session, prefill, decode)

        async def leave(leg: Any, after_s: float) -> None:
            task = asyncio.ensure_future(leg)
            await asyncio.sleep(after_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        for i in range(9):
            prompt, transfer_id = words(400, seed=900 + i), uuid.uuid4().hex
            first, second = pair.prefill_leg(prompt, transfer_id), pair.decode_leg(prompt, transfer_id)
            away_s = 0.1 + 0.12 * (i // 3)
            if i % 3 == 0:
                await asyncio.gather(first, leave(second, away_s))
            elif i % 3 == 1:
                _, answer = await asyncio.gather(leave(first, away_s), second)
                assert answer.status in (200, 500)
            else:
                await asyncio.gather(leave(first, away_s), leave(second, away_s))
        prompt = words(100, seed=950)
        alone = await pair.ask(decode, prompt, cache_salt="alone")
        assert (await pair.both(prompt))[1].text == alone.text

    run(test, free_within_s=BOUNDS["unclaimed_timeout_s"] + BOUNDS["rendezvous_timeout_s"] + 10)


def test_transfer_id_twice(run: Runner, engines: Ends) -> None:
    """Two live requests under one id: the first is unharmed, the second fails; afterwards the id is usable again."""
    prefill, decode = engines

    async def test(session: aiohttp.ClientSession) -> None:
        pair = Pair(session, prefill, decode)
        prompt, transfer_id = words(120, seed=91), uuid.uuid4().hex
        alone = await pair.ask(decode, prompt, cache_salt="alone")
        first = asyncio.ensure_future(pair.decode_leg(prompt, transfer_id))
        await asyncio.sleep(0.5)
        second = asyncio.ensure_future(pair.decode_leg(prompt, transfer_id))
        await asyncio.sleep(0.5)
        await pair.prefill_leg(prompt, transfer_id)
        answers = await asyncio.gather(first, second)
        assert answers[0].text == alone.text
        assert answers[1].status == 500
        again = await asyncio.gather(pair.prefill_leg(prompt, transfer_id), pair.decode_leg(prompt, transfer_id))
        assert again[1].text == alone.text

    run(test, free_within_s=20.0)
