"""NIXL over TCP, over a link that can be cut: what a writer had sent outlives its process."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from transport_peer import PeerProcess

from kvpush.bench.soak.link import DECODE, PREFILL, Link, why_not
from kvpush.transport.base import TransportError

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(300)]

SIZE = 32 << 20
BEFORE, STALE = 9, 77


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


def stale_bytes(target: PeerProcess) -> int:
    return int((target.call("read", 0, SIZE) == STALE).sum())


def finds_the_end(target: PeerProcess, writer: PeerProcess) -> bool:
    """Uses the connection, as only that shows whether it has ended."""
    try:
        target.call("notify", writer.name, b"are you there")
    except TransportError:
        pass
    return not target.call("connected", writer.name)


def test_memory_is_quiet_only_when_a_dead_writers_connection_has_ended() -> None:
    reason = why_not()
    if reason:
        pytest.skip(f"the link cannot be cut: {reason}")
    with Link() as link:
        writer = PeerProcess("writer", SIZE, link.ends[PREFILL])
        target = PeerProcess("target", SIZE, link.ends[DECODE])
        try:
            writer.call("connect", target.call("metadata"))
            target.call("connect", writer.call("metadata"))
            address = target.call("address")
            # The link works, in both directions.
            writer.call("fill", BEFORE)
            writer.call("post", "target", address, SIZE)
            wait_for(lambda: writer.call("landed"), 20.0, "a write over the link")
            target.call("notify", "writer", b"hello")
            wait_for(lambda: bool(writer.call("notifications")), 20.0, "a message over the link")
            writer.call("fill", STALE)
            link.cut()
            writer.call("post", "target", address, SIZE)
            time.sleep(1.0)
            assert not writer.call("landed")
            writer.kill()
            for _ in range(3):
                assert not finds_the_end(target, writer)
                time.sleep(0.5)
            assert stale_bytes(target) == 0
            link.mend()
            wait_for(lambda: finds_the_end(target, writer), 60.0, "the end of the connection")
            landed = stale_bytes(target)
            # This is why the end of the process alone proves nothing.
            assert landed > 0
            time.sleep(3.0)
            assert stale_bytes(target) == landed
        finally:
            writer.kill()
            target.close()
