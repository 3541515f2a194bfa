"""Pieces that one kernel stores into the consumer's cache: mapping, the fences around it, and what takes its place."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from transfer_world import Faults, Request, World, failure

from kvpush.protocol.ids import AgentName
from kvpush.transfer.packing.base import PeerUnavailable
from kvpush.transfer.peer_caches import PeerCaches

pytestmark = [pytest.mark.unit, pytest.mark.paths("peer")]


def _deliver(world: World, transfer: str, num_tokens: int = 30) -> None:
    received = world.fetch("D", transfer, num_tokens)
    sent = world.offer("P", transfer, num_tokens)
    world.prefill("P", sent, num_tokens)
    world.finish("P", sent)
    world.until(lambda: received.ended == ["Received"] and sent.ended == ["Sent"], 10, step_s=0.001)


def _storing(world: World) -> tuple[Request, Request]:
    """A kernel is under way that takes long."""
    world.copy_s = (1.0, 1.0)
    received, sent = world.fetch("D", "t", 30), world.offer("P", "t", 30)
    world.run(0.02)
    world.prefill("P", sent, 30)
    world.run(0.02)
    assert world.mapped[0].open == 1
    return received, sent


def test_one_kernel_takes_a_whole_piece_and_nothing_is_planned() -> None:
    world = World("P", "D")
    _deliver(world, "t")
    world.check_idle()
    counters = world["P"].core.counters
    assert counters.get("pieces", "peer") == counters.get("writes") == 1
    assert world["P"].transport.in_flight == 0
    assert len(world.mapped) == 1
    _deliver(world, "next")
    assert len(world.mapped) == 1  # mapped once


def test_a_stopped_producer_s_kernel_still_lands_where_memory_is_held_for_it() -> None:
    world = World("P", "D")
    received, _ = _storing(world)
    world.fabric.stop("P-0")
    landed = world.num_landed
    world.run(1.2, step_s=0.01)
    assert world.num_landed > landed  # a stop does not reach the device; the world checks whose memory that is
    world.until(lambda: received.ended == ["LoadFailed"], 5, step_s=0.01)
    world.run(5, step_s=0.02)
    assert received.ended == ["LoadFailed"]  # in quarantine: P may have decided on another piece
    world.fabric.resume("P-0")
    world.until(lambda: received.ended == ["LoadFailed", "Released"], 10, step_s=0.01)


def test_blocks_are_preempted_only_when_no_kernel_reads_them_or_the_attempt_is_poisoned() -> None:
    world = World("P", "D")
    received, sent = _storing(world)
    assert world.preempt("P", sent) is True
    world.until(lambda: received.ended == ["LoadFailed"], 1)
    assert failure(received) == "poisoned"
    world.until(lambda: received.ended == ["LoadFailed", "Released"], 2)
    world.finish("P", sent, "aborted")
    world.run(1)
    world.check_idle()


def test_a_mapping_goes_with_its_connection_but_not_before_its_kernels_have_ended() -> None:
    world = World("P", "D")
    _storing(world)
    [mapping] = world.mapped
    world["P"].transport.lose("D-0")
    world["P"].core._connections.drop(AgentName("D-0"), "lost")
    world.run(0.1)
    assert not mapping.closed
    world.run(1.2, step_s=0.01)
    assert mapping.closed


def test_a_restarted_consumer_is_mapped_anew() -> None:
    world = World("P", "D")
    _deliver(world, "t")
    world.fabric.kill("D-0")
    world.start("D")
    world.run(0.3)
    _deliver(world, "next")
    assert len(world.mapped) == 2
    assert world.mapped[0].closed
    assert not world.mapped[1].closed


@pytest.mark.parametrize("error", [PeerUnavailable("another host"), RuntimeError("driver")])
def test_where_no_cache_can_be_mapped_pieces_are_written(
    error: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "kvpush")
    world = World("P", "D")
    peers = world["P"].core._producer_side._pieces._peers
    assert peers is not None

    def refuse(answer: object) -> object:
        raise error

    monkeypatch.setattr(peers, "_open_peer", refuse)
    _deliver(world, "t")
    assert world["P"].core.counters.get("pieces", "direct") == 1
    assert str(error) in caplog.text
    world.check_idle()


def test_a_device_that_fails_loses_the_piece() -> None:
    world = World("P", "D")
    received, sent = _storing(world)
    writer = world["P"].core._producer_side._pieces._writer

    class Broken:
        def query(self) -> bool:
            raise RuntimeError("an illegal memory access was encountered")

    writer._in_flight[0].event = Broken()
    world.mapped[0].open = 0
    world.until(lambda: received.ended == ["LoadFailed"], 5, step_s=0.005)
    assert world["P"].core.counters.get("writes_lost") == 1
    assert sent.ended == []


def test_mapping_takes_a_thread_and_nobody_waits_for_it() -> None:
    world = World("P", "D", faults=Faults())
    gate, closed = threading.Event(), threading.Event()

    class Cache:
        def close(self) -> None:
            closed.set()

    def open_peer(answer: object) -> Cache:
        assert gate.wait(10)
        return Cache()

    writer, agent = PeerCaches(open_peer), AgentName("D-0")  # type: ignore[arg-type]
    answer = world["D"].answer
    writer.meet(agent, answer)
    writer.meet(agent, answer)
    assert not writer.ready(agent)
    gate.set()
    deadline_s = time.monotonic() + 10
    while not writer.ready(agent):
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    writer.drop(agent)
    writer.sweep(lambda _: True)
    assert not closed.wait(0.05)  # a kernel is still under way
    writer.sweep(lambda _: False)
    assert closed.wait(10)
    assert not writer.ready(agent)
    gate.clear()
    closed.clear()
    writer.meet(agent, answer)
    writer.drop(agent)  # before it is mapped: unmapped as soon as it is
    gate.set()
    assert closed.wait(10)
    writer.close()


def test_tables_that_are_too_short_are_refused() -> None:
    world = World("P", "D")
    _deliver(world, "t")
    received, sent = world.fetch("D", "u", 8), world.offer("P", "u", 8)
    world.run(0.02)
    key = next(iter(world["P"].core._producer_side._producer._sends._sends))
    world["P"].core._producer_side._pieces._tables[key] = (2, np.zeros(1, np.int64))
    world.prefill("P", sent, 8)
    world.finish("P", sent)
    world.until(lambda: received.ended == ["LoadFailed", "Released"], 2)
    assert failure(received) == "post_failed"
