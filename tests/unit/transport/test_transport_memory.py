"""The simulated transport does what every transport must do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from transport_conformance import SIZE, FatalConformance, PeacefulConformance

from kvpush.transport.base import Region
from kvpush.transport.memory import MemoryFabric, MemoryTransport

pytestmark = pytest.mark.unit

STEP_S = 20e-6


class MemoryRig:
    def __init__(self) -> None:
        self.fabric = MemoryFabric(seed=3)
        self.writer, self.writer_memory, self.writer_address = self._agent("writer")
        self._lives = 0
        self.new_target()

    def _agent(self, name: str) -> tuple[MemoryTransport, np.ndarray, int]:
        agent = MemoryTransport(self.fabric, name)
        memory = np.zeros(SIZE, np.uint8)
        address = agent.map(memory)
        agent.register([Region(address, SIZE)])
        return agent, memory, address

    def new_target(self) -> str:
        self._lives += 1
        self.target_name = f"target-{self._lives}"
        self._target, self._memory, self.target_address = self._agent(self.target_name)
        return self.target_name

    def target(self, what: str, *args: Any) -> Any:
        if what == "read":
            return self._memory[args[0] : args[1]].copy()
        if what == "fill":
            self._memory[:] = args[0]
            return None
        return getattr(self._target, what)(*args)

    def wait(self, condition: Callable[[], bool], limit_s: float = 10.0) -> None:
        end_s = self.fabric.now_s + limit_s
        while not condition():
            assert self.fabric.now_s < end_s, f"still not so after {limit_s} s"
            self.pause(STEP_S)

    def pause(self, seconds: float) -> None:
        self.fabric.advance(self.fabric.now_s + seconds)

    def stop_target(self) -> None:
        self.fabric.stop(self.target_name)

    def resume_target(self) -> None:
        self.fabric.resume(self.target_name)

    def kill_target(self) -> None:
        self.fabric.kill(self.target_name)


@pytest.fixture
def rig() -> Iterator[MemoryRig]:
    rig = MemoryRig()
    yield rig
    assert rig.writer.in_flight == 0


class TestPeaceful(PeacefulConformance):
    pass


class TestFatal(FatalConformance):
    pass
