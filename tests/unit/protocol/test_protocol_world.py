"""Thousands of small worlds in virtual time, each drawn from one seed: no rule of the protocol breaks in any of them.

A failure names its world; `World(seed, traced=True).run()` replays it, and `trace` holds what happened.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_world import World

from kvpush.protocol import actions as act
from kvpush.protocol.consumer import Consumer
from kvpush.protocol.producer import Producer
from kvpush.protocol.receive import Receive
from kvpush.protocol.send import Send
from kvpush.protocol.tombstones import Tombstones

pytestmark = pytest.mark.unit

NUM_WORLDS = int(os.environ.get("KVPUSH_WORLDS", "2000"))
CHUNKS = 5
SEEN: Counter[str] = Counter()


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_world_breaks_a_rule(chunk: int) -> None:
    for seed in range(chunk, NUM_WORLDS, CHUNKS):
        world = World(seed)
        world.run()
        SEEN.update(world.seen)


def test_the_worlds_have_seen_everything() -> None:
    """Rules that are never tested are not kept: every kind of end must have happened in some world."""
    if not SEEN:
        pytest.skip("no world has run in this process")
    wanted = {
        "received", "released", "failed", "sent", "quarantined", "gone", "verified", "poisoned", "read after free",
        "failed peer_lost", "failed peer_restarted", "failed write_failed", "failed post_failed", "failed poisoned",
        "failed no_request", "failed prompt_mismatch", "failed duplicate", "failed aborted", "failed not_scheduled",
        "failed disconnected", "send cancelled", "send committed", "send write_timeout", "unclaimed", "pressure",
        "dropped",
    }  # fmt: skip
    assert wanted - set(SEEN) == set()


@given(st.integers(0, 2**64), st.integers(1, 120))
@settings(max_examples=40, deadline=None)
def test_worlds_from_anywhere(seed: int, steps: int) -> None:
    World(seed).run(steps)


def test_a_world_can_be_replayed() -> None:
    first, second = World(7, traced=True), World(7, traced=True)
    first.run()
    second.run()
    assert first.trace == second.trace
    assert len(first.trace) > 100
    assert World(8).sources != first.sources


# The judge is judged: machines with a defect must be found out.


def broken_worlds(limit: int = 400) -> str:
    """Runs worlds until one breaks a rule; returns what was broken, or "" if none was."""
    for seed in range(limit):
        try:
            World(seed).run()
        except AssertionError as error:
            return str(error)
    return ""


def test_memory_that_is_released_under_a_write_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Receive, "may_write", property(lambda receive: {}))
    assert "in flight to it" in broken_worlds()


def test_a_commit_before_everything_has_landed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Producer.on_written

    def hasty(self: Producer, key: object, piece: int, *rest: object) -> list[act.Action]:
        send = self.send(key)  # type: ignore[arg-type]
        assert send is not None
        kept = {number: at for number, at in send.pieces.items() if number != piece}
        send.pieces = {piece: send.pieces[piece]}  # the others are forgotten
        actions = take(self, key, piece, *rest)  # type: ignore[arg-type]
        send.pieces.update(kept)
        return actions

    monkeypatch.setattr(Producer, "on_written", hasty)
    assert broken_worlds()


def test_blocks_that_are_given_back_while_they_are_read_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Send, "reads_blocks", property(lambda send: False))
    assert broken_worlds()


def test_forgotten_ends_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tombstones, "covers", lambda self, key, agent, attempt: False)
    assert broken_worlds()


def test_a_consumer_that_never_gives_up_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Consumer, "_silent", lambda self, receive, now_s: False)
    monkeypatch.setattr(Receive, "all_accepted", property(lambda receive: True))
    assert "idle" in broken_worlds()


def test_a_second_report_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    on_message = Consumer.on_message

    def stammer(self: Consumer, *values: object) -> list[act.Action]:
        actions = on_message(self, *values)  # type: ignore[arg-type]
        return [*actions, *(action for action in actions if isinstance(action, act.ReportReceived))]

    monkeypatch.setattr(Consumer, "on_message", stammer)
    assert "reported received twice" in broken_worlds()
