"""The transfer core over a simulated fabric: aborts, preemptions, refusals and bounds."""

from __future__ import annotations

import pytest
from transfer_world import BLOCK, TIMING, Faults, Gate, Request, World, failure, identity

from kvpush.protocol.ids import RequestId, SendKey, TransferId
from kvpush.transfer import commands, producer_side
from kvpush.transfer.results import LoadFailed, Released

pytestmark = pytest.mark.unit

SLOW = Faults(write_delay_s=(0.1, 0.1), bytes_per_s=1e12, pieces=8)


def _streaming(world: World, num_tokens: int = 16, ready: int = 8) -> tuple[Request, Request]:
    """A transfer of which P has computed the first part."""
    received = world.fetch("D", "t", num_tokens)
    sent = world.offer("P", "t", num_tokens)
    world.run(0.02)
    world.prefill("P", sent, ready)
    world.run(0.001)
    return sent, received


def _both_end(world: World, sent: Request, received: Request, limit_s: float = 1) -> float:
    took_s = world.until(lambda: bool(sent.ended and received.ended[-1:] in (["Received"], ["Released"])), limit_s)
    world.check_idle()
    return took_s


# Preemption at P


def test_after_a_preemption_p_goes_on_from_what_has_landed() -> None:
    world = World("P", "D")
    sent, received = _streaming(world, 24, 16)
    world.run(0.05)
    assert not world.preempt("P", sent)
    world.run(0.02)
    world.prefill("P", sent, 12, replace=True)
    world.run(0.02)
    landed = world.num_landed
    world.prefill("P", sent, 24)
    world.finish("P", sent)
    _both_end(world, sent, received)
    assert received.ended == ["Received"]
    assert world.num_landed - landed == 2 * 8 * 16  # the tokens behind the watermark, over both layers
    assert world["P"].core.counters.get("preemptions") == 1


@pytest.mark.paths("direct")
def test_blocks_that_are_preempted_while_they_are_read_never_commit() -> None:
    world = World("P", "D", faults=SLOW)
    sent, received = _streaming(world)
    assert world["P"].core.writing
    assert world.preempt("P", sent)  # no time to wait: poisoned, and the write reads somebody else's tokens
    world.run(0.02)
    assert received.ended == ["LoadFailed"]  # D's client is answered; its memory is still being written
    assert failure(received) == "poisoned"
    world.prefill("P", sent, 16, replace=True)
    world.finish("P", sent)
    _both_end(world, sent, received)
    assert received.ended == ["LoadFailed", "Released"]
    assert world["P"].core.counters.get("preemptions", "poisoned") == 1


@pytest.mark.paths("direct")
@pytest.mark.parametrize("told", ["before it looks", "after it looked"])
def test_a_preemption_between_the_last_byte_and_its_discovery_commits_nothing(told: str) -> None:
    """The write has landed, but P's thread has not looked yet when the main thread poisons the request."""
    world = World("P", "D", faults=SLOW)
    sent, received = _streaming(world, 8, 8)
    world.fabric.advance(world.now_s + 0.2)
    if told == "after it looked":
        assert world["P"].fence.preempt([sent.request_id], 0.0) == {sent.request_id}
        world["P"].core.poll(world.now_s)  # a round that was under way; the command has not come yet
        world["P"].tell(commands.Preempt(sent.request_id, poisoned=True))
        world["P"].free += sent.blocks or []
        sent.blocks, sent.ready = [], 0
    else:
        assert world.preempt("P", sent)
    world.run(0.1)
    assert received.ended == ["LoadFailed", "Released"]
    world.prefill("P", sent, 8, replace=True)
    world.finish("P", sent)
    world.run(0.1)
    world.check_idle()


