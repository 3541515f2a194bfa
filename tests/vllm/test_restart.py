"""Engines that are killed, stopped, continued and restarted: each client has its end, and every block comes back.

Over shared memory, as on one host.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import aiohttp
import pytest
from trio import (
    ANSWERS_S,
    POLICIES,
    Trio,
    blocks_are_held,
    expect_ends,
    expect_right,
    nothing_is_held,
    run,
    still_waits,
    trio_at,
)

from kvpush.bench.soak.link import PREFILL

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    with trio_at(tmp_path_factory.mktemp("restart")) as trio:
        yield trio


@pytest.fixture
def trio(started: Trio) -> Trio:
    started.ensure_up()
    return started


def test_a_stopped_producer_that_goes_on_gives_memory_back(trio: Trio) -> None:
    async def test(session: aiohttp.ClientSession) -> None:
        asked = await trio.begin(session)
        trio.prefill.signal_tree(signal.SIGSTOP)
        stopped_s = time.monotonic()
        await expect_ends(asked, "fail", stopped_s)
        # It may still write: neither may anybody else have the memory, nor may D compute in it.
        await blocks_are_held(session, trio.decodes, within_s=10.0)
        await still_waits(asked, "recompute")
        trio.prefill.signal_tree(signal.SIGCONT)
        await expect_right(asked, "recompute", within_s=ANSWERS_S)
        await nothing_is_held(session, [trio.prefill, *trio.decodes], within_s=15.0)
        for policy in POLICIES:
            await trio.works(session, policy)

    run(test)


def test_a_stopped_producer_that_is_killed_gives_memory_back_and_its_successor_serves(trio: Trio) -> None:
    async def test(session: aiohttp.ClientSession) -> None:
        before = [engine.pid for engine in trio.decodes]
        asked = await trio.begin(session)
        trio.prefill.signal_tree(signal.SIGSTOP)
        await expect_ends(asked, "fail", time.monotonic())
        await still_waits(asked, "recompute")
        trio.kill(PREFILL)
        await expect_right(asked, "recompute", within_s=ANSWERS_S)
        await nothing_is_held(session, trio.decodes, within_s=10.0)
        trio.restart(PREFILL)
        for policy in POLICIES:
            await trio.works(session, policy)
        assert [engine.pid for engine in trio.decodes] == before

    run(test)


def test_a_consumer_that_is_killed_costs_p_nothing_and_its_successor_is_served(trio: Trio) -> None:
    async def test(session: aiohttp.ClientSession) -> None:
        before = trio.prefill.pid
        asked = await trio.begin(session)
        trio.kill("fail")
        for one in asked:
            if one.policy == "fail":
                with pytest.raises(aiohttp.ClientError):
                    await one.answer
        await expect_right(asked, "recompute", within_s=ANSWERS_S)  # the other one has its KV
        # Well before the bounds of a producer that does not notice: its writes, or its pings, fail at once.
        await nothing_is_held(session, [trio.prefill, trio.engines["recompute"]], within_s=15.0)
        trio.restart("fail")
        for policy in POLICIES:
            await trio.works(session, policy)
        assert trio.prefill.pid == before

    run(test)


def test_a_killed_producer_leaves_each_client_an_answer_or_an_error(trio: Trio) -> None:
    async def test(session: aiohttp.ClientSession) -> None:
        asked = await trio.begin(session)
        trio.kill(PREFILL)
        killed_s = time.monotonic()
        for policy in POLICIES:
            await expect_ends(asked, policy, killed_s)
        await nothing_is_held(session, trio.decodes, within_s=5.0)

    run(test)
