"""Two transfer threads over real NIXL, real side channels and real memory, in one process."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from transfer_world import BLOCK, HEADS, LAYERS, SLOT, TIMING, WIDTH, identity, kv_of

from kvpush.plan.geometry import CacheGeometry
from kvpush.protocol.ids import PeerAddress, RequestId, SendKey, TransferId
from kvpush.transfer import commands
from kvpush.transfer.addresses import AllowList
from kvpush.transfer.core import CoreConfig, TransferCore
from kvpush.transfer.dialer import SideChannelDialer
from kvpush.transfer.fence import Fence
from kvpush.transfer.hashing import BackgroundHasher, Cancelled, Words, hash_memory
from kvpush.transfer.proof import WriterProof
from kvpush.transfer.prover import ProcessProver
from kvpush.transfer.results import Received, Result, Sent
from kvpush.transfer.sidechannel import EngineInfo, RankInfo, SideChannelServer, current_process
from kvpush.transfer.thread import TransferThread
from kvpush.transport.base import Region

pytestmark = pytest.mark.nixl
LOCAL = "127.0.0.1"


class Node:
    """One engine with one rank."""

    def __init__(self, name: str, num_blocks: int = 64) -> None:
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
        self.server = SideChannelServer(LOCAL, 0, engine, None)
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


def _results(node: Node, count: int, limit_s: float = 20.0) -> list[Result]:
    results: list[Result] = []
    deadline_s = time.monotonic() + limit_s
    while len(results) < count:
        assert time.monotonic() < deadline_s, node.core.counters._total
        results += node.thread.take_results()
        time.sleep(0.001)
    return results


def test_prompts_are_handed_over_between_real_threads() -> None:
    p, d = Node("P"), Node("D")
    try:
        peer = (LOCAL, p.server.port)
        for i, num_tokens in enumerate((1, 9, 4 * BLOCK, 30)):
            name, prompt = f"t{i}", f"prompt {i}"
            blocks = -(-num_tokens // BLOCK)
            source = [int(b) for b in np.random.default_rng(i).permutation(64)[:blocks]]
            target = [int(b) for b in np.random.default_rng(i + 100).permutation(64)[:blocks]]
            sent, received, who = RequestId(f"p{i}"), RequestId(f"d{i}"), identity(prompt, num_tokens)
            key = SendKey(TransferId(name), 0)
            d.thread.submit([commands.Fetch(received, key, 1, who, 0, (tuple(target),), peer)])
            p.thread.submit([commands.Offer(sent, TransferId(name), who, 1)])
            done = 0
            for upto in range(5, num_tokens + 5, 5):
                end = min(upto, num_tokens)
                p.fill(prompt, source, done, end)
                gained = source[-(-done // BLOCK) : -(-end // BLOCK)]
                p.thread.submit([commands.Progress(sent, end, (tuple(gained),), done == 0)])
                done = end
            p.thread.submit([commands.Finish(sent)])
            assert _results(d, 1) == [Received(received)]
            assert _results(p, 1) == [Sent(sent)]
            for layer in range(LAYERS):
                assert np.array_equal(d.memory[layer, target], p.memory[layer, source])
            d.memory[:] = p.memory[:] = 0
        assert d.core.counters.get("integrity", "ok") == 4
        assert p.core.idle
        assert d.core.idle
        assert p.fence.idle
    finally:
        p.close()
        d.close()
