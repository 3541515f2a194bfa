"""NIXL over UCX in host memory, between two processes, does what every transport must do."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpush.plan.naive import naive_moves
from kvpush.plan.runs import Runs, plan_runs
from kvpush.transport.base import TransportError
from kvpush.transport.nixl import NixlTransport

for folder in ("transport", "plan"):
    sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / folder))

from plan_cases import geometry_of  # noqa: E402
from transport_conformance import SIZE, FatalConformance, PeacefulConformance  # noqa: E402
from transport_peer import Agent, PeerProcess  # noqa: E402

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(180)]

_lives = itertools.count(1)


def fresh(role: str) -> str:
    return f"{role}-{os.getpid()}-{next(_lives)}"


class NixlRig:
    def __init__(self) -> None:
        self._here = Agent(fresh("writer"), SIZE)
        self.writer = self._here.transport
        self.writer_memory, self.writer_address = self._here.memory, self._here.address
        self._peers: list[PeerProcess] = []
        self.new_target()

    def new_target(self) -> str:
        self._peer = PeerProcess(fresh("target"), SIZE)
        self._peers.append(self._peer)
        self.target_name = self._peer.name
        self.target_address = self.target("address")
        return self.target_name

    def target(self, what: str, *args: Any) -> Any:
        return self._peer.call(what, *args)

    def wait(self, condition: Callable[[], bool], limit_s: float = 10.0) -> None:
        end_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end_s, f"still not so after {limit_s} s"
            time.sleep(0.0005)

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def stop_target(self) -> None:
        self._peer.signal(signal.SIGSTOP)

    def resume_target(self) -> None:
        self._peer.signal(signal.SIGCONT)

    def kill_target(self) -> None:
        self._peer.kill()

    def close(self) -> None:
        self.writer.close()
        for peer in self._peers:
            peer.close()


@pytest.fixture(scope="module")
def lasting_rig() -> Iterator[NixlRig]:
    rig = NixlRig()
    yield rig
    rig.close()


class TestPeaceful(PeacefulConformance):
    @pytest.fixture
    def rig(self, lasting_rig: NixlRig) -> NixlRig:
        lasting_rig.target("notifications")
        return lasting_rig


class TestFatal(FatalConformance):
    @pytest.fixture
    def rig(self) -> Iterator[NixlRig]:
        rig = NixlRig()
        yield rig
        rig.close()


@pytest.mark.parametrize("num_threads", [0, 4])
def test_a_planned_transfer_between_two_caches(lasting_rig: NixlRig, num_threads: int) -> None:
    """Scattered blocks, HND to NHD, with and without threads that post."""
    writer = Agent(fresh("writer"), SIZE, num_threads=num_threads)
    try:
        sizes = {"layers": 4, "blocks": 64, "heads": 4, "block_size": 16, "content": 128}
        src = geometry_of("HND", **sizes, origin=writer.address)
        dst = geometry_of("NHD", **sizes, origin=lasting_rig.target_address)
        assert src.extent_bytes * 4 <= SIZE
        rng = np.random.default_rng(2)
        writer.memory[:] = rng.integers(1, 256, SIZE, dtype=np.uint8)
        lasting_rig.target("fill", 0)
        args = (src, rng.permutation(64)[:40], dst, rng.permutation(64)[:40], 5, 40 * 16 - 3)
        runs = plan_runs(*args)
        assert len(runs) > 1000
        peer = writer.transport.connect(lasting_rig.target("metadata"))
        handle = writer.transport.write(peer, runs, None, None, b"planned")
        lasting_rig.wait(lambda: writer.transport.done(handle))
        lasting_rig.wait(lambda: (writer.transport.name, b"planned") in lasting_rig.target("notifications"))
        expected = np.zeros(SIZE, np.uint8)
        for _, s, d in naive_moves(*args):
            s, d = s - writer.address, d - lasting_rig.target_address
            expected[d : d + 128] = writer.memory[s : s + 128]
        assert np.array_equal(lasting_rig.target("read", 0, SIZE), expected)
    finally:
        writer.transport.close()


def test_a_peer_that_returns_under_its_old_name_must_be_forgotten_first(lasting_rig: NixlRig) -> None:
    name = fresh("twin")
    first = PeerProcess(name, 4096)
    writer = lasting_rig.writer
    assert writer.connect(first.call("metadata")) == name
    first.kill()
    second = PeerProcess(name, 4096)
    try:
        metadata = second.call("metadata")
        with pytest.raises(TransportError, match="connected with other metadata; disconnect it first"):
            writer.connect(metadata)
        writer.disconnect(name)
        assert writer.connect(metadata) == name
        writer.notify(name, b"welcome")
        found: list[tuple[str, bytes]] = []
        lasting_rig.wait(lambda: bool(found.extend(second.call("notifications")) or found))
        assert found == [(writer.name, b"welcome")]
    finally:
        writer.disconnect(name)
        second.close()


def test_a_backend_that_is_not_there_is_named() -> None:
    with pytest.raises(TransportError, match=r"no backend \['NO_SUCH'\]; its plugins are \[.*'UCX'"):
        NixlTransport(fresh("agent"), backends=("NO_SUCH",))


def test_handles_and_memory_do_not_pile_up(lasting_rig: NixlRig) -> None:
    """2,000 writes and messages, a new connection every 100."""
    writer, target = lasting_rig.writer, lasting_rig.target_name
    metadata = lasting_rig.target("metadata")
    runs = Runs.of((lasting_rig.writer_address, lasting_rig.target_address, 4096))

    def some(count: int) -> None:
        for i in range(count):
            if i % 100 == 0:
                writer.disconnect(target)
                writer.connect(metadata)
            handle = writer.write(target, runs, None, None, b"w")
            lasting_rig.wait(lambda handle=handle: writer.done(handle))
            writer.release(handle)
            writer.notify(target, b"m")
            if i % 20 == 19:
                lasting_rig.target("notifications")

    some(500)
    before = resident_bytes()
    some(1500)
    assert resident_bytes() - before < 8 << 20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