@pytest.mark.paths("direct")
def test_a_second_consumer_survives_the_poisoning_of_the_first() -> None:
    world = World("P", "D")
    world.fabric.set_faults(SLOW, "P-0", "D-0")
    first = world.fetch("D", "t", 16, consumers=2)
    sent = world.offer("P", "t", 16, consumers=2)
    world.run(0.02)
    world.prefill("P", sent, 8)
    world.run(0.001)
    world.preempt("P", sent)
    second = world.fetch("D", "t", 16, consumer=1, consumers=2)
    world.run(0.2)
    world.prefill("P", sent, 16, replace=True)
    world.finish("P", sent)
    world.until(lambda: bool(sent.ended and second.ended), 1)
    assert (first.ended, second.ended) == (["LoadFailed", "Released"], ["Received"])
    world.check_idle()


def test_a_chunk_whose_forward_has_not_ended_is_forgotten_by_a_preemption() -> None:
    world = World("P", "D")
    sent, received = _streaming(world)
    gate = Gate()
    world.prefill("P", sent, 16, gate)
    world.preempt("P", sent)
    gate.passed = True
    world.run(0.05)
    assert received.ended == []
    world.prefill("P", sent, 16, replace=True)
    world.finish("P", sent)
    _both_end(world, sent, received)
    assert received.ended == ["Received"]


def test_a_closed_fence_holds_pieces_back_until_the_preemption_is_known() -> None:
    """The main thread closes the fence before the thread hears of it; a chunk may become ready in between."""
    world = World("P", "D")
    sent, received = _streaming(world)
    world.run(0.05)
    landed = world.num_landed
    gate = Gate()
    world.prefill("P", sent, 16, gate)
    world["P"].compute(sent, 8, 16)
    assert world["P"].fence.preempt([sent.request_id], 0.0) == set()
    gate.passed = True
    world.run(0.3)
    assert world.num_landed == landed
    world.preempt("P", sent)
    world.prefill("P", sent, 16, replace=True)
    world.finish("P", sent)
    _both_end(world, sent, received)
    assert received.ended == ["Received"]


def test_preempting_a_request_that_is_not_handed_over_leaves_the_fence_open() -> None:
    world = World("P")
    first = world.offer("P", "t", 8)
    world.prefill("P", first, 8)
    world.finish("P", first)  # waits for its consumer under the transfer id
    second = world.offer("P", "t", 8)
    world.prefill("P", second, 8)
    world.preempt("P", second)
    assert world["P"].fence.idle
    world.prefill("P", second, 8, replace=True)
    world.finish("P", second)
    world.run(0.01)
    assert second.ended == ["Sent"]  # nothing reads its blocks
    assert world["P"].core.counters.get("unmatched", "duplicate") == 1
    world.until(lambda: first.ended == ["Sent"], 6, step_s=0.02)
    world.check_idle()


def test_preempting_a_request_that_p_has_never_heard_of_leaves_nothing_behind() -> None:
    world = World("P")
    world["P"].fence.preempt([RequestId("unknown")], 0.0)
    world["P"].tell(commands.Preempt(RequestId("unknown"), poisoned=True))
    world["P"].tell(commands.Progress(RequestId("unknown"), 4, ((1,),), True))
    world.run(0.01)
    world.check_idle()


# Aborts


@pytest.mark.paths("direct")
@pytest.mark.parametrize("when", ["before blocks", "between chunks", "while writing", "after the last chunk"])
def test_an_abort_at_p_reaches_d_at_once(when: str) -> None:
    world = World("P", "D", faults=SLOW if when == "while writing" else None)
    received = world.fetch("D", "t", 16)
    sent = world.offer("P", "t", 16)
    world.run(0.02)
    if when != "before blocks":
        world.prefill("P", sent, 16 if when == "after the last chunk" else 8)
        world.run(0.001 if when == "while writing" else 0.0)
    world.finish("P", sent, aborted="aborted")
    world.run(0.01)
    assert received.ended[:1] == ["LoadFailed"]
    assert failure(received) == "aborted"
    if when == "while writing":
        assert sent.ended == []  # its blocks are still being read
    _both_end(world, sent, received)


