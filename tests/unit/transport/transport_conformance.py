"""What every transport must do; run against the simulated one and against NIXL between processes.

A rig is a writer in this process and a target that may be in another one, each with one registered buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import pytest

from kvpush.plan.runs import Runs
from kvpush.transport.base import Region, Transport, TransportError, WriteHandle

SIZE = 4 << 20
NOTICE_S = 2.0


class Rig(Protocol):
    writer: Transport
    writer_address: int
    writer_memory: np.ndarray
    target_name: str
    target_address: int

    def target(self, what: str, *args: Any) -> Any:
        """Calls a method of the far transport; also `read` (first, end), `fill` (value)."""

    def wait(self, condition: Callable[[], bool], limit_s: float = 10.0) -> None:
        """Lets time pass until the condition holds; fails the test at the limit."""

    def pause(self, seconds: float) -> None:
        """Lets that much time pass."""

    def new_target(self) -> str:
        """Starts another target, as if the first had returned; `target` speaks to it from now on. Returns its name."""

    def stop_target(self) -> None: ...
    def resume_target(self) -> None: ...
    def kill_target(self) -> None: ...


def connected(rig: Rig) -> str:
    peer = rig.writer.connect(rig.target("metadata"))
    assert peer == rig.target_name
    return peer


def whole(rig: Rig, length: int = SIZE, offset: int = 0) -> Runs:
    return Runs.of((rig.writer_address + offset, rig.target_address + offset, length))


def finish(rig: Rig, handle: WriteHandle) -> None:
    rig.wait(lambda: rig.writer.done(handle))
    rig.writer.release(handle)


def arrived(rig: Rig, count: int) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []

    def enough() -> bool:
        found.extend(rig.target("notifications"))
        return len(found) >= count

    rig.wait(enough)
    return found


def raises_within(rig: Rig, call: Callable[[], object], limit_s: float = NOTICE_S) -> TransportError:
    caught: list[TransportError] = []

    def raised() -> bool:
        try:
            call()
        except TransportError as error:
            caught.append(error)
        return bool(caught)

    rig.wait(raised, limit_s)
    return caught[0]


class PeacefulConformance:
    """Tests that leave both sides alive. The subclass has a fixture `rig`, which they may share."""

    def test_a_write_lands_whole_and_its_notification_comes_after_the_bytes(self, rig: Rig) -> None:
        peer = connected(rig)
        for value in range(1, 8):
            rig.writer_memory[:] = value
            handle = rig.writer.write(peer, whole(rig), None, None, b"write %d" % value)
            assert handle.peer == peer
            found: list[tuple[str, bytes]] = []

            def there(handle: WriteHandle = handle, found: list[tuple[str, bytes]] = found) -> bool:
                rig.writer.done(handle)
                found.extend(rig.target("notifications"))
                return bool(found)

            rig.wait(there)
            assert (rig.target("read", 0, SIZE) == value).all()
            assert found == [(rig.writer.name, b"write %d" % value)]
            finish(rig, handle)

    def test_done_stays_true(self, rig: Rig) -> None:
        handle = rig.writer.write(connected(rig), whole(rig, 64), None, None, b"")
        rig.wait(lambda: rig.writer.done(handle))
        assert rig.writer.done(handle)
        rig.writer.release(handle)
        assert rig.writer.done(handle)

    def test_a_write_without_notification_sends_none(self, rig: Rig) -> None:
        peer = connected(rig)
        finish(rig, rig.writer.write(peer, whole(rig, 4096), None, None, b""))
        rig.writer.notify(peer, b"last")
        assert arrived(rig, 1) == [(rig.writer.name, b"last")]

    def test_many_scattered_runs_reach_their_places_and_no_others(self, rig: Rig) -> None:
        peer = connected(rig)
        rig.target("fill", 0)
        rng = np.random.default_rng(5)
        rig.writer_memory[:] = rng.integers(1, 256, SIZE, dtype=np.uint8)
        slots, size = 5000, 96
        src = rng.permutation(SIZE // 128)[:slots].astype(np.uint64) * 128
        dst = rng.permutation(SIZE // 128)[:slots].astype(np.uint64) * 128
        runs = Runs(src + rig.writer_address, dst + rig.target_address, np.full(slots, size, np.uint64))
        finish(rig, rig.writer.write(peer, runs, None, None, b"scattered"))
        assert arrived(rig, 1) == [(rig.writer.name, b"scattered")]
        expected = np.zeros(SIZE, np.uint8)
        for s, d in zip(src.tolist(), dst.tolist(), strict=True):
            expected[d : d + size] = rig.writer_memory[s : s + size]
        assert np.array_equal(rig.target("read", 0, SIZE), expected)

    def test_writes_in_flight_together_all_land(self, rig: Rig) -> None:
        peer = connected(rig)
        rig.writer_memory[:] = np.arange(SIZE, dtype=np.uint32).astype(np.uint8) ^ 0x5A
        rig.target("fill", 0)
        part = SIZE // 16
        handles = [rig.writer.write(peer, whole(rig, part, i * part), None, None, b"%d" % i) for i in range(16)]
        for handle in handles:
            finish(rig, handle)
        assert sorted(payload for _, payload in arrived(rig, 16)) == sorted(b"%d" % i for i in range(16))
        assert np.array_equal(rig.target("read", 0, SIZE), rig.writer_memory)

    @pytest.mark.parametrize(
        "payload", [b"", b"\x00\xff" * 9, bytes(range(256)) * 256], ids=["empty", "bytes", "64 KiB"]
    )
    def test_messages_arrive_as_they_were_sent(self, rig: Rig, payload: bytes) -> None:
        rig.writer.notify(connected(rig), payload)
        assert arrived(rig, 1) == [(rig.writer.name, payload)]

    def test_messages_go_both_ways_once_both_know_each_other(self, rig: Rig) -> None:
        peer = connected(rig)
        assert rig.target("connect", rig.writer.metadata()) == rig.writer.name
        for i in range(5):
            rig.writer.notify(peer, b"to %d" % i)
            rig.target("notify", rig.writer.name, b"back %d" % i)
        found: list[tuple[str, bytes]] = []

        def enough() -> bool:
            found.extend(rig.writer.notifications())
            return len(found) >= 5

        rig.wait(enough)
        assert sorted(found) == [(peer, b"back %d" % i) for i in range(5)]
        assert sorted(arrived(rig, 5)) == [(rig.writer.name, b"to %d" % i) for i in range(5)]
        assert rig.writer.notifications() == []

    def test_connecting_again_is_the_same_connection(self, rig: Rig) -> None:
        metadata = rig.target("metadata")
        assert {rig.writer.connect(metadata) for _ in range(3)} == {rig.target_name}
        rig.writer.notify(rig.target_name, b"once")
        assert arrived(rig, 1) == [(rig.writer.name, b"once")]

    def test_a_forgotten_peer_is_unknown_until_it_is_connected_again(self, rig: Rig) -> None:
        peer = connected(rig)
        rig.writer.disconnect(peer)
        rig.writer.disconnect(peer)
        rig.writer.disconnect("never seen")
        assert not rig.writer.connected(peer)
        assert not rig.writer.connected("never seen")
        for call in (
            lambda: rig.writer.notify(peer, b"x"),
            lambda: rig.writer.write(peer, whole(rig, 64), None, None, b"x"),
        ):
            with pytest.raises(TransportError, match="not connected") as caught:
                call()
            assert caught.value.peer == peer
        finish(rig, rig.writer.write(connected(rig), whole(rig, 64), None, None, b"again"))
        assert arrived(rig, 1) == [(rig.writer.name, b"again")]

    def test_an_unknown_peer_is_named(self, rig: Rig) -> None:
        for call in (
            lambda: rig.writer.notify("nobody", b"x"),
            lambda: rig.writer.write("nobody", whole(rig, 64), None, None, b"x"),
        ):
            with pytest.raises(TransportError, match="nobody") as caught:
                call()
            assert caught.value.peer == "nobody"

    @pytest.mark.parametrize("side", ["source", "target"])
    @pytest.mark.parametrize(("offset", "length"), [(SIZE - 32, 64), (-64, 64), (SIZE + (1 << 30), 8)])
    def test_a_run_outside_the_registered_memory_cannot_be_posted(
        self, rig: Rig, side: str, offset: int, length: int
    ) -> None:
        peer = connected(rig)
        good = (rig.writer_address, rig.target_address, 64)
        bad = (rig.writer_address + offset, rig.target_address, length)
        if side == "target":
            bad = (rig.writer_address, rig.target_address + offset, length)
        with pytest.raises(TransportError) as caught:
            rig.writer.write(peer, Runs.of(good, bad), None, None, b"bad")
        assert caught.value.peer == peer
        assert not caught.value.may_land
        finish(rig, rig.writer.write(peer, Runs.of(good), None, None, b"good"))
        assert arrived(rig, 1) == [(rig.writer.name, b"good")]

    def test_a_write_needs_runs_and_a_handle_must_be_ones_own(self, rig: Rig) -> None:
        peer = connected(rig)
        with pytest.raises(ValueError, match="at least one run"):
            rig.writer.write(peer, Runs.of(), None, None, b"x")
        with pytest.raises(TypeError, match="not a write"):
            rig.writer.done(object())  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "metadata", [b"", b"\x00", b"\x81\xa4type\xa1x", bytes(500), b"\xff" * 70_000], ids=lambda m: f"{len(m)} bytes"
    )
    def test_what_is_no_metadata_is_refused(self, rig: Rig, metadata: bytes) -> None:
        with pytest.raises(TransportError, match="metadata"):
            rig.writer.connect(metadata)

    def test_cut_and_changed_metadata_of_a_connected_peer_are_refused_and_harm_nothing(self, rig: Rig) -> None:
        peer = connected(rig)
        metadata = rig.target("metadata")
        for broken in (
            metadata[:-1],
            metadata[:40],
            metadata[: len(metadata) // 2] + b"\xff" + metadata[len(metadata) // 2 :],
        ):
            with pytest.raises(TransportError):
                rig.writer.connect(broken)
        finish(rig, rig.writer.write(peer, whole(rig, 64), None, None, b"unharmed"))
        assert arrived(rig, 1) == [(rig.writer.name, b"unharmed")]

    def test_ones_own_metadata_is_refused(self, rig: Rig) -> None:
        with pytest.raises(TransportError, match="own"):
            rig.writer.connect(rig.writer.metadata())

    def test_releasing_never_raises_and_later_writes_work(self, rig: Rig) -> None:
        peer = connected(rig)
        handle = rig.writer.write(peer, whole(rig), None, None, b"")
        rig.writer.release(handle)
        rig.writer.release(handle)
        finish(rig, rig.writer.write(peer, whole(rig, 64), None, None, b"later"))
        assert (rig.writer.name, b"later") in arrived(rig, 1)


class FatalConformance:
    """Tests that end one side; each needs a fixture `rig` of its own."""

    def test_a_killed_peer_fails_its_writes_and_messages_in_time(self, rig: Rig) -> None:
        peer = connected(rig)
        rig.stop_target()
        handles = [rig.writer.write(peer, whole(rig), None, None, b"lost") for _ in range(3)]
        rig.pause(0.05)
        assert [rig.writer.done(handle) for handle in handles] == [False] * 3
        rig.kill_target()
        for handle in handles:
            error = raises_within(rig, lambda handle=handle: rig.writer.done(handle))
            assert error.peer == peer
            assert not error.may_land
            with pytest.raises(TransportError):
                rig.writer.done(handle)
            rig.writer.release(handle)
        assert raises_within(rig, lambda: rig.writer.notify(peer, b"x")).peer == peer
        error = raises_within(rig, lambda: rig.writer.done(rig.writer.write(peer, whole(rig), None, None, b"x")))
        assert error.peer == peer

    def test_messages_to_a_peer_killed_while_nothing_was_in_flight_fail_in_time(self, rig: Rig) -> None:
        peer = connected(rig)
        rig.writer.notify(peer, b"hello")
        assert arrived(rig, 1)
        assert rig.writer.connected(peer)
        rig.kill_target()
        assert raises_within(rig, lambda: rig.writer.notify(peer, b"x")).peer == peer
        assert not rig.writer.connected(peer)

    def test_a_peer_returns_under_a_new_name(self, rig: Rig) -> None:
        old = connected(rig)
        rig.kill_target()
        new = rig.new_target()
        assert new != old
        assert connected(rig) == new
        rig.writer_memory[:] = 77
        finish(rig, rig.writer.write(new, whole(rig), None, None, b"welcome"))
        assert arrived(rig, 1) == [(rig.writer.name, b"welcome")]
        assert (rig.target("read", 0, SIZE) == 77).all()
        raises_within(rig, lambda: rig.writer.notify(old, b"x"))
        rig.writer.disconnect(old)
        rig.writer.notify(new, b"still there")
        assert arrived(rig, 1) == [(rig.writer.name, b"still there")]

    def test_a_stopped_peer_leaves_writes_undecided_until_it_continues(self, rig: Rig) -> None:
        peer = connected(rig)
        rig.stop_target()
        rig.writer_memory[:] = 9
        handle = rig.writer.write(peer, whole(rig), None, None, b"patience")
        rig.writer.notify(peer, b"message")
        rig.pause(0.3)
        assert not rig.writer.done(handle)
        rig.resume_target()
        finish(rig, handle)
        assert sorted(arrived(rig, 2)) == [(rig.writer.name, b"message"), (rig.writer.name, b"patience")]
        assert (rig.target("read", 0, SIZE) == 9).all()

    def test_writes_in_flight_outlive_the_connection_and_stay_known(self, rig: Rig) -> None:
        peer = connected(rig)
        rig.stop_target()
        handle = rig.writer.write(peer, whole(rig), None, None, b"")
        rig.writer.disconnect(peer)
        with pytest.raises(TransportError, match="not connected"):
            rig.writer.notify(peer, b"x")
        assert not rig.writer.done(handle)
        rig.resume_target()
        finish(rig, handle)
        assert connected(rig) == peer

    def test_closing_is_final_and_can_be_repeated(self, rig: Rig) -> None:
        peer = connected(rig)
        metadata = rig.target("metadata")
        rig.stop_target()
        handle = rig.writer.write(peer, whole(rig), None, None, b"")
        name = rig.writer.name
        rig.writer.close()
        rig.writer.close()
        rig.writer.release(handle)
        rig.writer.disconnect(peer)
        assert rig.writer.name == name
        for call in (
            lambda: rig.writer.write(peer, whole(rig), None, None, b""),
            lambda: rig.writer.notify(peer, b"x"),
            lambda: rig.writer.connect(metadata),
            rig.writer.notifications,
            rig.writer.metadata,
            lambda: rig.writer.register([Region(rig.writer_address, 8)]),
        ):
            with pytest.raises(TransportError, match=r"closed|not connected"):
                call()
        rig.resume_target()
