"""The staging memory of a simulated rank: a few small slots, so that most pieces have to wait for some."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvpush.plan.paths import PathCosts
from kvpush.plan.runs import Ints
from kvpush.sim.packing import ArrayPacker, ArrayPeer
from kvpush.sim.transport import Flight
from kvpush.transfer.dialer import Answer
from kvpush.transfer.packing.peer import PeerRegion
from kvpush.transfer.staging import Staging, StagingArea
from kvpush.transport.base import Region
from kvpush.transport.memory import MemoryWrite

if TYPE_CHECKING:
    from kvpush.sim.worker import Worker

NUM_SLOTS = 20
BLOCKS_PER_SLOT = 2
COSTS = PathCosts(0.0, 1e-3, 1e12, 2.5e-3, 1e-4, 1e12)
"""Three runs and more are packed, fewer go directly."""


PEER_REGION = PeerRegion(1, 1, bytes(64), 0, bytes(16), "simulated")
"""Says that a cache can be mapped; how is the model's business."""


def make_peer(worker: Worker, answer: Answer) -> ArrayPeer:
    """The cache of another rank, for kernels of this one. What they do is watched like writes."""
    fabric, referee = worker.world.fabric, worker.world.referee
    copy_s = (1e-6, fabric.random.choice([1e-4, 5e-3, 0.05]))

    def on_copy(blocks: Ints, peer_blocks: Ints, handle: MemoryWrite) -> None:
        sources, targets = frozenset(blocks.tolist()), frozenset(peer_blocks.tolist())
        referee.seen["stored by a kernel"] += 1
        referee.on_post(Flight(worker.agent, answer.agent, sources, targets, handle, fabric.now_s))

    mine, theirs = worker.answer.geometry, answer.geometry
    return ArrayPeer(fabric, worker.agent, answer.agent, mine, theirs, copy_s, on_copy)


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