@pytest.mark.paths("direct")
@pytest.mark.parametrize("when", ["not registered yet", "before p", "before blocks", "while writing", "received"])
def test_an_abort_at_d_gives_memory_back_when_nobody_writes(when: str) -> None:
    world = World("P", "D", faults=SLOW if when == "while writing" else None)
    received = world.fetch("D", "t", 16)
    if when == "not registered yet":
        world.cancel("D", received)
        world.run(0.05)
        assert received.ended == ["Released"]
        assert world["P"].core.counters.get("messages_received", "register") == 0
        world.check_idle()
        return
    world.run(0.05)
    sent = world.offer("P", "t", 16) if when != "before p" else None
    if sent is not None and when != "before blocks":
        world.prefill("P", sent, 16)
        world.run(0.005 if when == "while writing" else 0.3)
    world.cancel("D", received)
    if when == "while writing":
        world.run(0.01)
        assert received.ended == []
    if sent is not None:
        world.finish("P", sent)
    world.run(0.3)
    assert received.ended == (["Received"] if when == "received" else ["Released"])
    world.run(TIMING.rendezvous_timeout_s + 1, step_s=0.02)
    world.check_idle()


def test_blocks_of_an_aborted_load_go_to_another_one_only_when_p_is_quiet() -> None:
    world = World("P", "D", num_blocks=5, faults=SLOW)
    sent, received = _streaming(world, 16, 16)
    world.cancel("D", received)
    world.until(lambda: received.ended == ["Released"], 1)
    again = world.fetch("D", "u", 16, prompt="q")  # the same blocks; the world watches what lands there
    world.finish("P", sent)
    world.until(lambda: sent.ended == ["Sent"], 1)
    other = world.offer("P", "u", 16, prompt="q")
    world.prefill("P", other, 16)
    world.finish("P", other)
    world.until(lambda: again.ended == ["Received"], 1)


@pytest.mark.paths("direct", "staged", "auto")  # a kernel does not wait for the network
def test_p_gives_the_blocks_of_an_aborted_request_back_although_a_write_hangs() -> None:
    world = World("P", "D", faults=SLOW)
    sent, received = _streaming(world)
    world.fabric.stop("D-0")
    world.run(0.2)
    world.finish("P", sent, aborted="aborted")
    assert world.until(lambda: sent.ended == ["Sent"], 3, step_s=0.01) <= TIMING.abort_drain_s + 0.2
    assert not world["P"].core.idle  # the write itself has not ended
    world.fabric.resume("D-0")
    world.until(lambda: received.ended == ["LoadFailed", "Released"], 3, step_s=0.005)
    world.run(0.3)
    world.check_idle()


def test_p_that_finishes_without_the_whole_prompt_fails_d() -> None:
    world = World("P", "D")
    sent, received = _streaming(world)
    world.finish("P", sent)  # the engine says finished, but only half of the prompt was computed
    _both_end(world, sent, received)
    assert failure(received) == "incomplete"


# Refusals


def test_other_prompts_under_one_transfer_id_are_refused() -> None:
    world = World("P", "D")
    received = world.fetch("D", "t", 8, prompt="one")
    sent = world.offer("P", "t", 8, prompt="another")
    world.prefill("P", sent, 8)
    world.finish("P", sent)
    world.until(lambda: received.ended == ["LoadFailed", "Released"], 1)
    assert failure(received) == "prompt_mismatch"
    assert world.num_landed == 0
    right = world.fetch("D", "t", 8, prompt="another")  # the request itself is unharmed
    world.until(lambda: right.ended == ["Received"] and sent.ended == ["Sent"], 1)
    world.check_idle()


