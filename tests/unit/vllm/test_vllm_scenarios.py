"""Kinds of fault that users of KV connectors have met (docs/reliability.md), between engines that act as vLLM's do.

The fabric checks into whose blocks bytes land, the model runner what it decodes from, and `FakePair.end` that nothing
is left and every text is right.
"""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import TIMING
from fake_pair import DELIVERED, FakePair, prompt
from fake_scheduler import Request, Status

from kvpush.transport.memory import Faults

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("no_side_channel")]

SLOW = Faults(write_delay_s=(0.3, 0.3), bytes_per_s=1e12, pieces=8)
both_policies = pytest.mark.parametrize("policy", ["fail", "recompute"])


def failed_as_wished(request: Request, policy: str) -> bool:
    """An error under policy fail, the right text under recompute (`FakePair.end` compares it)."""
    return request.status is (Status.FINISHED_ERROR if policy == "fail" else DELIVERED)


def writing(pair: FakePair, num_tokens: int = 16) -> tuple[Request, Request]:
    """A transfer of which a part has landed."""
    landed: list[int] = []
    check = pair.world.fabric.on_land
    assert check is not None

    def watch(writer: str, target: str, address: int, length: int) -> None:
        landed.append(length)
        check(writer, target, address, length)

    pair.world.fabric.on_land = watch
    sent, received = pair.both("t", prompt(num_tokens))
    pair.until(lambda: bool(landed), 2)
    return sent, received


@both_policies
def test_stale_reference(policy: str) -> None:
    """Unknown to P, used up, and computed long ago with blocks that other prompts have had since."""
    pair = FakePair(policy=policy, prefix_caching=False, p={"num_blocks": 12})
    pair.both("used", prompt(16, 1))
    pair.end()
    pair.prefill("expired", prompt(16, 2))
    pair.run(TIMING.unclaimed_timeout_s + 1, 0.05)
    for which in range(3, 6):
        pair.alone(pair.p, prompt(40, which))  # takes every block of P in turn
        pair.end()
    bad = [pair.load("unknown", prompt(16, 0)), pair.load("used", prompt(16, 1)), pair.load("expired", prompt(16, 2))]
    pair.load("expired", prompt(16, 9))  # and for another prompt
    took_s = pair.until(lambda: all(request.finished for request in pair.requests), 10, 0.01)
    assert took_s < TIMING.rendezvous_timeout_s + 1
    assert all(failed_as_wished(request, policy) for request in bad)
    assert pair.count(pair.d, "receives") == 1
    failures = {label: n for (name, label), n in pair.d.ranks[0].core.counters._total.items() if name == "loads_failed"}
    assert sum(failures.values()) == 4
    assert set(failures) <= {"no_request", "unclaimed", "duplicate"}
    pair.end()


@both_policies
@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "silent"])
def test_transport_dies(policy: str, noticed: bool) -> None:
    pair = FakePair(faults=SLOW, policy=policy)
    _, received = writing(pair)
    pair.world.fabric.cut("P-0-0", "D-0-0", noticed_by_writers=noticed)
    failed = pair.d.ranks[0].core.counters
    took_s = pair.until(lambda: failed.total("loads_failed") > 0, 10, 0.01)
    assert took_s < TIMING.peer_timeout_s + TIMING.ping_interval_s + 1
    pair.run(0.5)
    if policy == "fail":
        assert received.status is Status.FINISHED_ERROR  # long before its memory comes back
    pair.world.fabric.heal("P-0-0", "D-0-0")
    pair.until(lambda: received.finished, 10)
    assert failed_as_wished(received, policy)
    pair.end()
    _, again = pair.both("again", prompt(16, 1))
    pair.end()
    assert again.status is DELIVERED
    assert pair.count(pair.d, "receives") == 1


@both_policies
def test_post_fails_on_one_rank(policy: str) -> None:
    """The write of the sound rank is awaited before anything of D's memory is given back (the fabric would object)."""
    pair = FakePair(faults=SLOW, policy=policy, tp_size=2)
    pair.world.fabric.set_faults(Faults(fail_post=1.0), "P-0-1", "D-0-1")
    _, received = pair.both("t", prompt(16))
    pair.until(lambda: pair.p.ranks[1].core.counters.total("writes_refused") > 0, 2)
    assert pair.p.ranks[0].transport.in_flight == 1
    took_s = pair.until(lambda: received.finished, 5)
    assert took_s < 2
    assert failed_as_wished(received, policy)
    pair.end()


