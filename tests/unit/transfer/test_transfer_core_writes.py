"""The transfer core over a simulated fabric: writes that fail, bytes and messages that are wrong."""

from __future__ import annotations

import pytest
from transfer_world import LAYERS, SLOT, Faults, Request, World, failure

from kvpush.protocol.messages import Failed, Quiet, encode
from kvpush.transport.base import TransportError

pytestmark = pytest.mark.unit

SLOW = Faults(write_delay_s=(0.3, 0.3), bytes_per_s=1e12, pieces=8)


def _writing(world: World, num_tokens: int = 16) -> tuple[Request, Request]:
    """A transfer whose write has landed in part."""
    received = world.fetch("D", "t", num_tokens)
    sent = world.offer("P", "t", num_tokens)
    world.run(0.02)
    world.prefill("P", sent, num_tokens)
    world.finish("P", sent)
    world.until(lambda: world.num_landed > 0, 1)
    return sent, received


def _deliver(world: World, transfer: str, num_tokens: int = 8) -> None:
    received = world.fetch("D", transfer, num_tokens)
    sent = world.offer("P", transfer, num_tokens)
    world.prefill("P", sent, num_tokens)
    world.finish("P", sent)
    world.until(lambda: received.ended == ["Received"] and sent.ended == ["Sent"], 10, step_s=0.005)


@pytest.mark.paths("direct")
@pytest.mark.parametrize("at", ["post", "write"])
def test_a_write_that_fails_fails_its_transfer_and_no_other(at: str) -> None:
    world = World("P", "D")
    _deliver(world, "warm")
    fail = world["P"].transport.fail_next_post if at == "post" else world["P"].transport.fail_next_write
    fail()
    received = world.fetch("D", "t", 8)
    sent = world.offer("P", "t", 8)
    world.prefill("P", sent, 8)
    world.finish("P", sent)
    world.until(lambda: received.ended == ["LoadFailed", "Released"] and sent.ended == ["Sent"], 1)
    assert failure(received) == ("post_failed" if at == "post" else "write_failed")
    _deliver(world, "next")
    world.check_idle()


@pytest.mark.paths("direct")
def test_one_of_two_writes_fails_and_the_other_is_awaited() -> None:
    world = World("P", "D", faults=SLOW)
    received = world.fetch("D", "t", 16)
    sent = world.offer("P", "t", 16)
    world.run(0.02)
    world.prefill("P", sent, 8)
    world.run(0.001)
    world["P"].transport.fail_next_write(after=0.0)
    world.prefill("P", sent, 16)
    world.until(lambda: received.ended == ["LoadFailed"], 1)
    world.until(lambda: received.ended == ["LoadFailed", "Released"], 1)  # the world watches what lands from now on
    world.finish("P", sent)
    world.until(lambda: sent.ended == ["Sent"], 1)
    world.check_idle()


@pytest.mark.paths("direct")
def test_a_failed_write_of_which_bytes_may_still_land_is_never_called_quiet() -> None:
    world = World("P", "D", faults=SLOW)
    world["P"].transport.fail_next_write(may_land=True)
    _, received = _writing(world)
    world.until(lambda: received.ended == ["LoadFailed"], 2, step_s=0.005)
    landed = world.num_landed
    world.run(10, step_s=0.02)
    assert world.num_landed > landed  # late bytes, into memory that D still holds: the world checks that
    assert received.ended == ["LoadFailed"]
    assert world["P"].core.counters.get("writes_lost") == 1
    world.fabric.kill("P-0")
    world.until(lambda: received.ended == ["LoadFailed", "Released"], 5, step_s=0.01)
    world.check_idle("D")


@pytest.mark.paths("direct")
def test_p_forgets_a_lost_write_when_its_target_is_gone() -> None:
    world = World("P", "D", faults=SLOW)
    world["P"].transport.fail_next_write(may_land=True)
    sent, _ = _writing(world)
    world.until(lambda: sent.ended == ["Sent"], 3, step_s=0.005)  # its blocks are not kept for that
    world.run(2, step_s=0.02)
    assert not world["P"].core.idle
    world.fabric.kill("D-0")
    world.until(lambda: world["P"].core.idle, 5, step_s=0.01)
    world.check_idle("P")