def test_a_second_load_under_a_live_key_fails_alone() -> None:
    world = World("P", "D")
    received = world.fetch("D", "t", 8)
    double = world.fetch("D", "t", 8)
    assert failure(double) == ""
    world.run(0.02)
    assert failure(double) == "not_registered"
    assert double.ended == ["LoadFailed", "Released"]
    sent = world.offer("P", "t", 8)
    world.prefill("P", sent, 8)
    world.finish("P", sent)
    _both_end(world, sent, received)
    assert received.ended == ["Received"]


def test_a_refused_load_ends_without_p() -> None:
    world = World("D")
    request = Request(RequestId("r"), "p", 8, world["D"].take_blocks(2))
    world["D"].requests[request.request_id] = request
    assert request.blocks is not None
    world["D"].tell(commands.Refuse(request.request_id, "duplicate", 0, (tuple(request.blocks),)))
    world.run(0.01)
    assert request.results == [LoadFailed(request.request_id, "duplicate"), Released(request.request_id)]
    assert world["D"].core.counters.get("loads_failed", "duplicate") == 1
    world.check_idle()


@pytest.mark.parametrize("blocks", [(), ((),), ((-1,),), ((2**31,),)])
def test_a_load_whose_blocks_cannot_be_told_fails_and_ends(blocks: commands.BlockTable) -> None:
    world = World("D")
    request = Request(RequestId("r"), "p", 4, world["D"].take_blocks(1))
    world["D"].requests[request.request_id] = request
    key = SendKey(TransferId("t"), 0)
    world["D"].tell(commands.Fetch(request.request_id, key, 1, identity("p", 4), 0, blocks, ("P", 1000)))
    world.run(0.01)
    assert request.ended == ["LoadFailed", "Released"]
    world.check_idle()


@pytest.mark.paths("direct")
def test_blocks_that_d_does_not_have_are_refused_by_p() -> None:
    world = World("P", "D")
    received = world.fetch("D", "t", 8)
    bad = Request(RequestId("bad"), "p", 8, [])
    world["D"].requests[bad.request_id] = bad
    key = SendKey(TransferId("u"), 0)
    world["D"].tell(commands.Fetch(bad.request_id, key, 1, identity("p", 8), 0, ((1000, 1001),), ("P", 1000)))
    sent, other = world.offer("P", "t", 8), world.offer("P", "u", 8)
    for request in (sent, other):
        world.prefill("P", request, 8)
        world.finish("P", request)
    world.run(0.05)
    assert failure(bad) == "post_failed"
    assert received.ended == ["Received"]
    assert world["P"].core.counters.get("writes_refused") == 1
    world.check_idle()


def test_an_unaligned_first_token_is_refused_by_p() -> None:
    """What stands in the block before it is not P's to write."""
    world = World("P", "D")
    received = world.fetch("D", "t", 8, first_token=BLOCK + 1)
    sent = world.offer("P", "t", 8)
    world.prefill("P", sent, 8)
    world.finish("P", sent)
    _both_end(world, sent, received)
    assert failure(received) == "post_failed"
    assert world.num_landed == 0


# Bounds


def test_a_registration_without_request_ends_in_time() -> None:
    world = World("P", "D")
    received = world.fetch("D", "t", 8)
    took_s = world.until(lambda: received.ended == ["LoadFailed", "Released"], 10, step_s=0.01)
    assert failure(received) == "no_request"
    assert took_s <= TIMING.rendezvous_timeout_s + 0.3
    world.check_idle()


def test_a_request_without_registration_ends_in_time() -> None:
    world = World("P")
    sent = world.offer("P", "t", 8)
    world.prefill("P", sent, 8)
    world.finish("P", sent)
    took_s = world.until(lambda: sent.ended == ["Sent"], 10, step_s=0.01)
    assert TIMING.unclaimed_timeout_s <= took_s <= TIMING.unclaimed_timeout_s + 0.3
    assert world["P"].core.counters.get("unmatched", "unclaimed") == 1
    world.check_idle()


