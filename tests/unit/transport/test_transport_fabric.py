"""The simulated fabric: time, memory, writes and messages on a healthy link."""

from __future__ import annotations

import numpy as np
import pytest
from fabric_sides import SIZE, SLOW, done_by, pair, post, side
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpush.plan.runs import Runs
from kvpush.transport.base import Region, TransportError
from kvpush.transport.memory import Faults, MemoryFabric, MemoryTransport

pytestmark = pytest.mark.unit


# Time


def test_nothing_happens_but_in_advance_and_time_cannot_go_back() -> None:
    fabric, p, d = pair(SLOW)
    assert fabric.next_event_s() is None
    handle = post(p, d)
    assert 0 < fabric.next_event_s() <= 1.0
    assert not p.agent.done(handle)
    assert not d.memory.any()
    fabric.advance(5.0)
    assert fabric.now_s == 5.0
    assert p.agent.done(handle)
    assert np.array_equal(d.memory, p.memory)
    with pytest.raises(ValueError, match="cannot go back"):
        fabric.advance(4.9)


def test_stepping_from_event_to_event_ends() -> None:
    fabric, p, d = pair(SLOW)
    handle = post(p, d, b"n")
    steps = 0
    while (at_s := fabric.next_event_s()) is not None:
        fabric.advance(at_s)
        p.agent.done(handle)
        steps += 1
        assert steps < 50
    assert p.agent.done(handle)
    assert d.agent.notifications() == [("P", b"n")]


def history(seed: int) -> list:
    fabric, p, d = pair(Faults(drop=0.2, duplicate=0.2, fail_post=0.1, fail_write=0.2, fail_write_late=0.1), seed)
    seen: list = []
    fabric.on_land = lambda *landed: seen.append((fabric.now_s, *landed))
    handles = []
    for i in range(40):
        try:
            handles.append(post(p, d, b"w%d" % i, 64))
        except TransportError as error:
            seen.append(str(error))
        p.agent.notify("D", b"m%d" % i)
        for j, handle in enumerate(handles):
            try:
                seen.append((j, p.agent.done(handle)))
            except TransportError as error:
                seen.append((j, str(error), error.may_land))
        fabric.advance(fabric.now_s + 30e-6)
        seen.append(d.agent.notifications())
    return seen


def test_one_seed_is_one_history() -> None:
    assert history(7) == history(7)
    assert history(7) != history(8)


# Writes


def test_bytes_land_in_pieces_over_the_duration_of_the_write() -> None:
    fabric, p, d = pair(SLOW)
    post(p, d)
    counts = []
    for i in range(1, 11):
        fabric.advance(i * 0.1)
        counts.append(int((d.memory != 0).sum()))
    assert counts == sorted(counts)
    assert len(set(counts)) > 3
    assert counts[-1] == SIZE


def test_pieces_land_in_any_order() -> None:
    """A target that looks at the last byte only, as with ordered writes, is wrong for some seed."""
    last_is_last = set()
    for seed in range(20):
        fabric, p, d = pair(SLOW, seed)
        post(p, d)
        while not d.memory[-1]:
            fabric.advance(fabric.next_event_s())
        last_is_last.add(bool(d.memory.all()))
    assert last_is_last == {True, False}


def test_the_source_is_read_when_its_bytes_land() -> None:
    """So that giving source blocks back too early shows at the target."""
    fabric, p, d = pair(SLOW)
    p.memory[:] = 1
    handle = post(p, d)
    fabric.advance(0.5)
    p.memory[:] = 2
    done_by(fabric, p, handle)
    assert set(d.memory.tolist()) == {1, 2}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 15), st.integers(1, 64)), min_size=1, max_size=8), st.integers(1, 20))
def test_every_byte_of_the_runs_lands_once_however_it_is_cut(slots: list[tuple[int, int]], pieces: int) -> None:
    fabric, p, d = pair(Faults(pieces=pieces))
    slots = list(dict(slots).items())
    landed: list[tuple[int, int]] = []
    fabric.on_land = lambda writer, target, address, length: landed.append((address - d.address, length))
    runs = Runs.of(*[(p.address + 64 * (15 - slot), d.address + 64 * slot, length) for slot, length in slots])
    handle = p.agent.write("D", runs, None, None, b"")
    done_by(fabric, p, handle)
    expected = np.zeros(SIZE, np.uint8)
    for slot, length in slots:
        expected[64 * slot : 64 * slot + length] = p.memory[64 * (15 - slot) : 64 * (15 - slot) + length]
    assert np.array_equal(d.memory, expected)
    touched = [byte for at, length in landed for byte in range(at, at + length)]
    assert len(touched) == len(set(touched)) == runs.num_bytes