@pytest.mark.paths("direct")
def test_a_request_with_a_lost_write_can_be_preempted_and_computed_again() -> None:
    """What its other consumers get must be of the new blocks, not of those that were there before."""
    world = World("P", "D", "E", faults=SLOW)
    first = world.fetch("D", "t", 16, consumers=2)
    sent = world.offer("P", "t", 16, consumers=2)
    world.run(0.02)
    world["P"].transport.fail_next_write(may_land=True)
    world.prefill("P", sent, 16)
    world.until(lambda: first.ended == ["LoadFailed"], 2)
    world.preempt("P", sent)
    second = world.fetch("E", "t", 16, consumer=1, consumers=2)
    world.run(0.05)
    world.prefill("P", sent, 4, replace=True)
    world.run(0.5)
    world.prefill("P", sent, 16)
    world.finish("P", sent)
    world.until(lambda: second.ended == ["Received"], 3)


@pytest.mark.paths("direct")
def test_a_post_of_which_bytes_may_land_is_lost_too(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("P", "D")
    received = world.fetch("D", "t", 8)
    sent = world.offer("P", "t", 8)
    world.run(0.02)

    def write(*args: object) -> None:
        raise TransportError("posted in part", "D-0", may_land=True)

    monkeypatch.setattr(world["P"].transport, "write", write)
    world.prefill("P", sent, 8)
    world.finish("P", sent)
    world.until(lambda: received.ended == ["LoadFailed"], 1)
    world.run(5, step_s=0.02)
    assert received.ended == ["LoadFailed"]
    assert sent.ended == ["Sent"]
    assert world["P"].fence.idle


# Bytes that are wrong


@pytest.mark.paths("direct")
def test_a_byte_that_changed_on_the_way_is_found_by_integrity() -> None:
    world = World("P", "D", integrity=True, faults=SLOW)
    _, received = _writing(world)
    assert received.blocks is not None
    world.until(lambda: world.num_landed == 16 * SLOT * LAYERS, 1)  # the commit is on its way
    world["D"].memory[1, received.blocks[1], 0, 0] ^= 1
    world.until(lambda: bool(received.ended), 1)
    assert received.ended == ["LoadFailed", "Released"]
    assert failure(received) == "integrity"
    assert world["D"].core.counters.get("integrity", "mismatch") == 1
    world.run(0.1)
    world.check_idle()


def test_messages_that_make_no_sense_are_counted_and_dropped() -> None:
    world = World("P", "D")
    _deliver(world, "warm")
    received = world.fetch("D", "t", 8)
    world.run(0.02)
    receive = world["D"].core._consumer_side._consumer.receive(received.request_id)
    assert receive is not None
    key, attempt = receive.key, receive.attempt
    world.start("X")
    for target in ("P", "D"):
        world["X"].transport.connect(world[target].transport.metadata())
        for payload in (b"", b"kvp", b"kvp\x01\xff", b"x" * 70_000, b"\x00" * 10, encode(Quiet(key, attempt + 99))):
            world["X"].transport.notify(world[target].agent, payload)
        world["X"].transport.notify(world[target].agent, encode(Failed(key, attempt, "no", quiet=True)))
    world.run(0.05)
    assert world["D"].core.counters.get("messages_dropped", "malformed") == 5
    assert world["D"].core.counters.get("messages_dropped", "peer") == 2  # X was not asked to write anything
    sent = world.offer("P", "t", 8)
    world.prefill("P", sent, 8)
    world.finish("P", sent)
    world.until(lambda: received.ended == ["Received"] and sent.ended == ["Sent"], 1)
    world.check_idle()


def test_a_transport_that_cannot_read_for_a_while_is_outlived(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("P", "D")
    received = world.fetch("D", "t", 8)

    def deaf() -> list[tuple[str, bytes]]:
        raise TransportError("cannot read")

    with monkeypatch.context() as patch:
        patch.setattr(world["P"].transport, "notifications", deaf)
        world.run(0.1)
    assert world["P"].core.counters.get("transport_errors") > 0
    sent = world.offer("P", "t", 8)
    world.prefill("P", sent, 8)
    world.finish("P", sent)
    world.until(lambda: received.ended == ["Received"] and sent.ended == ["Sent"], 1)
    world.check_idle()
