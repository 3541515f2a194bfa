"""The transport of a simulated engine: the one in memory, watched, and able to stop right after a post."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvpush.plan.runs import Addresses, Runs
from kvpush.transport.base import TransportError
from kvpush.transport.fabric import MemoryFabric
from kvpush.transport.memory import MemoryTransport, MemoryWrite


@dataclass(eq=False, slots=True)
class Flight:
    """A posted write. sources, targets: block ids at both sides. excused: its sources were
    preempted, so that they may be given back although it reads them."""

    writer: str
    target: str
    sources: frozenset[int]
    targets: frozenset[int]
    handle: MemoryWrite
    posted_s: float
    excused: bool = False

    def open(self, fabric: MemoryFabric) -> bool:
        """Bytes of it may still land."""
        handle = self.handle
        if handle._landed or fabric.state(self.writer) == "killed" or fabric.state(self.target) == "killed":
            return False
        return handle._error is None or handle._error.may_land


OnPost = Callable[[Flight], None]
OnNotify = Callable[[str, str, bytes], None]
BlocksAt = Callable[[str, Addresses, Addresses], frozenset[int]]


class WatchedTransport(MemoryTransport):
    """on_post: told of every write. on_notify(writer, target, payload): told of every message, if set.

    blocks_at(agent, addresses, lengths): which blocks of an agent those bytes are in.

    A frozen transport belongs to a process that was stopped in the middle of a round: what it would have sent after
    that leaves when it continues.
    """

    def __init__(self, fabric: MemoryFabric, name: str, blocks_at: BlocksAt, on_post: OnPost) -> None:
        super().__init__(fabric, name)
        self._blocks_at, self._on_post = blocks_at, on_post
        self.freeze_at_post = False
        self.frozen = False
        self.on_notify: OnNotify | None = None
        self._held: list[tuple[str, bytes]] = []

    def write(
        self, peer: str, runs: Runs, device: int | None, peer_device: int | None, notification: bytes
    ) -> MemoryWrite:
        handle = super().write(peer, runs, device, peer_device, notification)
        sources = self._blocks_at(self.name, runs.src, runs.length)
        targets = self._blocks_at(peer, runs.dst, runs.length)
        self._on_post(Flight(self.name, peer, sources, targets, handle, self._fabric.now_s))
        if self.freeze_at_post:
            self.freeze_at_post, self.frozen = False, True
        return handle

    def notify(self, peer: str, payload: bytes) -> None:
        if self.on_notify is not None:
            self.on_notify(self.name, peer, payload)
        if self.frozen:
            self._connected(peer)
            self._held.append((peer, payload))
        else:
            super().notify(peer, payload)

    def calm(self) -> None:
        """Nothing that was meant to fail fails any more."""
        self.freeze_at_post = False
        self._fail_posts.clear()
        self._fail_writes.clear()

    def thaw(self) -> None:
        """The process is stopped now; what was held back is its next step."""
        self.frozen = False
        held, self._held = self._held, []
        for peer, payload in held:
            self._fabric.after(0.0, partial(self._send_late, peer, payload), self.name)

    def _send_late(self, peer: str, payload: bytes) -> None:
        try:
            super().notify(peer, payload)
        except TransportError:
            pass  # lost meanwhile; the process finds out at its next message
