"""One engine with one rank over real NIXL: a transfer thread, a side channel and real memory, in this process."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

import msgspec
import numpy as np
from transfer_world import BLOCK, HEADS, LAYERS, SLOT, WIDTH, kv_of

from kvpush.plan.geometry import CacheGeometry
from kvpush.protocol.ids import PeerAddress
from kvpush.protocol.timing import Timing
from kvpush.transfer.addresses import AllowList
from kvpush.transfer.core import CoreConfig, TransferCore
from kvpush.transfer.dialer import SideChannelDialer
from kvpush.transfer.fence import Fence
from kvpush.transfer.hashing import BackgroundHasher, Cancelled, Words, hash_memory
from kvpush.transfer.proof import WriterProof
from kvpush.transfer.prover import ProcessProver
from kvpush.transfer.results import Result
from kvpush.transfer.sidechannel import EngineInfo, RankInfo, SideChannelServer, current_process
from kvpush.transfer.thread import TransferThread
from kvpush.transport.base import Region

LOCAL = "127.0.0.1"
# Real time on busy cores: no bound may end what only waits for its turn.
TIMING = Timing(peer_timeout_s=20.0, ping_interval_s=0.5, rendezvous_timeout_s=30.0)


class Node:
    """One engine with one rank."""

    def __init__(self, name: str, num_blocks: int = 64, port: int = 0) -> None:
        from kvpush.transport.nixl import NixlTransport

        self.memory = np.zeros((LAYERS, num_blocks, BLOCK, SLOT), np.uint8)
        base, layer = self.memory.ctypes.data, self.memory[0].nbytes
        geometry = CacheGeometry(
            tuple(base + i * layer for i in range(LAYERS)), BLOCK * SLOT, WIDTH, SLOT, WIDTH, num_blocks, HEADS, BLOCK
        )
        transport = NixlTransport(f"{name}-{uuid.uuid4().hex}")
        transport.register([Region(base, self.memory.nbytes)])
        me = current_process()
        engine = EngineInfo(
            engine_id=name, incarnation=name, mode="push", tp_size=1, pp_size=1, protocol_version=1,
            host_id=me.host_id, fingerprint={"model": "m"},
        )  # fmt: skip
        self.server = SideChannelServer(LOCAL, port, engine, None)
        self.server.start()
        rank = RankInfo(
            pp_rank=0, tp_rank=0, agent=transport.name, metadata=transport.metadata(),
            geometry=msgspec.msgpack.encode(geometry), pid=me.pid, pid_start=me.pid_start, host_id=me.host_id,
        )  # fmt: skip
        self.server.set_ranks([rank])
        allowed = AllowList([LOCAL])
        self.fence = Fence()
        self.core = TransferCore(
            CoreConfig(
                PeerAddress(LOCAL, self.server.port), geometry, TIMING, hasher=BackgroundHasher(self.hash_blocks)
            ),
            transport,
            SideChannelDialer(engine, allowed, None, 5.0),
            ProcessProver(WriterProof(None), allowed),
            self.fence,
        )
        self.thread = TransferThread(self.core)
        self.thread.start()

    def hash_blocks(self, blocks: Sequence[int], cancelled: Cancelled) -> Words:
        return hash_memory(list(self.memory), blocks, cancelled)

    def fill(self, prompt: str, blocks: list[int], first: int, end: int) -> None:
        for token in range(first, end):
            for layer in range(LAYERS):
                content = np.frombuffer(kv_of(prompt, layer, token), np.uint8)
                self.memory[layer, blocks[token // BLOCK], token % BLOCK] = content

    def close(self) -> None:
        self.thread.stop()
        self.server.stop()


def results_of(node: Node, count: int, limit_s: float = 60.0) -> list[Result]:
    results: list[Result] = []
    deadline_s = time.monotonic() + limit_s
    while len(results) < count:
        assert time.monotonic() < deadline_s, node.core.counters._total
        results += node.thread.take_results()
        time.sleep(0.001)
    return results