@both_policies
def test_sibling_in_flight(policy: str) -> None:
    """Of two writes of one load the first fails while the second is still writing; its blocks are wanted meanwhile."""
    pair = FakePair(policy=policy, chunk=8, d={"num_blocks": 6}, prefix_caching=False)
    fabric = pair.world.fabric
    fabric.set_faults(Faults(write_delay_s=(0.3, 0.3), bytes_per_s=1e12, fail_write=1.0), "P-0-0")
    received = pair.load("t", prompt(16))
    pair.run(0.05)
    sent = pair.prefill("t", prompt(16))
    pair.until(lambda: pair.p.ranks[0].transport.in_flight == 1, 1)
    fabric.set_faults(Faults(write_delay_s=(1.0, 1.0), bytes_per_s=1e12, pieces=8), "P-0-0")
    pair.until(lambda: pair.p.ranks[0].transport.in_flight == 2, 1)
    other = pair.alone(pair.d, prompt(16, 1))
    pair.until(lambda: pair.count(pair.p, "writes_failed") == 1, 1)
    pair.run(0.1)
    assert pair.p.ranks[0].transport.in_flight == 1
    assert not other.blocks  # not while the sibling writes
    pair.until(lambda: other.finished, 5)
    assert other.status is DELIVERED
    assert pair.count(pair.p, "writes") == 1
    pair.end()
    assert sent.status is DELIVERED
    assert failed_as_wished(received, policy)


def test_abort_reuse() -> None:
    """A load is aborted while P writes; another request gets the blocks only when nothing can land any more."""
    pair = FakePair(faults=SLOW, d={"num_blocks": 6})
    _, received = writing(pair)
    pair.d.abort(received)
    other = pair.alone(pair.d, prompt(16, 1))
    while pair.p.ranks[0].transport.in_flight:
        assert not other.blocks
        pair.run(0.002)
    pair.end()
    assert other.status is DELIVERED


def test_stopped_consumer() -> None:
    """D stops while it is written to, and P's other requests need the source blocks."""
    pair = FakePair(faults=SLOW, p={"num_blocks": 16}, chunk=24, prefix_caching=False)
    received = pair.load("t", prompt(24))
    pair.run(0.05)
    others = [pair.alone(pair.p, prompt(8, which), max_tokens=20) for which in (1, 2)]
    sent = pair.prefill("t", prompt(24), max_tokens=20)  # still decoding when its blocks are taken
    pair.until(lambda: pair.p.ranks[0].transport.in_flight > 0, 2)
    pair.world.fabric.stop("D-0-0")
    took_s = pair.until(lambda: all(request.finished for request in [sent, *others]), 10)
    assert took_s < 1  # P's engine has waited for nobody
    assert sent.preemptions > 0
    assert pair.count(pair.p, "preemptions", "poisoned") > 0
    pair.world.fabric.resume("D-0-0")
    pair.end()
    assert pair.count(pair.d, "receives") == 0
    assert received.status is Status.FINISHED_ERROR


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("shape", ["v1", "v2", "v2-0.26"])
def test_preempted_at_producer(shape: str, overlap: bool) -> None:
    pair = FakePair(shape=shape, overlap=overlap, chunk=4, prefix_caching=False, p={"num_blocks": 12})
    legs = [pair.both(f"t{which}", prompt(36, which)) for which in range(2)]
    pair.end()
    assert sum(sent.preemptions for sent, _ in legs) > 0
    assert [received.status for _, received in legs] == [DELIVERED, DELIVERED]
    assert pair.count(pair.d, "receives") == 2


@both_policies
def test_both_pools_full(policy: str) -> None:
    """P holds what D cannot admit, D holds room for what P cannot admit: one of P's has to go, and all end."""
    pair = FakePair(policy=policy, num_blocks=9, chunk=16)
    held = [pair.prefill(f"p{i}", prompt(16, i)) for i in range(2)]
    pair.run(0.1)
    assert all(request.blocks and request.finished for request in held)
    waiting = [pair.load(f"d{i}", prompt(16, 10 + i)) for i in range(2)]
    pair.run(0.1)
    assert not pair.d.scheduler.pool.can_allocate(1)
    late = [pair.load(f"p{i}", prompt(16, i)) for i in range(2)]
    late += [pair.prefill(f"d{i}", prompt(16, 10 + i)) for i in range(2)]
    took_s = pair.until(lambda: all(request.finished for request in pair.requests), 40, 0.02)
    assert took_s < 10  # two stalls and a rendezvous, not announced_timeout_s
    assert all(request.status is DELIVERED for request in waiting)
    assert all(request.status is DELIVERED for request in [*held, *late[2:]])
    assert all(request.status is DELIVERED or failed_as_wished(request, policy) for request in late[:2])
    pair.end()


@pytest.mark.parametrize("order", [1, -1], ids=["same-order", "reversed"])
def test_consumer_full(order: int) -> None:
    """24 at once; D has room for two, P for five."""
    pair = FakePair(p={"num_blocks": 22}, d={"num_blocks": 10}, chunk=16, prefix_caching=False)
    for which in range(24):
        pair.prefill(f"t{which}", prompt(13, which))
    loads = [pair.load(f"t{which}", prompt(13, which)) for which in list(range(24))[::order]]
    pair.until(lambda: all(request.finished for request in pair.requests), 120, 0.01)
    delivered = sum(load.status is DELIVERED for load in loads)
    assert delivered == 24 if order == 1 else delivered > 0
    assert all(load.status in (DELIVERED, Status.FINISHED_ERROR) for load in loads)
    pair.end()


