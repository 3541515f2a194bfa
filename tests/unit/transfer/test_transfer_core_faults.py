"""The transfer core over a simulated fabric: peers that die, stop, restart or are cut off, and bytes that are wrong."""

from __future__ import annotations

import pytest
from transfer_world import TIMING, Faults, Request, World, failure

from kvpush.transfer.quarantine import Quarantine
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


# P goes


@pytest.mark.paths("direct")
def test_a_dead_producer_is_proven_gone_soon_and_its_memory_comes_back() -> None:
    world = World("P", "D", faults=SLOW)
    _, received = _writing(world)
    world.fabric.kill("P-0")
    took_s = world.until(lambda: received.ended == ["LoadFailed", "Released"], 10, step_s=0.005)
    assert took_s < TIMING.peer_timeout_s + 2
    assert "P-0" in world["D"].prover.asked
    world.check_idle("D")


@pytest.mark.paths("direct", "staged", "auto")  # a kernel does not wait for the network
def test_a_broken_connection_is_reason_enough_to_ask_for_proof() -> None:
    """D notices at its next message, long before the peer timeout."""
    world = World("P", "D", faults=SLOW)
    _, received = _writing(world)
    world.fabric.kill("P-0")
    world.run(0.1)  # the fabric tells who sends to P that it is lost
    world.cancel("D", received)
    assert world.until(lambda: received.ended == ["Released"], 10, step_s=0.005) < 0.5
    world.check_idle("D")


@pytest.mark.paths("direct")
def test_a_stopped_producer_keeps_memory_in_quarantine_until_it_goes_on() -> None:
    world = World("P", "D", faults=SLOW)
    _, received = _writing(world)
    landed = world.num_landed
    world.fabric.stop("P-0")
    world.until(lambda: received.ended == ["LoadFailed"], 10, step_s=0.01)
    assert failure(received) == "peer_lost"
    world.run(20, step_s=0.05)
    assert received.ended == ["LoadFailed"]  # silence is no proof, however long
    assert world["D"].core.quarantine.num_blocks == 4
    assert world["D"].core.counters.get("quarantines") == 1
    world.fabric.resume("P-0")
    world.until(lambda: received.ended == ["LoadFailed", "Released"], 5, step_s=0.005)
    assert world.num_landed > landed  # it did write on: into memory that was still held
    world.run(1, step_s=0.01)
    world.check_idle("D")


@pytest.mark.paths("direct")
def test_above_the_limit_nobody_gets_memory_until_the_quarantine_has_shrunk() -> None:
    world = World("P", "Q", "D", faults=SLOW, quarantine_max_blocks=3)
    _, received = _writing(world)
    world.fabric.stop("P-0")
    world.run(6, step_s=0.02)
    assert world["D"].core.quarantine == Quarantine(4, ("P:1000/pp0tp0",))
    source = world.offer("Q", "other", 8)
    refused = world.fetch("D", "other", 8, peer="Q")
    world.prefill("Q", source, 8)
    world.finish("Q", source)
    world.until(lambda: source.ended == ["Sent"], 2, step_s=0.005)  # P is told, and does not wait for its bound
    assert refused.ended == ["LoadFailed", "Released"]
    assert failure(refused) == "quarantine_full"
    assert refused.blocks is None
    world.fabric.resume("P-0")
    world.until(lambda: received.ended == ["LoadFailed", "Released"], 5, step_s=0.005)
    assert world["D"].core.quarantine == Quarantine()
    _deliver(world, "again")
    world.run(5, step_s=0.02)
    world.check_idle()


@pytest.mark.paths("direct")
def test_a_release_and_the_quarantine_that_it_ends_are_seen_together() -> None:
    """An engine that is idle afterwards takes no other step: it must not go on believing that memory is held."""
    world = World("P", "D", faults=SLOW)
    _writing(world)
    world.fabric.stop("P-0")
    world.run(6, step_s=0.02)
    core = world["D"].core
    assert core.quarantine.num_blocks == 4
    world.fabric.resume("P-0")
    for _ in range(10_000):
        world.fabric.advance(world.now_s + 0.0005)
        for host in ("P", "D"):
            world[host].core.poll(world.now_s)
        results = core.take_results()
        if results:
            assert [type(result).__name__ for result in results] == ["Released"]
            assert core.quarantine.num_blocks == 0
            return
    pytest.fail("the memory was not released")


