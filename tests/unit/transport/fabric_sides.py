"""Two agents on a simulated fabric, for its tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvpush.plan.runs import Runs
from kvpush.transport.base import Region
from kvpush.transport.memory import Faults, MemoryFabric, MemoryTransport, MemoryWrite

SIZE = 1024
SLOW = Faults(write_delay_s=(1.0, 1.0), bytes_per_s=1e12, pieces=8)


@dataclass
class Side:
    agent: MemoryTransport
    memory: np.ndarray
    address: int


def side(fabric: MemoryFabric, name: str, size: int = SIZE) -> Side:
    agent, memory = MemoryTransport(fabric, name), np.zeros(size, np.uint8)
    address = agent.map(memory)
    agent.register([Region(address, size)])
    return Side(agent, memory, address)


def pair(faults: Faults | None = None, seed: int = 0) -> tuple[MemoryFabric, Side, Side]:
    fabric = MemoryFabric(seed, faults)
    p, d = side(fabric, "P"), side(fabric, "D")
    p.agent.connect(d.agent.metadata())
    d.agent.connect(p.agent.metadata())
    p.memory[:] = np.arange(1, SIZE + 1).astype(np.uint8) | 1
    return fabric, p, d


def post(p: Side, d: Side, notification: bytes = b"", length: int = SIZE) -> MemoryWrite:
    return p.agent.write(d.agent.name, Runs.of((p.address, d.address, length)), None, None, notification)


def done_by(fabric: MemoryFabric, p: Side, handle: MemoryWrite, limit_s: float = 10.0) -> float:
    """Polls until the write is done; returns when."""
    end_s = fabric.now_s + limit_s
    while not p.agent.done(handle):
        assert fabric.now_s < end_s
        fabric.advance(fabric.now_s + 0.01)
    return fabric.now_s
