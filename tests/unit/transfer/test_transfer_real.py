"""Two transfer threads over real NIXL, real side channels and real memory, in one process."""

from __future__ import annotations

import numpy as np
import pytest
from real_node import LOCAL, Node, results_of
from transfer_world import BLOCK, LAYERS, identity

from kvpush.protocol.ids import RequestId, SendKey, TransferId
from kvpush.transfer import commands
from kvpush.transfer.results import Received, Sent

pytestmark = pytest.mark.nixl


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
            assert results_of(d, 1) == [Received(received)]
            assert results_of(p, 1) == [Sent(sent)]
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