@pytest.mark.paths("direct")
def test_what_d_had_already_is_not_counted_as_quarantined() -> None:
    world = World("P", "D", faults=SLOW)
    source = world.offer("P", "t", 16)
    world.fetch("D", "t", 16, first_token=8)
    world.prefill("P", source, 16)
    world.until(lambda: world["P"].transport.in_flight > 0, 2)
    world.fabric.stop("P-0")
    world.run(6, step_s=0.02)
    assert world["D"].core.quarantine.num_blocks == 2  # of four


@pytest.mark.paths("direct")
def test_a_stopped_producer_that_is_killed_sets_quarantined_memory_free() -> None:
    world = World("P", "D", faults=SLOW)
    _, received = _writing(world)
    world.fabric.stop("P-0")
    world.run(6, step_s=0.02)
    assert world["D"].core.quarantine.num_blocks == 4
    world.fabric.kill("P-0")
    world.until(lambda: received.ended == ["LoadFailed", "Released"], 3, step_s=0.01)
    world.run(0.2)
    world.check_idle("D")


@pytest.mark.paths("direct")
def test_what_a_dead_producer_had_sent_lands_before_its_memory_is_given_away() -> None:
    """Its process is proven gone, but behind a cut its kernel still sends: only the connection's end frees memory."""
    world = World("P", "D", faults=SLOW)
    _, received = _writing(world)
    world.fabric.cut("P-0", "D-0", noticed_by_writers=False)
    world.run(0.5, step_s=0.01)
    landed = world.num_landed
    world.fabric.kill("P-0", lingers=True)
    world.run(20, step_s=0.05)
    assert "P-0" in world["D"].prover.asked
    assert received.ended == ["LoadFailed"]
    assert world.num_landed == landed
    world.fabric.heal("P-0", "D-0")
    world.until(lambda: received.ended == ["LoadFailed", "Released"], 5, step_s=0.005)
    assert world.num_landed > landed
    world.check_idle("D")


@pytest.mark.paths("direct")
def test_the_end_of_a_connection_is_seen_although_another_producer_has_taken_its_place() -> None:
    world = World("P", "D", faults=SLOW)
    _, received = _writing(world)
    world.fabric.cut("P-0", "D-0", noticed_by_writers=False)
    world.run(0.5, step_s=0.01)
    world.fabric.kill("P-0", lingers=True)
    world.start("P")
    world.run(20, step_s=0.05)
    _deliver(world, "new")
    assert received.ended == ["LoadFailed"]
    landed = world.num_landed
    world.fabric.heal("P-0", "D-0")
    world.until(lambda: received.ended == ["LoadFailed", "Released"], 5, step_s=0.005)
    assert world.num_landed > landed
    world.check_idle()


@pytest.mark.paths("direct")
def test_a_producer_that_restarts_serves_new_requests_and_proves_the_old_ones_dead() -> None:
    world = World("P", "D", faults=SLOW)
    _, received = _writing(world)
    world.fabric.kill("P-0")
    world.start("P")
    world.until(lambda: received.ended == ["LoadFailed", "Released"], 10, step_s=0.005)
    _deliver(world, "new")
    world.check_idle()


def test_the_cached_connection_to_a_producer_that_restarted_is_made_anew() -> None:
    world = World("P", "D")
    _deliver(world, "old")
    world.fabric.kill("P-0")
    world.start("P")
    world.run(0.2)
    _deliver(world, "new")
    world.check_idle()


def test_a_load_from_nobody_fails_as_soon_as_that_is_known() -> None:
    world = World("D")
    received = world.fetch("D", "t", 8)
    world.until(lambda: received.ended == ["LoadFailed", "Released"], 1)
    assert failure(received) == "handshake timeout"
    world.check_idle()


# D goes


@pytest.mark.paths("direct", "staged", "auto")  # a kernel does not wait for the network
@pytest.mark.parametrize("restarts", [False, True])
def test_a_dead_consumer_costs_p_nothing_but_its_own_transfer(restarts: bool) -> None:
    world = World("P", "D", faults=SLOW)
    sent, _ = _writing(world)
    world.fabric.kill("D-0")
    if restarts:
        world.start("D")
    world.until(lambda: sent.ended == ["Sent"], 10, step_s=0.005)
    if restarts:
        _deliver(world, "new")
    world.run(1, step_s=0.01)
    world.check_idle("P")
    assert len(world["P"].free) == 31


