"""Engines whose transfer cores meet over a simulated fabric, in virtual time, for the tests of the transfer layer.

Each engine has one rank, a paged KV cache in a numpy array and a pool of blocks. The world watches every byte that
lands: it must belong to a block that its engine holds for a load and that the load asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from zlib import crc32

import numpy as np

from kvpush.plan.geometry import CacheGeometry
from kvpush.plan.paths import Path, PathCosts
from kvpush.protocol.ids import AgentName, PeerAddress, RequestId, SendKey, TransferId
from kvpush.protocol.prompt import PromptIdentity, prompt_identity
from kvpush.protocol.timing import Timing
from kvpush.sim.hashing import LateHasher
from kvpush.sim.packing import ArrayPacker, ArrayPeer
from kvpush.transfer import commands
from kvpush.transfer.core import CoreConfig, TransferCore
from kvpush.transfer.dialer import Answer, Dialed
from kvpush.transfer.fence import Fence
from kvpush.transfer.packing.peer import PeerRegion
from kvpush.transfer.pieces import PathConfig
from kvpush.transfer.results import LoadFailed, Received, Released, Sent
from kvpush.transfer.sidechannel import ProcessIdentity
from kvpush.transfer.sources import PASSED, Event
from kvpush.transfer.staging import Staging, StagingArea
from kvpush.transport.base import Region
from kvpush.transport.memory import Faults, MemoryFabric, MemoryTransport

LAYERS, HEADS, BLOCK, WIDTH = 2, 2, 4, 8
SLOT = HEADS * WIDTH
NUM_SLOTS = 3
COSTS = PathCosts(0.0, 1e-3, 1e9, 1e-3, 1e-4, 1e9)
"""Two runs are better packed."""
PEER_REGION = PeerRegion(1, 1, bytes(64), 0, bytes(16), "simulated")
TIMING = Timing(
    rendezvous_timeout_s=3.0,
    unclaimed_timeout_s=5.0,
    announced_timeout_s=20.0,
    admission_timeout_s=6.0,
    peer_timeout_s=2.0,
    ping_interval_s=0.5,
    write_timeout_s=4.0,
    abort_drain_s=0.5,
    tombstone_s=4.0,
    first_answer_timeout_s=1.0,
    unreachable_retry_s=2.0,
    idle_check_s=6.0,
)


class Gate:
    """A forward whose end the test decides."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


@cache
def identity(prompt: str, num_tokens: int) -> PromptIdentity:
    return prompt_identity([crc32(prompt.encode())] * num_tokens)


@cache
def kv_of(prompt: str, layer: int, token: int) -> bytes:
    """What the model computes: depends on the prompt, never zero."""
    seed = np.frombuffer(f"{prompt}/{layer}/{token}".encode(), np.uint8)
    return np.random.default_rng(seed).integers(1, 255, SLOT, dtype=np.uint8).tobytes()


@dataclass
class Request:
    """One engine request. blocks: None once they are given back; writable: those that P may write."""

    request_id: RequestId
    prompt: str
    num_tokens: int
    blocks: list[int] | None
    first_token: int = 0
    ready: int = 0
    results: list[object] = field(default_factory=list)

    @property
    def ended(self) -> list[str]:
        return [type(result).__name__ for result in self.results]