def test_the_watcher_sees_who_wrote_where() -> None:
    fabric, p, d = pair(Faults(pieces=1))
    landed = []
    fabric.on_land = lambda *args: landed.append(args)
    done_by(fabric, p, post(p, d, length=100))
    assert landed == [("P", "D", d.address, 100)]


def test_an_error_of_the_watcher_stops_the_simulation() -> None:
    fabric, p, d = pair()

    def refuse(*landed: object) -> None:
        raise AssertionError("not yours")

    fabric.on_land = refuse
    post(p, d)
    with pytest.raises(AssertionError, match="not yours"):
        fabric.advance(1.0)


def test_a_notification_leaves_only_when_the_owner_polls() -> None:
    fabric, p, d = pair()
    handle = post(p, d, b"n")
    fabric.advance(10.0)
    assert d.memory.any()
    assert d.agent.notifications() == []
    assert p.agent.done(handle)
    assert d.agent.notifications() == []
    fabric.advance(11.0)
    assert d.agent.notifications() == [("P", b"n")]


def test_a_released_write_goes_on_landing_and_notifies_nobody() -> None:
    fabric, p, d = pair(SLOW)
    handle = post(p, d, b"n")
    p.agent.release(handle)
    assert p.agent.in_flight == 0
    with pytest.raises(ValueError, match="released"):
        p.agent.done(handle)
    fabric.advance(2.0)
    assert d.memory.all()
    assert d.agent.notifications() == []


def test_ending_an_agent_does_not_end_its_writes() -> None:
    fabric, p, d = pair(SLOW)
    post(p, d)
    p.agent.close()
    d.agent.close()
    fabric.advance(2.0)
    assert d.memory.all()


@pytest.mark.parametrize("device", [None, 0, 1])
def test_a_region_of_another_device_is_no_target(device: int | None) -> None:
    fabric = MemoryFabric()
    p, agent = side(fabric, "P"), MemoryTransport(fabric, "D")
    address = agent.map(np.zeros(SIZE, np.uint8))
    agent.register([Region(address, SIZE, device=1)])
    p.agent.connect(agent.metadata())
    runs = Runs.of((p.address, address, 8))
    if device == 1:
        p.agent.write("D", runs, None, device, b"")
    else:
        with pytest.raises(TransportError, match="registered memory of D"):
            p.agent.write("D", runs, None, device, b"")


def test_memory_registered_after_the_metadata_was_taken_is_no_target() -> None:
    fabric, p, d = pair()
    more = d.agent.map(np.zeros(SIZE, np.uint8))
    d.agent.register([Region(more, SIZE)])
    runs = Runs.of((p.address, more, 8))
    with pytest.raises(TransportError, match="registered memory of D"):
        p.agent.write("D", runs, None, None, b"")
    p.agent.disconnect("D")
    p.agent.connect(d.agent.metadata())
    done_by(fabric, p, p.agent.write("D", runs, None, None, b""))


def test_a_run_over_two_adjoining_regions_is_refused() -> None:
    fabric = MemoryFabric()
    p, agent = side(fabric, "P"), MemoryTransport(fabric, "D")
    address = agent.map(np.zeros(SIZE, np.uint8))
    agent.register([Region(address, 512), Region(address + 512, 512)])
    p.agent.connect(agent.metadata())
    p.agent.write("D", Runs.of((p.address, address + 8, 504)), None, None, b"")
    with pytest.raises(TransportError, match="504 bytes at"):
        p.agent.write("D", Runs.of((p.address, address + 9, 504)), None, None, b"")


# Memory and names