@pytest.mark.paths("direct", "staged", "auto")  # a kernel does not wait for the network
def test_a_stopped_consumer_does_not_stop_p() -> None:
    world = World("P", "D", faults=SLOW)
    sent, received = _writing(world)
    world.fabric.stop("D-0")
    bound_s = TIMING.write_timeout_s + TIMING.abort_drain_s + TIMING.peer_timeout_s + 1
    world.until(lambda: sent.ended == ["Sent"], bound_s, step_s=0.01)
    world.fabric.resume("D-0")
    world.until(lambda: received.ended == ["LoadFailed", "Released"], 5, step_s=0.005)
    world.run(1, step_s=0.01)
    world.check_idle()


# The link goes


def test_a_cut_that_both_notice_ends_the_transfer_on_both_sides() -> None:
    world = World("P", "D", faults=SLOW)
    sent, received = _writing(world)
    world.fabric.cut("P-0", "D-0")
    world.until(lambda: sent.ended == ["Sent"], 10, step_s=0.005)
    world.until(lambda: received.ended[:1] == ["LoadFailed"], 10, step_s=0.005)
    world.fabric.heal("P-0", "D-0")
    world.until(lambda: received.ended == ["LoadFailed", "Released"], 5, step_s=0.005)
    world.run(1, step_s=0.01)
    world.check_idle()
    _deliver(world, "again")


@pytest.mark.paths("direct")
def test_a_silent_cut_is_found_by_time_and_memory_waits_for_its_end() -> None:
    world = World("P", "D", faults=SLOW)
    sent, received = _writing(world)
    world.fabric.cut("P-0", "D-0", noticed_by_writers=False)
    world.until(lambda: received.ended == ["LoadFailed"], 10, step_s=0.01)
    world.until(lambda: sent.ended == ["Sent"], 10, step_s=0.01)
    world.run(10, step_s=0.05)
    assert received.ended == ["LoadFailed"]
    world.fabric.heal("P-0", "D-0")
    world.until(lambda: received.ended == ["LoadFailed", "Released"], 5, step_s=0.005)
    world.run(1, step_s=0.01)
    world.check_idle()


def test_a_cut_before_the_first_byte_is_survived_by_registering_again() -> None:
    world = World("P", "D")
    received = world.fetch("D", "t", 8)
    world.run(0.02)
    world.fabric.cut("P-0", "D-0")
    world.run(0.1)
    world.fabric.heal("P-0", "D-0")
    sent = world.offer("P", "t", 8)
    world.prefill("P", sent, 8)
    world.finish("P", sent)
    world.until(lambda: bool(sent.ended and received.ended[-1:] in (["Received"], ["Released"])), 10, step_s=0.005)
    world.run(1, step_s=0.01)
    world.check_idle()


@pytest.mark.paths("direct", "staged", "auto")  # a kernel does not wait for the network
@pytest.mark.parametrize("seed", range(5))
def test_messages_that_get_lost_or_come_twice_change_nothing(seed: int) -> None:
    world = World("P", "D", seed=seed, faults=Faults(drop=0.3, duplicate=0.3))
    pairs = []
    for i in range(8):
        received = world.fetch("D", f"t{i}", 8)
        sent = world.offer("P", f"t{i}", 8)
        world.prefill("P", sent, 8)
        world.finish("P", sent)
        pairs.append((sent, received))
    ends = (["Received"], ["Released"])
    world.until(lambda: all(s.ended and r.ended[-1:] in ends for s, r in pairs), 60, step_s=0.005)
    assert sum(r.ended == ["Received"] for _, r in pairs) >= 6
    world.run(TIMING.rendezvous_timeout_s + 1, step_s=0.02)
    world.check_idle()


# Who answers


def test_a_producer_that_cannot_answer_never_gets_a_registration() -> None:
    """P does not connect to D: it could write nothing, but say nothing either, and the memory would be lost."""
    world = World("P")
    world.start("D", fingerprint="other")  # P refuses D; D does not refuse P
    received = world.fetch("D", "t", 8)
    took_s = world.until(lambda: received.ended == ["LoadFailed", "Released"], 5, step_s=0.01)
    assert failure(received) == "unreachable"
    assert took_s <= TIMING.first_answer_timeout_s + 0.3
    assert world["P"].core.counters.get("messages_received", "register") == 0
    assert world["P"].core.counters.get("handshakes_failed", "handshake refused") > 0
    world.run(0.5, step_s=0.01)
    world.check_idle()


