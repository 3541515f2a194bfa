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

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "transport"))

from transport_conformance import SIZE, FatalConformance, PeacefulConformance
from transport_peer import Agent, PeerProcess

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