def test_a_transfer_that_p_does_not_begin_to_compute_ends_in_time() -> None:
    world = World("P", "D")
    sent = world.offer("P", "t", 8)
    received = world.fetch("D", "t", 8)
    world.until(lambda: received.ended == ["LoadFailed", "Released"], 20, step_s=0.02)
    assert failure(received) == "not_scheduled"
    world.finish("P", sent, aborted="aborted")
    world.until(lambda: sent.ended == ["Sent"], 1)
    world.check_idle()


def test_both_pools_full_resolves_itself() -> None:
    """P holds requests that D cannot admit; D holds blocks for requests that P cannot admit."""
    world = World("P", "D")
    unclaimed = [world.offer("P", f"p{i}", 8) for i in range(5)]
    for sent in unclaimed:
        world.prefill("P", sent, 8)
        world.finish("P", sent)
    waiting = [world.fetch("D", f"d{i}", 8) for i in range(5)]
    bound_s = max(TIMING.unclaimed_timeout_s, TIMING.rendezvous_timeout_s) + 1
    world.until(lambda: all(request.ended for request in [*unclaimed, *waiting]), bound_s, step_s=0.02)
    world.run(0.5, step_s=0.01)
    world.check_idle()
    assert len(world["P"].free) == len(world["D"].free) == 31


def _stall(world: World, duration_s: float) -> None:
    end_s = world.now_s + duration_s
    while world.now_s < end_s:
        world["P"].tell(commands.Stalled())
        world.run(0.01, step_s=0.01)


def test_an_engine_that_stands_still_drops_its_oldest_unclaimed_request_soon() -> None:
    world = World("P", "D")
    world["D"].tell(commands.Announce(TransferId("0"), identity("p", 8), ("P", 1000)))  # D is full too
    oldest, next_one, fetched = (world.offer("P", str(i), 8) for i in range(3))
    received = world.fetch("D", "2", 8)
    world.run(0.02)
    for sent in (oldest, next_one, fetched):
        world.prefill("P", sent, 8)
        world.finish("P", sent)
        world.run(0.01)
    _stall(world, producer_side.STALL_S - 0.1)
    assert (oldest.ended, next_one.ended) == ([], [])
    _stall(world, 0.3)
    assert (oldest.ended, next_one.ended) == (["Sent"], [])  # one at a time: that may be enough
    assert world["P"].core.counters.get("unmatched", "pressure") == 1
    _stall(world, producer_side.STALL_S + 0.1)
    assert next_one.ended == ["Sent"]
    assert (fetched.ended, received.ended) == (["Sent"], ["Received"])
    late = world.fetch("D", "0", 8)
    world.until(lambda: late.ended == ["LoadFailed", "Released"], 1)
    assert failure(late) == "pressure"
    world.run(TIMING.rendezvous_timeout_s + 0.5, step_s=0.01)  # the announcement outlived its request until then
    world.check_idle()


def test_an_engine_that_works_in_between_drops_nothing() -> None:
    world = World("P")
    sent = world.offer("P", "t", 8)
    world.prefill("P", sent, 8)
    world.finish("P", sent)
    for _ in range(3):
        _stall(world, producer_side.STALL_S / 2)
        world.run(producer_side.STALL_GAP_S + 0.05, step_s=0.01)
    assert sent.ended == []


def test_tombstones_go_too() -> None:
    world = World("P", "D")
    for i in range(20):
        received = world.fetch("D", f"t{i}", 4)
        sent = world.offer("P", f"t{i}", 4)
        world.prefill("P", sent, 4)
        world.finish("P", sent)
        world.until(lambda r=received, s=sent: bool(r.ended and s.ended), 1)  # type: ignore[misc]
        world["D"].give_back(received)
    assert world["P"].core._producer_side._producer.num_tombstones == 20
    world.run(TIMING.tombstone_s + 1, step_s=0.05)
    assert world["P"].core._producer_side._producer.num_tombstones == 0