def test_leases_renew() -> None:
    """128 prompts, one token of each per second: longer than every bound, while both sides live."""
    pair = FakePair(num_blocks=520, chunk=1)
    legs = [pair.both(f"t{which}", prompt(13, which)) for which in range(128)]
    slowest_s = max(TIMING.rendezvous_timeout_s, TIMING.unclaimed_timeout_s, TIMING.admission_timeout_s)
    for _ in range(13):
        pair.p.step()
        pair.frozen = {"P"}
        pair.run(1.0, 0.05)
        pair.frozen = set()
    assert pair.now_s > slowest_s + TIMING.peer_timeout_s
    pair.end()
    assert all(received.status is DELIVERED for _, received in legs)
    assert pair.count(pair.d, "receives") == 128
    assert all(rank.core.counters.total("loads_failed") == 0 for rank in pair.d.ranks)


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cache-on", "cache-off"])
def test_n_samples(prefix_caching: bool) -> None:
    """Eight samples of each prompt, in any order with the prefill; P computes each prompt once and frees at once."""
    pair = FakePair(num_blocks=400, chunk=16, prefix_caching=prefix_caching)
    loads = []
    for which in range(10):
        if which % 2:
            pair.prefill(f"t{which}", prompt(13, which), consumers=8)
        loads += [pair.load(f"t{which}", prompt(13, which), consumers=8) for _ in range(8)]
        if not which % 2:
            pair.prefill(f"t{which}", prompt(13, which), consumers=8)
    took_s = pair.until(lambda: all(request.freed for request in pair.requests), 10)
    assert took_s < 1
    assert all(load.status is DELIVERED for load in loads)
    assert pair.count(pair.d, "receives") == (10 if prefix_caching else 80)
    pair.end()


def test_abort_while_waiting() -> None:
    """100 clients leave while D waits: before P has the request, while it computes, and before D has admitted it."""
    pair = FakePair(num_blocks=40, chunk=4)
    for which in range(100):
        load = pair.load(f"t{which}", prompt(13, which))
        if which % 3:
            pair.run(0.01)
        if which % 3 == 2:
            pair.prefill(f"t{which}", prompt(13, which))
            pair.run(0.004)
        pair.d.abort(load)
        phantom = pair.load(f"t{which}", [0], max_tokens=1)
        pair.d.abort(phantom)
    pair.end()
    _, received = pair.both("after", prompt(13, 200))
    pair.end()
    assert received.status is DELIVERED


@both_policies
def test_abort_at_producer(policy: str) -> None:
    pair = FakePair(policy=policy, chunk=4)
    sent, received = pair.both("t", prompt(32))
    pair.until(lambda: pair.p.ranks[0].transport.in_flight > 0, 1)
    pair.p.abort(sent)
    failed = pair.d.ranks[0].core.counters
    assert pair.until(lambda: failed.get("loads_failed", "aborted") > 0, 2) < 0.1
    pair.end()
    assert failed_as_wished(received, policy)


@pytest.mark.parametrize("reading", [True, False], ids=["while-read", "between-reads"])
def test_reset_prefix_cache(reading: bool) -> None:
    """P's cache is reset before it computes, while it does, and after the transfer; what runs is preempted."""
    pair = FakePair(chunk=4, kv_delivery=True, policy="recompute")
    for which, after_s in enumerate((0.0, 0.004, 0.01, 0.012, 0.02, 0.1)):
        _, received = pair.both(f"t{which}", prompt(24, which))
        pair.run(after_s)
        while pair.p.ranks[0].transport.in_flight and not reading:
            pair.world.advance(0.001)
        pair.p.scheduler.reset_prefix_cache()
        pair.end()
        assert received.status is DELIVERED
    # The fence of these engines does not wait: what is being read in that moment can never be committed.
    poisoned = pair.count(pair.p, "preemptions", "poisoned")
    assert pair.count(pair.d, "receives") == 6 - poisoned
    assert (poisoned > 0) is reading
    assert poisoned + pair.count(pair.p, "preemptions") > 1


def test_logging_level(caplog: pytest.LogCaptureFixture) -> None:
    """With every debug line formatted, the same things happen at the same times."""

    def life() -> list[Any]:
        pair = FakePair(seed=3, faults=Faults(drop=0.02, fail_write=0.1, fail_post=0.05), chunk=4, policy="recompute")
        for which in range(20):
            pair.both(f"t{which}", prompt(1 + which * 2, which % 7))
            pair.run(0.01)
        pair.end()
        return [pair.now_s, [(request.status, request.outputs, request.preemptions) for request in pair.requests]]

    caplog.set_level("ERROR", "kvpush")
    quiet = life()
    caplog.set_level("DEBUG", "kvpush")
    assert life() == quiet
    assert any(record.levelname == "DEBUG" for record in caplog.records)
