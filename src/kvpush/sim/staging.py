"""The staging memory of a simulated rank: a few small slots, so that most pieces have to wait for some."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvpush.plan.paths import PathCosts
from kvpush.sim.packing import ArrayPacker
from kvpush.transfer.staging import Staging, StagingArea
from kvpush.transport.base import Region

if TYPE_CHECKING:
    from kvpush.sim.worker import Worker

NUM_SLOTS = 20
BLOCKS_PER_SLOT = 2
COSTS = PathCosts(0.0, 1e-3, 1e12, 2.5e-3, 1e-4, 1e12)
"""Three runs and more are packed, fewer go directly."""


def make_staging(worker: Worker) -> Staging:
    """Registers it with the rank's transport."""
    fabric, pages = worker.world.fabric, worker.memory.view(np.uint8).reshape(*worker.memory.shape[:2], -1)
    block_bytes = pages.shape[0] * pages.shape[2]
    slot_bytes = BLOCKS_PER_SLOT * block_bytes
    memory = np.zeros((NUM_SLOTS + 2) * slot_bytes, np.uint8)
    address = worker.transport.map(memory)
    worker.transport.register([Region(address, memory.nbytes)])
    copy_s = (1e-6, fabric.random.choice([1e-4, 1e-4, 5e-3]))
    packer = ArrayPacker(fabric, worker.agent, pages, memory, address, copy_s)
    send = StagingArea(address, slot_bytes, 2)
    return Staging(packer, send, StagingArea(address + 2 * slot_bytes, slot_bytes, NUM_SLOTS))