def test_no_two_agents_overlap_and_real_addresses_may_be_used() -> None:
    fabric = MemoryFabric()
    a, b = side(fabric, "a"), side(fabric, "b")
    assert abs(a.address - b.address) >= SIZE + 4096
    memory = np.zeros(SIZE, np.uint8)
    real = memory.__array_interface__["data"][0]
    assert a.agent.map(memory, real) == real
    with pytest.raises(ValueError, match="overlap memory of a"):
        b.agent.map(np.zeros(8, np.uint8), real + SIZE - 1)
    after = b.agent.map(np.zeros(8, np.uint8))
    assert after >= real + SIZE + 4096


@pytest.mark.parametrize(
    "memory", [np.zeros(8, np.int8), np.zeros((2, 4), np.uint8), np.zeros(8, np.uint8)[::2], np.zeros(0, np.uint8)]
)
def test_only_plain_bytes_can_be_mapped(memory: np.ndarray) -> None:
    with pytest.raises(ValueError, match="array of bytes"):
        MemoryTransport(MemoryFabric(), "a").map(memory)


def test_memory_that_is_not_mapped_cannot_be_registered() -> None:
    _fabric, p, d = pair()
    for region in (Region(16, 8), Region(p.address, SIZE + 1), Region(d.address, 8)):
        with pytest.raises(TransportError, match="no memory of P"):
            p.agent.register([region])


@pytest.mark.parametrize("name", ["", "x" * 256, "ä" * 128])
def test_names_have_1_to_255_bytes(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 255 bytes"):
        MemoryTransport(MemoryFabric(), name)


def test_a_name_is_used_once() -> None:
    fabric, _p, _d = pair()
    fabric.kill("D")
    with pytest.raises(ValueError, match="new life needs a new name"):
        MemoryTransport(fabric, "D")


# Messages


def sent(faults: Faults, count: int = 400, seed: int = 1) -> list[int]:
    fabric, p, d = pair(faults, seed)
    for i in range(count):
        p.agent.notify("D", b"%d" % i)
    fabric.advance(1.0)
    return [int(payload) for _, payload in d.agent.notifications()]


def test_messages_overtake_each_other_but_all_arrive() -> None:
    got = sent(Faults())
    assert got != sorted(got)
    assert sorted(got) == list(range(400))


def test_an_even_delay_keeps_their_order() -> None:
    assert sent(Faults(message_delay_s=(1e-4, 1e-4))) == list(range(400))


def test_messages_can_be_dropped_and_doubled() -> None:
    dropped = sent(Faults(drop=0.25))
    assert 250 < len(dropped) < 350
    assert len(set(dropped)) == len(dropped)
    doubled = sent(Faults(duplicate=0.25))
    assert set(doubled) == set(range(400))
    assert 450 < len(doubled) < 550
    assert sent(Faults(drop=1.0)) == []


def test_a_message_overtakes_a_write() -> None:
    fabric, p, d = pair(SLOW)
    handle = post(p, d, b"write")
    p.agent.notify("D", b"message")
    fabric.advance(0.5)
    assert d.agent.notifications() == [("P", b"message")]
    done_by(fabric, p, handle)
    fabric.advance(fabric.now_s + 1)
    assert d.agent.notifications() == [("P", b"write")]


def test_the_most_specific_faults_count() -> None:
    fabric = MemoryFabric(0, Faults(drop=0.1))
    fabric.set_faults(Faults(drop=0.2), target="D")
    fabric.set_faults(Faults(drop=0.3), writer="P")
    fabric.set_faults(Faults(drop=0.4), "P", "D")
    rates = {(w, t): fabric.faults(w, t).drop for w in "PX" for t in "DX"}
    assert rates == {("P", "D"): 0.4, ("P", "X"): 0.3, ("X", "D"): 0.2, ("X", "X"): 0.1}
    fabric.set_faults(None, "P", "D")
    fabric.set_faults(None)
    assert fabric.faults("P", "D").drop == 0.3
    assert fabric.faults("X", "X").drop == 0.1


@pytest.mark.parametrize(
    "bad",
    [
        {"drop": -0.1},
        {"duplicate": 1.1},
        {"fail_post": 2},
        {"pieces": 0},
        {"bytes_per_s": 0},
        {"message_delay_s": (2.0, 1.0)},
        {"write_delay_s": (-1.0, 1.0)},
        {"notice_s": (0.0, float("inf"))},
    ],
    ids=lambda bad: next(iter(bad)),
)
def test_impossible_faults_are_refused_by_name(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Faults(**bad)
