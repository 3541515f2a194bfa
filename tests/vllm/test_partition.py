"""The network between P and D is cut, HTTP is not: each client has its end, and memory waits for proof."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator

import aiohttp
import pytest
from trio import (
    ANSWERS_S,
    GRACE_S,
    PEER_TIMEOUT_S,
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

from kvpush.bench.soak.link import PREFILL, Link, why_not

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def link() -> Iterator[Link]:
    reason = why_not()
    if reason:
        pytest.skip(f"the link between the engines cannot be cut: {reason}")
    with Link() as made:
        yield made


@pytest.fixture(scope="module")
def started(link: Link, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    with trio_at(tmp_path_factory.mktemp("partition"), link) as trio:
        yield trio


@pytest.fixture
def trio(started: Trio, link: Link) -> Trio:
    link.mend()
    started.ensure_up()
    return started


def test_a_cut_that_is_mended(trio: Trio, link: Link) -> None:
    async def test(session: aiohttp.ClientSession) -> None:
        for policy in POLICIES:
            await trio.works(session, policy)  # over the link, before anything happens to it
        asked = await trio.begin(session)
        link.cut()
        await expect_ends(asked, "fail", time.monotonic())
        await still_waits(asked, "recompute")
        await blocks_are_held(session, trio.decodes, within_s=PEER_TIMEOUT_S + 5.0)
        # Both sides serve their own clients; a new hand-over fails in time.
        for engine in (trio.prefill, *trio.decodes):
            assert (await trio.pair(session, "fail").ask(engine, [1, 2, 3])).status == 200
        began_s = time.monotonic()
        prompt, salt = (await trio.references(session))[0].prompt, uuid.uuid4().hex
        lone = await trio.pair(session, "fail").decode_leg(prompt, salt, cache_salt=salt)
        assert lone.status == 500
        assert time.monotonic() - began_s < PEER_TIMEOUT_S + GRACE_S
        link.mend()
        await expect_right(asked, "recompute", within_s=ANSWERS_S)
        await nothing_is_held(session, [trio.prefill, *trio.decodes], within_s=30.0)
        for policy in POLICIES:
            await trio.works(session, policy)

    run(test)


def test_a_producer_that_dies_behind_a_cut(trio: Trio, link: Link) -> None:
    async def test(session: aiohttp.ClientSession) -> None:
        asked = await trio.begin(session)
        link.cut()
        await expect_ends(asked, "fail", time.monotonic())
        await still_waits(asked, "recompute")
        trio.kill(PREFILL)
        await asyncio.sleep(3.0)
        # Its process is gone, as D can see on its own host; but P's kernel would still send what it had been handed.
        await still_waits(asked, "recompute")
        link.mend()
        await expect_right(asked, "recompute", within_s=ANSWERS_S)
        await nothing_is_held(session, trio.decodes, within_s=15.0)

    run(test)
