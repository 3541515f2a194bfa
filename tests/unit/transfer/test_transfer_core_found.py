"""What the simulator has found in the transfer core (docs/simulator.md), each as small as it can be told."""

from __future__ import annotations

import pytest
from transfer_world import TIMING, Faults, World

pytestmark = pytest.mark.unit


@pytest.mark.paths("direct")
def test_a_registration_that_leaves_in_the_round_that_gives_it_up_is_cancelled() -> None:
    """D is stopped while its registration waits for P's first sign of life. When it goes on, the same round finds that
    sign, lets the registration leave, and finds P silent for too long. Its memory was free then, and P wrote to it."""
    world = World("P", "D", faults=Faults(message_delay_s=(0.01, 0.01), write_delay_s=(0.3, 0.3), bytes_per_s=1e12))
    sent = world.offer("P", "t", 16)
    world.prefill("P", sent, 16)
    world.finish("P", sent)
    received = world.fetch("D", "t", 16)
    world.until(lambda: world["D"].core.counters.get("messages_sent", "ping") > 0, 1, step_s=0.0001)
    world.run(0.015)  # P has answered, and the answer is on its way
    world.fabric.stop("D-0")
    world.run(1.5 * TIMING.peer_timeout_s, step_s=0.01)
    world.fabric.resume("D-0")
    world.until(lambda: bool(received.ended), 1, step_s=0.002)
    assert received.ended == ["LoadFailed"], "memory that P may write was given back"
    world.until(lambda: received.ended == ["LoadFailed", "Released"], 5, step_s=0.005)
    world.run(2 * TIMING.unclaimed_timeout_s, step_s=0.01)
    world.check_idle()
