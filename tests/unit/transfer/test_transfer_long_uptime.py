"""Weeks of work in a row: 10,000 transfers, the connection dropped every 500, and nothing piles up."""

from __future__ import annotations

import gc
import logging
from collections import Counter

import pytest
from transfer_world import TIMING, Request, World

pytestmark = [pytest.mark.unit, pytest.mark.timeout(600)]

NUM_TRANSFERS, DROP_EVERY, AT_ONCE, NUM_TOKENS = 10_000, 500, 20, 8


class Uptime:
    """One P, one D, and twenty transfers at a time; the world compares every received byte."""

    def __init__(self) -> None:
        self.world = World("P", "D", num_blocks=128)
        self.started = self.received = self.failed = self.drops = 0

    def transfer(self, count: int, *, drop: bool = False) -> None:
        """So many at once, D's leg first in every other one; drop: cuts the link while they are under way."""
        world, pairs = self.world, []
        for _ in range(count):
            name, self.started = f"t{self.started}", self.started + 1
            legs: dict[str, Request] = {}
            for host in "PD" if self.started % 2 else "DP":
                leg = world.offer(host, name, NUM_TOKENS) if host == "P" else world.fetch(host, name, NUM_TOKENS)
                legs[host] = leg
            pairs.append((legs["P"], legs["D"]))
        if drop:
            world.run(0.0015 * (self.drops % 3))
            self._drop()
        for sent, _ in pairs:
            world.prefill("P", sent, NUM_TOKENS)
            world.finish("P", sent)
        ends = (["Received"], ["LoadFailed", "Released"])
        world.until(lambda: all(s.ended and r.ended in ends for s, r in pairs), 20, step_s=0.05 if drop else 0.001)
        self.received += sum(received.ended == ["Received"] for _, received in pairs)
        self.failed += sum(received.ended != ["Received"] for _, received in pairs)
        for _, received in pairs:
            if received.blocks is not None:
                world["D"].give_back(received)  # it has been decoded
        for host in "PD":
            world[host].requests.clear()

    def _drop(self) -> None:
        self.drops += 1
        self.world.fabric.cut("P-0", "D-0")
        self.world.run(0.06)  # both have noticed
        self.world.fabric.heal("P-0", "D-0")

    def until(self, total: int) -> None:
        while self.started < total:
            if self.started % DROP_EVERY == 0 and self.started:
                self.transfer(1, drop=True)
                self.transfer(AT_ONCE - 1)
            else:
                self.transfer(AT_ONCE)

    def rest(self) -> Counter[str]:
        """What is alive when all has ended and tombstones have expired: type -> number of objects."""
        self.world.run(TIMING.tombstone_s + 1, step_s=0.1)
        self.world.check_idle()
        gc.collect()
        return Counter(type(thing).__name__ for thing in gc.get_objects())


@pytest.mark.paths("direct", "staged")
def test_long_uptime() -> None:
    logging.getLogger("kvpush").setLevel(logging.CRITICAL + 1)  # pytest keeps what is logged
    try:
        _long_uptime()
    finally:
        logging.getLogger("kvpush").setLevel(logging.NOTSET)


def _long_uptime() -> None:
    uptime = Uptime()
    uptime.until(2_000)
    early = uptime.rest()
    uptime.until(NUM_TRANSFERS)
    late = uptime.rest()
    assert uptime.started == uptime.received + uptime.failed == NUM_TRANSFERS
    assert uptime.drops == NUM_TRANSFERS // DROP_EVERY - 1
    assert uptime.received >= NUM_TRANSFERS - uptime.drops  # all but those in flight when a connection dropped
    for host in "PD":
        assert uptime.world[host].core.counters.total("disconnects") >= uptime.drops
        assert len(uptime.world[host].free) == 127
    for name in ("ReferenceType", "builtin_function_or_method"):
        # The caches of isinstance() with abstract classes: one pair for each class that was asked for.
        assert late[name] < early[name] + 500
        del early[name], late[name]
    grown = {name: n - early[name] for name, n in late.items() if n > early[name] + 50}
    assert grown == {}
    assert sum(late.values()) < sum(early.values()) + 200