def test_a_wrong_engine_id_fails_its_own_load_only() -> None:
    world = World("P", "D")
    _deliver(world, "warm")
    good, bad = world.fetch("D", "good", 8), world.fetch("D", "bad", 8, engine_id="engine-of-somebody-else")
    right = world.fetch("D", "right", 8, engine_id=world["P"].engine_id)
    world.run(0.1)
    assert failure(bad) == "handshake wrong_engine"
    assert world["D"].core.counters.get("handshakes_failed", "handshake wrong_engine") == 1
    assert world["D"].core.counters.total("disconnects") == 0
    for transfer, received in (("good", good), ("right", right)):
        sent = world.offer("P", transfer, 8)
        world.prefill("P", sent, 8)
        world.finish("P", sent)
        world.until(lambda r=received, s=sent: bool(r.ended and s.ended), 1)  # type: ignore[misc]
        assert received.ended == ["Received"]
    world.check_idle()


def test_an_engine_id_that_came_true_by_a_restart_is_believed() -> None:
    world = World("P", "D")
    _deliver(world, "old")
    world.fabric.set_faults(Faults(notice_s=(5, 5)))
    world.fabric.kill("P-0")
    world.start("P")  # D has not noticed: its cached connection is to the old life
    received = world.fetch("D", "t", 8, engine_id=world["P"].engine_id)
    sent = world.offer("P", "t", 8)
    world.prefill("P", sent, 8)
    world.finish("P", sent)
    world.until(lambda: received.ended == ["Received"] and sent.ended == ["Sent"], 1)
    world.check_idle()


def test_closing_a_core_ends_all_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("P")
    core = world["P"].core
    closed = []
    for name, part in (("dialer", world["P"].dialer), ("prover", world["P"].prover)):
        monkeypatch.setattr(part, "close", lambda name=name: closed.append(name) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        core.close()
    assert sorted(closed) == ["dialer", "prover"]
    with pytest.raises(TransportError, match="closed"):
        world["P"].transport.notifications()


# Addresses that do not lead anywhere


def test_a_producer_that_cannot_reach_d_costs_a_few_seconds_once(caplog: pytest.LogCaptureFixture) -> None:
    """D's side_channel_host is wrong: P is asked, and its answer finds no way back."""
    world = World("P", "D")
    world["P"].dialer.unreachable.add("D")
    first = world.fetch("D", "t", 8)
    took_s = world.until(lambda: first.ended == ["LoadFailed", "Released"], 60, step_s=0.01)
    assert took_s < TIMING.first_answer_timeout_s + 0.3
    assert failure(first) == "unreachable"
    assert "transfer t failed: unreachable: P:1000/pp0tp0 can be reached, but" in caplog.text
    second = world.fetch("D", "u", 8)
    took_s = world.until(lambda: second.ended == ["LoadFailed", "Released"], 60, step_s=0.001)
    assert took_s < 0.01
    world["P"].dialer.unreachable.clear()
    world.run(21, step_s=0.05)  # both have forgotten
    _deliver(world, "v")
    world.run(6, step_s=0.05)
    world.check_idle()


def test_a_producer_that_cannot_be_reached_costs_one_handshake() -> None:
    world = World("P", "D")
    world["D"].dialer.unreachable.add("P")
    for transfer in ("t", "u", "v"):
        request = world.fetch("D", transfer, 8)
        world.until(lambda request=request: request.ended == ["LoadFailed", "Released"], 1)
        assert failure(request) == "handshake timeout"
    assert len(world["D"].dialer.dialed) == 1


# Peers that die while nothing is shared with them


def test_peers_that_die_idle_are_dropped_at_both_sides() -> None:
    for survivor, dead in (("P", "D"), ("D", "P")):
        world = World("P", "D")
        _deliver(world, "t")
        core, agent = world[survivor].core, world[dead].agent
        assert core._connections.answer(agent) is not None
        world.run(60, step_s=0.1)
        assert core._connections.answer(agent) is not None  # it lives, and says so
        world.fabric.kill(agent)
        world.run(45, step_s=0.1)
        assert core._connections.answer(agent) is None
        assert core._connections.known(agent) is None
        world.start(dead)
        _deliver(world, "u")


def test_a_peer_that_is_stopped_while_idle_is_found_again_when_it_continues() -> None:
    world = World("P", "D")
    _deliver(world, "t")
    world.fabric.stop("P-0")
    world.run(45, step_s=0.1)
    assert world["D"].core._connections.answer(world["P"].agent) is None
    world.fabric.resume("P-0")
    _deliver(world, "u")
