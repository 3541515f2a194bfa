"""Thousands of deployments in virtual time, each drawn from one seed: no rule breaks in any of them.

A failure names its world: `make sim SEED=...` tells its story. KVPUSH_SIM_WORLDS sets how many are run.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_cases import make_half, run_batch

from kvpush.sim.driver import Driver
from kvpush.sim.runs import Outcome, story

pytestmark = pytest.mark.unit

NUM_WORLDS = int(os.environ.get("KVPUSH_SIM_WORLDS", "3000"))
BATCH = 50
WANTED = {
    "Received", "LoadFailed", "Released", "Sent", "surely received", "preempted", "poisoned", "read after free",
    "stopped at a post", "failed aborted", "failed disconnected", "failed duplicate", "failed handshake unreachable",
    "failed handshake wrong_engine", "failed no_request", "failed not_scheduled", "failed peer_lost",
    "failed peer_restarted", "failed poisoned", "failed post_failed", "failed pressure", "failed prompt_mismatch",
    "failed unclaimed", "failed write_failed", "failed write_lost",
}  # fmt: skip


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """Batches over all processors; new processes, because forking one with threads may hang."""
    total = Outcome()
    starts = range(0, NUM_WORLDS, BATCH)
    counts = [min(BATCH, NUM_WORLDS - start) for start in starts]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for batch in pool.map(run_batch, starts, counts):
            total.add(batch)
    return total


@pytest.mark.timeout(600)
def test_no_world_breaks_a_rule(outcome: Outcome) -> None:
    assert outcome.num_worlds == NUM_WORLDS
    if outcome.broken:
        seed = min(outcome.broken)
        pytest.fail(f"{len(outcome.broken)} of {NUM_WORLDS} worlds broke a rule\n{story(seed, make_half)}")


def test_the_worlds_have_seen_everything(outcome: Outcome) -> None:
    """Rules that are never tested are not kept: every kind of end must have happened in some world."""
    if NUM_WORLDS < 2000:
        pytest.skip("too few worlds to see everything")
    assert WANTED - set(outcome.seen) == set()


@given(st.integers(0, 2**64))
@settings(max_examples=100, deadline=None)
def test_worlds_from_anywhere(seed: int) -> None:
    Driver(seed, make_half).run()


def test_a_world_can_be_replayed() -> None:
    first, second = story(5, make_half, 10_000), story(5, make_half, 10_000)
    assert first == second
    assert first.endswith("every rule was kept")
    assert len(first.splitlines()) > 10
    assert story(6, make_half, 10_000) != first
