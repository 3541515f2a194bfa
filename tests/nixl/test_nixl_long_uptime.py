"""400 transfers over real NIXL with real threads, one side restarted every 20, and nothing piles up at the other."""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "transfer"))

from real_node import LOCAL, Node, results_of
from test_transport_nixl import resident_bytes
from transfer_world import BLOCK, LAYERS, identity

from kvpush.protocol.ids import RequestId, SendKey, TransferId
from kvpush.transfer import commands
from kvpush.transfer.results import Received, Sent

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(600)]

NUM_TRANSFERS, RESTART_EVERY, NUM_TOKENS = 400, 20, 4 * BLOCK
BLOCKS = NUM_TOKENS // BLOCK


def transfer(p: Node, d: Node, number: int) -> None:
    """One hand-over in two chunks; what D has received must be what P computed."""
    name, prompt = TransferId(f"t{number}"), f"prompt {number % 7}"
    first = number % 50
    source, target = list(range(first, first + BLOCKS)), list(range(60 - first - BLOCKS, 60 - first))
    sent, received, who = RequestId(f"p{number}"), RequestId(f"d{number}"), identity(prompt, NUM_TOKENS)
    d.thread.submit([commands.Fetch(received, SendKey(name, 0), 1, who, 0, (tuple(target),), (LOCAL, p.server.port))])
    p.thread.submit([commands.Offer(sent, name, who, 1)])
    p.fill(prompt, source, 0, NUM_TOKENS)
    half = NUM_TOKENS // 2
    p.thread.submit([commands.Progress(sent, half, (tuple(source[: half // BLOCK]),), True)])
    p.thread.submit([commands.Progress(sent, NUM_TOKENS, (tuple(source[half // BLOCK :]),), False)])
    p.thread.submit([commands.Finish(sent)])
    assert results_of(d, 1) == [Received(received)]
    assert results_of(p, 1) == [Sent(sent)]
    for layer in range(LAYERS):
        assert np.array_equal(d.memory[layer, target], p.memory[layer, source])
    d.memory[:] = p.memory[:] = 0


def held() -> tuple[int, int, int]:
    """(resident bytes, file descriptors, threads but those that wait in a pool for handshakes) of this process."""
    gc.collect()
    threads = [
        thread for thread in threading.enumerate() if not thread.name.startswith(("kvpush-dial", "kvpush-proof"))
    ]
    return resident_bytes(), len(os.listdir("/proc/self/fd")), len(threads)


def test_long_uptime() -> None:
    nodes = {"P": Node("P"), "D": Node("D")}
    try:
        early = held()
        for number in range(NUM_TRANSFERS):
            if number % RESTART_EVERY == 0 and number:
                # Back at the same address, under another name; the other side has not been told.
                name = "PD"[number // RESTART_EVERY % 2]
                port = nodes[name].server.port
                nodes[name].close()
                nodes[name] = Node(name, port=port)
            transfer(nodes["P"], nodes["D"], number)
            if number == 6 * RESTART_EVERY:
                early = held()
        late = held()
        assert late[1:] == early[1:]
        assert late[0] - early[0] < 32 << 20
        for node in nodes.values():
            assert node.core.idle
            assert node.fence.idle
            assert not node.core._transport._in_flight  # type: ignore[attr-defined]
    finally:
        for node in nodes.values():
            node.close()