class Engine:
    """One rank. `host` is its name; each life has an incarnation."""

    def __init__(
        self,
        world: World,
        host: str,
        life: int,
        num_blocks: int,
        *,
        integrity: bool,
        stream: bool,
        fingerprint: str,
        path: Path,
        quarantine_max_blocks: int,
    ) -> None:
        self.world, self.host, self.fingerprint = world, host, fingerprint
        self.engine_id = f"engine-{host}-{life}"
        self.address = PeerAddress(host, 1000)
        self.agent = AgentName(f"{host}-{life}")
        self.memory = np.zeros((LAYERS, num_blocks, BLOCK, SLOT), np.uint8)
        self.free = list(range(1, num_blocks))
        self.requests: dict[RequestId, Request] = {}
        self.transport = MemoryTransport(world.fabric, self.agent)
        base = self.transport.map(self.memory.reshape(-1))
        layer_bytes = num_blocks * BLOCK * SLOT
        self.geometry = CacheGeometry(
            bases=tuple(base + layer * layer_bytes for layer in range(LAYERS)),
            block_stride=BLOCK * SLOT,
            head_stride=WIDTH,
            token_stride=SLOT,
            content_bytes=WIDTH,
            num_blocks=num_blocks,
            num_heads=HEADS,
            block_size=BLOCK,
        )
        self.transport.register([Region(base, self.memory.nbytes)])
        self.base = base
        self.fence = Fence()
        self.path = path
        self.staging = None if path in ("direct", "peer") else self._staging()
        config = CoreConfig(
            sender=self.address,
            cache=self.geometry,
            timing=TIMING,
            hasher=LateHasher(self.memory) if integrity else None,
            stream=stream,
            paths=PathConfig(path, COSTS, self.staging, self._map if path == "peer" else None, background=False),
            quarantine_max_blocks=quarantine_max_blocks,
        )
        self.dialer = Dialing(world)
        self.prover = Proving(world)
        self.core = TransferCore(config, self.transport, self.dialer, self.prover, self.fence)

    # What the side channel says

    @property
    def answer(self) -> Answer:
        process = ProcessIdentity(host_id=self.host, pid=1, pid_start=1)
        area = None if self.staging is None else self.staging.receive
        peer = (PEER_REGION,) if self.path == "peer" else ()
        return Answer(self.engine_id, self.agent, self.transport.metadata(), self.geometry, process, area, peer)

    @property
    def running(self) -> bool:
        return self.world.fabric.state(self.agent) == "running"

    def _map(self, answer: Answer) -> ArrayPeer:
        peer = ArrayPeer(
            self.world.fabric, self.agent, answer.agent, self.geometry, answer.geometry, self.world.copy_s
        )  # fmt: skip
        self.world.mapped.append(peer)
        return peer

    def _staging(self) -> Staging:
        """Slots of two blocks each: most pieces need more than one."""
        size = 2 * LAYERS * BLOCK * SLOT
        memory = np.zeros(2 * NUM_SLOTS * size, np.uint8)
        address = self.transport.map(memory)
        self.transport.register([Region(address, memory.nbytes)])
        pages = self.memory.reshape(LAYERS, -1, BLOCK * SLOT)
        packer = ArrayPacker(self.world.fabric, self.agent, pages, memory, address, self.world.copy_s)
        send = StagingArea(address, size, NUM_SLOTS)
        return Staging(packer, send, StagingArea(address + NUM_SLOTS * size, size, NUM_SLOTS))

    # The cache

    def compute(self, request: Request, first: int, end: int) -> None:
        assert request.blocks is not None
        for token in range(first, end):
            block, slot = request.blocks[token // BLOCK], token % BLOCK
            for layer in range(LAYERS):
                self.memory[layer, block, slot] = np.frombuffer(kv_of(request.prompt, layer, token), np.uint8)

    def holds_kv(self, request: Request) -> bool:
        """Whether the tokens that were asked for are the prompt's, byte for byte."""
        assert request.blocks is not None
        return all(
            self.memory[layer, request.blocks[token // BLOCK], token % BLOCK].tobytes()
            == kv_of(request.prompt, layer, token)
            for token in range(request.first_token, request.num_tokens)
            for layer in range(LAYERS)
        )

    def take_blocks(self, count: int) -> list[int]:
        assert len(self.free) >= count, "the test's pool is too small"
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give_back(self, request: Request) -> None:
        assert request.blocks is not None
        self.free += request.blocks
        # What others write there now; nothing of the old request may appear in it again.
        self.memory[:, request.blocks] = 0xFF
        request.blocks = None

    # Commands

    def tell(self, command: commands.Command, event: Event = PASSED) -> None:
        self.core.command(command, self.world.now_s, event)

    def take_results(self) -> None:
        for result in self.core.take_results():
            request = self.requests[result.request_id]
            request.results.append(result)
            if isinstance(result, Received):
                assert self.holds_kv(request), f"{request.request_id} was received with other bytes"
            if isinstance(result, Sent | Released):
                self.give_back(request)


class Dialing:
    """Handshakes: answered after a moment by whoever lives at the address then."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._open: list[tuple[float, PeerAddress]] = []
        self.dialed: list[PeerAddress] = []
        self.unreachable: set[str] = set()

    def dial(self, address: PeerAddress) -> None:
        self.dialed.append(address)
        self._open.append((self._world.now_s + self._world.dial_s, address))

    def take(self) -> list[Dialed]:
        due = [address for at_s, address in self._open if at_s <= self._world.now_s]
        self._open = [(at_s, address) for at_s, address in self._open if at_s > self._world.now_s]
        return [self._ask(address) for address in due]

    def close(self) -> None:
        self._open.clear()

    def _ask(self, address: PeerAddress) -> Dialed:
        engine = self._world.engines.get(address.host)
        if engine is None or not engine.running or address.host in self.unreachable:
            return Dialed(address, None, f"handshake timeout: nobody answers at {address}")
        if engine.fingerprint != "same":
            return Dialed(address, None, f"handshake refused: {address} does not fit: model")
        return Dialed(address, engine.answer)


class Proving:
    """Whose process is gone: the truth, but only of those that were asked for."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._open: list[AgentName] = []
        self.asked: list[AgentName] = []

    def ask(self, agent: AgentName, process: ProcessIdentity, address: PeerAddress) -> None:
        self.asked.append(agent)
        self._open.append(agent)

    def take(self) -> list[AgentName]:
        asked, self._open = self._open, []
        return [agent for agent in asked if self._world.fabric.state(agent) == "killed"]

    def close(self) -> None:
        self._open.clear()


class World:
    """A fabric, engines, and the time. Engines are called by their host: `world["P"]`.

    path: how pieces travel, unless a start says otherwise; tests run with each.
    """

    path: Path = "direct"

    def __init__(self, *hosts: str, seed: int = 0, faults: Faults | None = None, **options: object) -> None:
        self.fabric = MemoryFabric(seed, faults)
        self.fabric.on_land = self._on_land
        self.engines: dict[str, Engine] = {}
        self.past: list[Engine] = []
        self.dial_s = 0.002
        self.num_landed = 0
        self.copy_s = (1e-5, 1e-4)
        self.mapped: list[ArrayPeer] = []
        for host in hosts:
            self.start(host, **options)

    def __getitem__(self, host: str) -> Engine:
        return self.engines[host]

    @property
    def now_s(self) -> float:
        return self.fabric.now_s

    def start(
        self,
        host: str,
        *,
        num_blocks: int = 32,
        integrity: bool = False,
        stream: bool = True,
        fingerprint: str = "same",
        path: Path | None = None,
        quarantine_max_blocks: int = 0,
    ) -> Engine:
        """Starts an engine, or its next life: then whatever lived there before must be dead."""
        if host in self.engines:
            assert self.fabric.state(self.engines[host].agent) == "killed"
            self.past.append(self.engines[host])
        life = sum(engine.host == host for engine in self.past)
        self.engines[host] = Engine(
            self, host, life, num_blocks, integrity=integrity, stream=stream, fingerprint=fingerprint,
            path=path or self.path,
            quarantine_max_blocks=quarantine_max_blocks,
        )  # fmt: skip
        return self.engines[host]

    def run(self, duration_s: float = 0.05, step_s: float = 0.0005) -> None:
        self.until(lambda: False, duration_s, step_s, must=False)

    def until(self, met: Callable[[], bool], limit_s: float, step_s: float = 0.0005, *, must: bool = True) -> float:
        """Runs until a condition holds; returns how long that took. Fails after limit_s of virtual time."""
        start_s, end_s = self.now_s, self.now_s + limit_s
        while self.now_s < end_s:
            self.fabric.advance(self.now_s + step_s)
            for engine in self.engines.values():
                if engine.running:
                    engine.core.poll(self.now_s)
                    engine.take_results()
            if met():
                return self.now_s - start_s
        assert not must, f"not met within {limit_s} s: {self.describe()}"
        return limit_s

    def describe(self) -> str:
        lines = []
        for engine in self.engines.values():
            ended = {request.request_id: request.ended for request in engine.requests.values()}
            lines.append(f"{engine.host}: idle {engine.core.idle}, {ended}, {dict(engine.core.counters._total)}")
        return "; ".join(lines)

    # Requests

    def offer(
        self, host: str, transfer: str, num_tokens: int, *, consumers: int = 1, prompt: str = "p", decodes: bool = False
    ) -> Request:
        engine = self[host]
        request = Request(RequestId(f"{host}-{transfer}-{len(engine.requests)}"), prompt, num_tokens, [])
        engine.requests[request.request_id] = request
        known = identity(prompt, num_tokens)
        engine.tell(commands.Offer(request.request_id, TransferId(transfer), known, consumers, decodes))
        return request

    def prefill(self, host: str, request: Request, upto: int, event: Event = PASSED, *, replace: bool = False) -> None:
        """One step of P: computes tokens up to `upto` in blocks that are allocated as vLLM does."""
        engine = self[host]
        assert request.blocks is not None
        if replace:
            request.blocks, request.ready = [], 0
        gained = engine.take_blocks(-(-upto // BLOCK) - len(request.blocks))
        replace = replace or not request.blocks
        request.blocks = request.blocks + gained
        if isinstance(event, Gate):
            pass  # the test computes when it opens the gate
        else:
            engine.compute(request, request.ready, upto)
        request.ready = upto
        engine.tell(commands.Progress(request.request_id, upto, (tuple(gained),), replace), event)

    def finish(self, host: str, request: Request, aborted: str = "") -> None:
        self[host].tell(commands.Finish(request.request_id, aborted))

    def preempt(self, host: str, request: Request, wait_s: float = 0.0) -> bool:
        """As the worker does: asks the fence, tells the thread; returns whether the request was poisoned."""
        engine = self[host]
        poisoned = bool(engine.fence.preempt([request.request_id], wait_s))
        assert request.blocks is not None
        engine.free += request.blocks
        engine.memory[:, request.blocks] = 0xEE  # somebody else's tokens, from now on
        request.blocks, request.ready = [], 0
        engine.tell(commands.Preempt(request.request_id, poisoned))
        return poisoned

    def fetch(
        self,
        host: str,
        transfer: str,
        num_tokens: int,
        *,
        peer: str = "P",
        consumer: int = 0,
        consumers: int = 1,
        first_token: int = 0,
        prompt: str = "p",
        engine_id: str | None = None,
    ) -> Request:
        engine = self[host]
        request = Request(
            RequestId(f"{host}-{transfer}-{len(engine.requests)}"),
            prompt,
            num_tokens,
            engine.take_blocks(-(-num_tokens // BLOCK)),
            first_token,
        )
        engine.requests[request.request_id] = request
        assert request.blocks is not None
        engine.tell(
            commands.Fetch(
                request.request_id,
                SendKey(TransferId(transfer), consumer),
                consumers,
                identity(prompt, num_tokens),
                first_token,
                (tuple(request.blocks),),
                (peer, 1000),
                engine_id,
            )
        )
        return request

    def cancel(self, host: str, request: Request) -> None:
        self[host].tell(commands.Cancel(request.request_id))

    # Checks

    def _on_land(self, writer: str, target: str, address: int, length: int) -> None:
        """Every byte must land in a block that is held for a load, behind what that load has already."""
        self.num_landed += length
        engine = next(e for e in [*self.engines.values(), *self.past] if e.agent == target)
        area = None if engine.staging is None else engine.staging.receive
        if area is not None and area.address <= address < area.address + area.num_bytes:
            slots = {
                (address - area.address) // area.slot_bytes,
                (address + length - 1 - area.address) // area.slot_bytes,
            }
            unstager = engine.core._consumer_side._unstager
            assert unstager is not None
            assert all(unstager.leases.holds(AgentName(writer), slot) for slot in slots)
            return
        layer_bytes = engine.memory[0].nbytes
        for byte in (address - engine.base, address - engine.base + length - 1):
            block = byte % layer_bytes // (BLOCK * SLOT)
            owners = [r for r in engine.requests.values() if r.blocks is not None and block in r.blocks]
            assert owners, f"{writer} wrote into block {block} of {target}, which nobody holds"
            place = owners[0].blocks.index(block)  # type: ignore[union-attr]
            assert place >= owners[0].first_token // BLOCK, f"{writer} wrote into a block that {target} had already"
            assert "Received" not in owners[0].ended, f"{writer} wrote into {target} after it had received"

    def check_idle(self, *hosts: str) -> None:
        """Nothing is left but tombstones, and no report is missing or came twice."""
        for host in hosts or self.engines:
            engine = self[host]
            assert engine.core.idle, self.describe()
            assert engine.fence.idle
            assert engine.transport.in_flight == 0
            assert not any(engine.core.levels.values()), engine.core.levels
            assert engine.core.counters.total("protocol_errors") == 0
            producer_side, consumer_side = engine.core._producer_side, engine.core._consumer_side
            kept = [producer_side._pieces._tables, producer_side._offered, producer_side._decoding, producer_side._lost]
            assert not any([*kept, consumer_side._fetches, consumer_side._engine_ids, consumer_side._checks])
            assert len(engine.core.records) == 0
            for request in engine.requests.values():
                assert request.ended in (
                    ["Sent"], ["Received"], ["LoadFailed", "Released"], ["Released"],
                ), f"{request.request_id}: {request.ended}"  # fmt: skip


def failure(request: Request) -> str:
    """Why a load has failed; "" if it has not."""
    return next((result.reason for result in request.results if isinstance(result, LoadFailed)), "")
