"""The staged path over a simulated fabric: slots, credits, and what a failure leaves behind (nothing)."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from transfer_world import NUM_SLOTS, Faults, Gate, Request, World, failure

from kvpush.protocol.ids import AgentName, SendKey, TransferId
from kvpush.protocol.messages import Commit, Credit, Staged, encode
from kvpush.transfer.staging.area import StagingArea
from kvpush.transfer.staging.leases import SlotLeases
from kvpush.transfer.staging.peer_slots import PeerSlots

pytestmark = [pytest.mark.unit, pytest.mark.paths("staged")]
SLOW = Faults(write_delay_s=(0.3, 0.3), bytes_per_s=1e12, pieces=8)


def _deliver(world: World, transfer: str, num_tokens: int = 30, p: str = "P", d: str = "D") -> Request:
    received = world.fetch(d, transfer, num_tokens, peer=p)
    sent = world.offer(p, transfer, num_tokens)
    world.prefill(p, sent, num_tokens)
    world.finish(p, sent)
    world.until(lambda: received.ended == ["Received"] and sent.ended == ["Sent"], 10, step_s=0.001)
    return received


def _stager(world: World, host: str = "P"):
    stager = world[host].core._producer_side._pieces._stager
    assert stager is not None
    return stager


def _unstager(world: World, host: str = "D"):
    unstager = world[host].core._consumer_side._unstager
    assert unstager is not None
    return unstager


def _preempt(world: World, sent: Request) -> bool:
    """The engine waits for what has begun, and the transfer thread goes on meanwhile."""
    world["P"].fence.close([sent.request_id])
    world.run(0.01)
    return world.preempt("P", sent)


def _free_slots(world: World, agent: str = "D-0") -> list[int]:
    return sorted(_stager(world)._peers._granted[AgentName(agent)].free)


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 30, 100])
def test_pieces_of_any_length_arrive_by_way_of_slots(num_tokens: int) -> None:
    world = World("P", "D")
    _deliver(world, "t", num_tokens)
    world.check_idle()
    counters = world["P"].core.counters
    blocks = -(-num_tokens // 4)
    assert counters.get("pieces", "staged") == 1
    assert counters.get("pieces", "direct") == 0
    assert counters.get("writes") == -(-blocks // 2)  # a slot holds two blocks
    assert world["D"].core.counters.get("parts", "unpacked") == -(-blocks // 2)
    assert _free_slots(world) == list(_unstager(world).leases.grant(AgentName("P-0")))


def test_a_writer_that_is_alone_leaves_slots_for_others() -> None:
    leases = SlotLeases(8)
    assert leases.grant(AgentName("a")) == (0, 1, 2, 3, 4, 5)
    assert leases.grant(AgentName("b")) == (6,)
    assert leases.grant(AgentName("c")) == (7,)
    assert leases.grant(AgentName("d")) == ()
    assert leases.grant(AgentName("a")) == (0, 1, 2, 3, 4, 5)
    assert leases.holds(AgentName("b"), 6)
    assert not leases.holds(AgentName("a"), 6)
    assert leases.revoke(AgentName("b")) == (6,)
    assert leases.revoke(AgentName("b")) == ()
    assert leases.grant(AgentName("d")) == (6,)


def test_a_stopped_producer_costs_no_block_and_reaches_none_when_it_goes_on() -> None:
    world = World("P", "D", faults=SLOW)
    received = world.fetch("D", "t", 30)
    sent = world.offer("P", "t", 30)
    world.run(0.02)
    world.prefill("P", sent, 30)
    world.finish("P", sent)
    world.until(lambda: world.num_landed > 0, 1)
    world.fabric.stop("P-0")
    took_s = world.until(lambda: received.ended == ["LoadFailed", "Released"], 5, step_s=0.005)
    assert took_s < 3.5
    assert failure(received) == "peer_lost"
    assert world["D"].core.quarantine.num_blocks == 0
    before = world["D"].memory.copy()  # the blocks are free: this is what others have in them
    landed = world.num_landed
    world.fabric.resume("P-0")
    world.run(5, step_s=0.01)
    assert world.num_landed > landed  # the rest of the write
    assert np.array_equal(world["D"].memory, before)
    world.until(lambda: sent.ended == ["Sent"], 10, step_s=0.01)
    _deliver(world, "next")
    world.check_idle()


def test_lost_messages_about_slots_are_said_again() -> None:
    world = World("P", "D")
    _deliver(world, "warm")
    received = world.fetch("D", "t", 30)
    sent = world.offer("P", "t", 30)
    world.run(0.02)
    world.fabric.set_faults(Faults(drop=1.0))
    world.prefill("P", sent, 30)
    world.finish("P", sent)
    world.run(0.5)
    assert received.ended == []
    world.fabric.set_faults(Faults())
    world.until(lambda: received.ended == ["Received"] and sent.ended == ["Sent"], 3)
    world.check_idle()
    assert len(_free_slots(world)) == len(_unstager(world).leases.grant(AgentName("P-0")))


@pytest.mark.parametrize("seed", range(8))
def test_messages_that_get_lost_or_come_twice_change_nothing(seed: int) -> None:
    world = World("P", "D", seed=seed, faults=Faults(drop=0.2, duplicate=0.3, message_delay_s=(1e-4, 0.02)))
    pairs = []
    for i in range(4):
        received, sent = world.fetch("D", f"t{i}", 25), world.offer("P", f"t{i}", 25)
        world.prefill("P", sent, 25)
        world.finish("P", sent)
        pairs.append((received, sent))
        world.until(lambda r=received, s=sent: bool(r.ended and s.ended), 15, step_s=0.002)  # type: ignore[misc]
    world.fabric.set_faults(Faults())
    world.run(3, step_s=0.005)
    assert sum(received.ended == ["Received"] for received, _ in pairs) >= 2
    world.until(lambda: all(sent.ended == ["Sent"] for _, sent in pairs), 10, step_s=0.01)
    world.check_idle()


def test_blocks_that_are_taken_while_a_piece_waits_for_slots_are_owed_again() -> None:
    world = World("P", "D", faults=SLOW)
    received = world.fetch("D", "t", 64)
    sent = world.offer("P", "t", 64)
    world.run(0.02)
    world.prefill("P", sent, 32)
    world.prefill("P", sent, 60)
    world.until(lambda: world.num_landed > 0, 1)  # some parts are packed, the others wait for slots
    assert _preempt(world, sent) is False
    world.run(0.1)
    assert world["P"].core.counters.total("protocol_errors") == 0
    world.prefill("P", sent, 64, replace=True)
    world.finish("P", sent)
    world.until(lambda: received.ended == ["Received"] and sent.ended == ["Sent"], 20, step_s=0.005)
    world.check_idle()


def test_blocks_that_are_taken_before_anything_is_packed_are_owed_again() -> None:
    world = World("P", "D", faults=SLOW)
    first, other = world.fetch("D", "t", 64), world.offer("P", "t", 64)
    world.run(0.02)
    world.prefill("P", other, 64)  # takes all slots
    received, sent = world.fetch("D", "u", 30), world.offer("P", "u", 30)
    world.run(0.02)
    world.prefill("P", sent, 30)
    world.run(0.01)
    assert _preempt(world, sent) is False
    world.prefill("P", sent, 30, replace=True)
    world.finish("P", sent)
    world.finish("P", other)
    world.until(lambda: first.ended == received.ended == ["Received"], 20, step_s=0.005)
    world.check_idle("D")


def test_a_pack_that_outlives_the_wait_poisons_its_attempt() -> None:
    world = World("P", "D")
    _deliver(world, "warm")
    world["P"].staging.packer._copy_s = (1.0, 1.0)  # type: ignore[union-attr]
    received = world.fetch("D", "t", 30)
    sent = world.offer("P", "t", 30)
    world.run(0.02)
    world.prefill("P", sent, 30)
    world.run(0.02)
    assert world.preempt("P", sent) is True
    world.until(lambda: received.ended == ["LoadFailed", "Released"], 1)
    assert failure(received) == "poisoned"
    world["P"].staging.packer._copy_s = (1e-5, 1e-5)  # type: ignore[union-attr]
    world.run(3, step_s=0.005)
    world.finish("P", sent, "aborted")
    world.run(1)
    world.check_idle()


def test_blocks_are_not_released_while_something_is_unpacked_into_them() -> None:
    world = World("P", "D")
    _deliver(world, "warm")
    world["D"].staging.packer._copy_s = (0.5, 0.5)  # type: ignore[union-attr]
    received = world.fetch("D", "t", 30)
    sent = world.offer("P", "t", 30)
    world.prefill("P", sent, 30)
    world.finish("P", sent)
    world.until(lambda: _unstager(world).busy(received.request_id), 1)
    world.cancel("D", received)
    world.run(0.2)
    assert received.ended == []
    world.until(lambda: received.ended == ["Released"], 2)
    world.until(lambda: sent.ended == ["Sent"], 2)
    world.run(1)
    world.check_idle()


def test_a_writer_without_slots_fails_its_transfer_with_a_reason() -> None:
    world = World("P", "Q", "R", "D")
    for host in "PQ":
        _deliver(world, f"of {host}", 8, p=host)
    received = world.fetch("D", "t", 8, peer="R")
    sent = world.offer("R", "t", 8)
    world.prefill("R", sent, 8)
    world.finish("R", sent)
    world.until(lambda: received.ended == ["LoadFailed", "Released"], 8, step_s=0.005)
    assert failure(received) == "write_failed"
    assert world["R"].core.counters.get("writes_failed") == 1
    world.until(lambda: sent.ended == ["Sent"], 3, step_s=0.005)
    world.check_idle()


@pytest.mark.paths("auto")
def test_a_writer_without_slots_writes_directly() -> None:
    world = World("P", "Q", "R", "D", num_blocks=64)
    for host in "PQR":
        _deliver(world, f"of {host}", p=host)
        _deliver(world, f"of {host} again", p=host)
    assert world["R"].core.counters.get("pieces", "staged") == 0
    assert world["P"].core.counters.get("pieces", "staged") >= 1
    world.check_idle()


def test_the_slots_of_a_producer_that_is_gone_go_to_the_next_one() -> None:
    world = World("P", "D", faults=SLOW)
    _deliver(world, "old")
    leases = _unstager(world).leases
    held = leases.grant(AgentName("P-0"))
    world.fabric.kill("P-0")
    world.start("P")
    world.run(0.2)
    _deliver(world, "new")
    world.run(3, step_s=0.01)
    assert leases.holders == {"P-1"}
    assert len(leases._free) + len(leases.grant(AgentName("P-1"))) == NUM_SLOTS
    assert held
    _deliver(world, "newer")
    world.check_idle()


def test_a_commit_of_blocks_that_were_not_unpacked_fails_the_load() -> None:
    world = World("P", "D")
    received = world.fetch("D", "t", 8)
    sent = world.offer("P", "t", 8)
    world.run(0.05)
    gate = Gate()
    world.prefill("P", sent, 8, gate)
    key = SendKey(TransferId("t"), 0, 0, 0)
    world["P"].transport.notify("D-0", encode(Commit(key, 2, 8, 64, 1, [], staged_blocks=2)))
    world["P"].transport.notify("D-0", encode(Commit(key, 1, 8, 64, 1, [], staged_blocks=2)))
    world.until(lambda: received.ended == ["LoadFailed", "Released"], 1)
    assert failure(received) == "staged_missing"
    world.finish("P", sent, "aborted")
    world.run(1)
    world.check_idle()


def test_parts_that_are_nobodys_are_dropped_or_given_back() -> None:
    world = World("P", "Q", "D")
    _deliver(world, "warm")
    received = world.fetch("D", "t", 8)
    world.run(0.05)
    key = SendKey(TransferId("t"), 0, 0, 0)
    counters, p = world["D"].core.counters, world["P"].transport
    slot = _unstager(world).leases.grant(AgentName("P-0"))[0]
    before = world["D"].memory.copy()

    def say(message: Staged) -> None:
        p.notify("D-0", encode(message))
        world.run(0.01)

    dropped = counters.get("messages_dropped", "peer")
    say(Staged(key, 2, NUM_SLOTS - 1, 1000, 0, 1))  # a slot of nobody
    say(Staged(key, 2, 4000, 1001, 0, 1))  # no slot at all
    say(Staged(key, 2, slot, 1002, 1, 5))  # blocks that the request does not have
    assert counters.get("messages_dropped", "peer") == dropped + 3
    say(Staged(key, 1, slot, 1003, 0, 1))  # of an attempt that is over
    say(Staged(SendKey(TransferId("other"), 0, 0, 0), 2, slot, 1004, 0, 1))
    assert counters.get("messages_dropped", "peer") == dropped + 3
    assert counters.get("parts", "unwanted") == 2
    assert np.array_equal(world["D"].memory, before)
    assert received.ended == []
    world["Q"].transport.connect(world["D"].transport.metadata())
    world["Q"].transport.notify("D-0", encode(Staged(key, 2, slot, 1, 0, 1)))
    world.run(0.01)
    assert np.array_equal(world["D"].memory, before)


def test_a_credit_counts_once_and_only_for_its_use() -> None:
    slots, agent = PeerSlots(), AgentName("D")
    world = World("D")
    address = world["D"].address
    assert slots.take(agent, address) is None
    slots.grant(agent, [4, 7])
    slots.grant(agent, [4, 7])
    first, second = slots.take(agent, address), slots.take(agent, address)
    assert {first, second} == {(7, 1), (4, 2)}
    assert slots.take(agent, address) is None
    assert not slots.free(agent, 7, 2)
    assert slots.free(agent, 7, 1)
    assert not slots.free(agent, 7, 1)
    assert slots.take(agent, address) == (7, 3)
    assert not slots.free(agent, 7, 1)
    slots.lose(agent, 7, 3)
    assert not slots.free(agent, 7, 3)
    assert slots.granted(agent)
    slots.lose(agent, 4, 2)
    assert not slots.granted(agent)
    slots.forget(agent)
    assert not slots.granted(agent)


def test_what_cannot_be_an_area_is_refused() -> None:
    for fields in ({"num_slots": 0}, {"slot_bytes": 0}, {"address": 0}, {"device": 5000}, {"num_slots": 10**6}):
        given = {"address": 4096, "slot_bytes": 64, "num_slots": 2, **fields}
        with pytest.raises(ValueError, match=r"num_slots|slots of|device"):
            StagingArea(**given)
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=StagingArea)
    with pytest.raises(ValueError, match="slot 2 of 2"):
        StagingArea(4096, 64, 2).slot(2)


def test_credits_and_grants_from_strangers_change_nothing() -> None:
    world = World("P", "Q", "D")
    _deliver(world, "warm")
    free = _free_slots(world)
    world["Q"].transport.connect(world["P"].transport.metadata())
    world["Q"].transport.notify("P-0", encode(Credit(world["Q"].address, free[0], 1)))
    world.run(0.05)
    assert _free_slots(world) == free
    _deliver(world, "next")
    world.check_idle("P", "D")
