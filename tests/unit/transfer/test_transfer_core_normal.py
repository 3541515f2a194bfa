"""The transfer core over a simulated fabric: hand-overs that go well."""

from __future__ import annotations

import pytest
from transfer_world import BLOCK, SLOT, Gate, World, failure

from kvpush.protocol.ids import SendKey, TransferId
from kvpush.transfer import commands

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("num_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 3])
@pytest.mark.parametrize("producer_first", [True, False])
def test_a_prompt_arrives_whole_whoever_comes_first(num_tokens: int, producer_first: bool) -> None:
    world = World("P", "D")
    if producer_first:
        sent = world.offer("P", "t", num_tokens)
        world.prefill("P", sent, num_tokens)
        world.finish("P", sent)
        world.run(0.05)
        received = world.fetch("D", "t", num_tokens)
    else:
        received = world.fetch("D", "t", num_tokens)
        world.run(0.05)
        assert received.ended == []
        sent = world.offer("P", "t", num_tokens)
        world.prefill("P", sent, num_tokens)
        world.finish("P", sent)
    world.until(lambda: bool(sent.ended and received.ended), 1)
    assert (sent.ended, received.ended) == (["Sent"], ["Received"])
    assert world["P"].core.counters.get("bytes_written") == -(-num_tokens // BLOCK) * BLOCK * SLOT * 2
    assert world["D"].core.counters.get("bytes_received") == world["P"].core.counters.get("bytes_written")
    world.check_idle()


def test_a_handed_over_prompt_is_in_d_within_milliseconds() -> None:
    world = World("P", "D")
    received = world.fetch("D", "warm", BLOCK)
    sent = world.offer("P", "warm", BLOCK)
    world.prefill("P", sent, BLOCK)
    world.finish("P", sent)
    world.until(lambda: bool(sent.ended and received.ended), 1)
    received = world.fetch("D", "t", 4 * BLOCK)
    sent = world.offer("P", "t", 4 * BLOCK)
    world.run(0.01)  # the registration is there when the prefill ends
    world.prefill("P", sent, 4 * BLOCK)
    world.finish("P", sent)
    assert world.until(lambda: bool(received.ended), 1, step_s=0.0001) < 0.002


def test_blocks_leave_after_every_chunk_and_only_whole_ones() -> None:
    world = World("P", "D")
    received = world.fetch("D", "t", 20)
    sent = world.offer("P", "t", 20)
    world.run(0.02)
    landed = []
    for upto in (6, 7, 11, 19):
        world.prefill("P", sent, upto)
        world.run(0.02)
        landed.append(world.num_landed // (2 * SLOT))
    assert landed == [4, 4, 8, 16]
    assert received.ended == []
    world.prefill("P", sent, 20)
    world.run(0.02)
    assert received.ended == ["Received"]  # the prompt is complete: P may decode on, D need not wait for its end
    assert sent.ended == []
    world.finish("P", sent)
    world.run(0.02)
    assert sent.ended == ["Sent"]
    world.check_idle()


def test_without_streaming_nothing_leaves_before_the_prompt_is_complete() -> None:
    world = World("P", "D", stream=False)
    received = world.fetch("D", "t", 12)
    sent = world.offer("P", "t", 12)
    world.prefill("P", sent, 8)
    world.run(0.05)
    assert world.num_landed == 0
    world.prefill("P", sent, 12)
    world.finish("P", sent)
    world.until(lambda: received.ended == ["Received"] and sent.ended == ["Sent"], 1)
    world.check_idle()


def test_blocks_wait_for_the_forward_that_makes_them() -> None:
    world = World("P", "D")
    received = world.fetch("D", "t", 12)
    sent = world.offer("P", "t", 12)
    first, second = Gate(), Gate()
    world.prefill("P", sent, 8, first)
    world.prefill("P", sent, 12, second)
    assert world["P"].core.writing  # poll often: a forward is about to end
    world.run(0.05)
    assert world.num_landed == 0
    second.passed = True  # the events of one stream pass in order; one that seems to overtake must wait
    world.run(0.05)
    assert world.num_landed == 0
    world["P"].compute(sent, 0, 12)
    first.passed = True
    world.until(lambda: received.ended == ["Received"], 1)
    world.finish("P", sent)
    world.until(lambda: sent.ended == ["Sent"], 1)
    assert not world["P"].core.writing
    world.check_idle()


def test_a_finished_request_does_not_wait_for_its_events() -> None:
    world = World("P", "D")
    received = world.fetch("D", "t", 8)
    sent = world.offer("P", "t", 8)
    world.prefill("P", sent, 8, Gate())
    world["P"].compute(sent, 0, 8)
    world.finish("P", sent)  # its output exists, so its forward is over
    world.until(lambda: received.ended == ["Received"] and sent.ended == ["Sent"], 1)
    world.check_idle()


@pytest.mark.parametrize("first_token", [BLOCK, 3 * BLOCK])
def test_only_what_d_lacks_moves(first_token: int) -> None:
    world = World("P", "D")
    received = world.fetch("D", "t", 4 * BLOCK, first_token=first_token)
    sent = world.offer("P", "t", 4 * BLOCK)
    world.prefill("P", sent, 4 * BLOCK)
    world.finish("P", sent)
    world.until(lambda: received.ended == ["Received"] and sent.ended == ["Sent"], 1)
    assert world.num_landed == (4 * BLOCK - first_token) * SLOT * 2
    world.check_idle()


def test_a_release_frees_p_at_once_and_moves_nothing() -> None:
    world = World("P", "D")
    sent = world.offer("P", "t", 8)
    world.prefill("P", sent, 8)
    world["D"].tell(commands.Release(SendKey(TransferId("t"), 0), ("P", 1000)))
    world.finish("P", sent)
    assert world.until(lambda: sent.ended == ["Sent"], 1) < 0.1
    assert world.num_landed == 0
    world.check_idle()


@pytest.mark.parametrize("order", ["announce first", "offer first"])
def test_an_announcement_keeps_p_waiting_beyond_the_usual_bound(order: str) -> None:
    world = World("P", "D")
    announce = commands.Announce(TransferId("t"), _prompt(8), ("P", 1000))
    if order == "announce first":
        world["D"].tell(announce)
    sent = world.offer("P", "t", 8)
    world.prefill("P", sent, 8)
    world.finish("P", sent)
    if order == "offer first":
        world["D"].tell(announce)
    world.run(12, step_s=0.02)  # unclaimed_timeout_s is 5
    assert sent.ended == []
    received = world.fetch("D", "t", 8)
    world.until(lambda: received.ended == ["Received"] and sent.ended == ["Sent"], 1)
    world.check_idle()


def test_a_withdrawn_announcement_is_not_repeated() -> None:
    world = World("P", "D")
    world["D"].tell(commands.Announce(TransferId("t"), _prompt(8), ("P", 1000)))
    world.run(1, step_s=0.01)
    assert not world["D"].core.idle
    world["D"].tell(commands.Withdraw(TransferId("t")))
    world.run(0.1)
    sent = world["D"].core.counters.total("messages_sent")
    world.run(5, step_s=0.02)
    assert world["D"].core.counters.total("messages_sent") == sent
    world.check_idle()


def test_several_consumers_read_one_prefill_and_p_waits_for_the_last() -> None:
    world = World("P", "D")
    sent = world.offer("P", "t", 10, consumers=3)
    world.prefill("P", sent, 10)
    world.finish("P", sent)
    first = world.fetch("D", "t", 10, consumer=0, consumers=3)
    last = world.fetch("D", "t", 10, consumer=2, consumers=3)
    world.run(0.1)
    assert (first.ended, last.ended, sent.ended) == (["Received"], ["Received"], [])
    world["D"].tell(commands.Release(SendKey(TransferId("t"), 1), ("P", 1000)))
    world.until(lambda: sent.ended == ["Sent"], 1)
    world.check_idle()


def test_two_decode_engines_share_one_prefill_engine_and_nothing_else() -> None:
    world = World("P", "D", "E")
    pairs = []
    for i in range(6):
        host = "DE"[i % 2]
        received = world.fetch(host, f"t{i}", 9 + i, prompt=f"prompt {i}")
        sent = world.offer("P", f"t{i}", 9 + i, prompt=f"prompt {i}")
        world.prefill("P", sent, 9 + i)
        world.finish("P", sent)
        pairs.append((sent, received))
        world.run(0.01)
    world.until(lambda: all(s.ended == ["Sent"] and r.ended == ["Received"] for s, r in pairs), 1)
    assert world["P"].dialer.dialed.count(world["D"].address) == 1  # connections are kept
    world.check_idle()


def test_an_engine_can_be_both() -> None:
    world = World("A", "B")
    there = world.fetch("B", "there", 8, peer="A")
    back = world.fetch("A", "back", 8, peer="B", prompt="q")
    sent_there, sent_back = world.offer("A", "there", 8), world.offer("B", "back", 8, prompt="q")
    for host, sent in (("A", sent_there), ("B", sent_back)):
        world.prefill(host, sent, 8)
        world.finish(host, sent)
    world.until(lambda: all(r.ended for r in (there, back, sent_there, sent_back)), 1)
    assert (there.ended, back.ended) == (["Received"], ["Received"])
    world.check_idle()


def test_a_transfer_id_can_be_used_again_after_its_end() -> None:
    world = World("P", "D")
    for prompt in ("first", "second"):
        received = world.fetch("D", "t", 8, prompt=prompt)
        sent = world.offer("P", "t", 8, prompt=prompt)
        world.prefill("P", sent, 8)
        world.finish("P", sent)
        world.until(lambda r=received, s=sent: bool(r.ended and s.ended), 1)  # type: ignore[misc]
        assert received.ended == ["Received"]
    world.check_idle()


def test_long_block_tables_are_registered_in_parts() -> None:
    from kvpush.transfer import consumer_side

    parts = consumer_side._parts((tuple(range(0, 60_000, 2)),))
    assert len(parts) == 3
    assert all(sum(len(table) for table in part) <= 60 * 1024 for part in parts)


def test_integrity_digests_agree_over_chunks_and_partial_blocks() -> None:
    world = World("P", "D", integrity=True)
    received = world.fetch("D", "t", 18, first_token=BLOCK)
    sent = world.offer("P", "t", 18)
    world.run(0.02)
    for upto in (9, 18):
        world.prefill("P", sent, upto)
        world.run(0.02)
    world.finish("P", sent)
    world.until(lambda: received.ended == ["Received"] and sent.ended == ["Sent"], 1)
    assert world["D"].core.counters.get("integrity", "ok") == 1
    world.check_idle()


def test_digests_that_p_does_not_send_are_missed_visibly() -> None:
    world = World("P")
    world.start("D", integrity=True)
    received = world.fetch("D", "t", 8)
    sent = world.offer("P", "t", 8)
    world.prefill("P", sent, 8)
    world.finish("P", sent)
    world.until(lambda: received.ended == ["Received"] and sent.ended == ["Sent"], 1)
    assert world["D"].core.counters.get("integrity", "not_sent") == 1


def test_what_happened_is_recorded() -> None:
    world = World("P", "D")
    received = world.fetch("D", "t", 8)
    sent = world.offer("P", "t", 8)
    world.prefill("P", sent, 8)
    world.finish("P", sent)
    world.until(lambda: received.ended == ["Received"] and sent.ended == ["Sent"], 1)
    there = world["P"].core.records.ended[0]
    moments = ["known", "matched", "computed", "first_write", "last_write", "landed", "committed"]
    assert [moment for moment in moments if moment not in there.times_s] == []
    times = [there.times_s[moment] for moment in moments[2:]]
    assert times == sorted(times)
    assert "prefilled" in there.times_s
    assert (there.num_tokens, there.outcome) == (8, "sent")
    assert there.num_bytes > 0
    assert there.num_writes > 0
    here = world["D"].core.records.ended[0]
    times = [here.times_s[moment] for moment in ("registered", "accepted", "commit_seen", "received")]
    assert times == sorted(times)
    assert there.times_s["matched"] <= here.times_s["accepted"]
    assert there.times_s["committed"] <= here.times_s["commit_seen"]
    assert here.times_s["registered"] <= there.times_s["matched"]
    assert (here.transfer_id, here.num_tokens, here.outcome) == ("t", 8, "received")
    assert len(world["P"].core.records) == len(world["D"].core.records) == 0
    assert failure(received) == ""


def _prompt(num_tokens: int, prompt: str = "p"):  # type: ignore[no-untyped-def]
    from transfer_world import identity

    return identity(prompt, num_tokens)
