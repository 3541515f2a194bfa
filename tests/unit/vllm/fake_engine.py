"""Engines made of the fake scheduler, the real connector and real transfer cores over a simulated fabric.

The model runner calls the worker half's hooks in the order of each version and writes KV into real memory; before it
computes a token it checks that the KV of all tokens before it is right.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from fake_scheduler import BLOCK, Request, Scheduler, Status, next_token
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvpush.plan.geometry import CacheGeometry
from kvpush.protocol.ids import AgentName, PeerAddress
from kvpush.protocol.timing import Timing
from kvpush.transfer import commands
from kvpush.transfer.core import CoreConfig, TransferCore
from kvpush.transfer.dialer import Answer, Dialed
from kvpush.transfer.hashing import Cancelled, InlineHasher, Words, hash_memory
from kvpush.transfer.results import Result
from kvpush.transfer.sidechannel import ProcessIdentity
from kvpush.transfer.sources import PASSED, Event
from kvpush.transport.base import Region
from kvpush.transport.memory import Faults, MemoryFabric, MemoryTransport
from kvpush.vllm.connector import KVPushConnector

SLOT = 8
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


@lru_cache(maxsize=100_000)
def kv_of(tokens: tuple[int, ...]) -> bytes:
    """KV of the last of these tokens: it depends on all of them."""
    return hashlib.blake2b(repr(tokens).encode(), digest_size=SLOT).digest()


def vllm_config(
    name: str, *, role: str = "kv_both", prefix_caching: bool = True, tp_size: int = 1, **extra: Any
) -> Any:
    """What the connector reads of a VllmConfig."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            engine_id=name,
            is_kv_producer=role in ("kv_producer", "kv_both"),
            is_kv_consumer=role in ("kv_consumer", "kv_both"),
            kv_connector_extra_config=extra,
        ),
        model_config=SimpleNamespace(
            model="org/model",
            revision=None,
            quantization=None,
            dtype="bfloat16",
            hf_config=SimpleNamespace(to_dict=lambda: {"hidden_size": 8}),
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", enable_prefix_caching=prefix_caching),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp_size, pipeline_parallel_size=1, data_parallel_index=0
        ),
    )  # fmt: skip


class FullAttentionSpec:
    """Stands in for vLLM's by its name."""

    block_size, dtype, num_kv_heads, head_size = BLOCK, "bfloat16", 1, 4
    sliding_window = attention_chunk_size = None


def kv_cache_config() -> Any:
    groups = [SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=["l0"])]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=64)


class InlineThread:
    """The transfer thread without a thread: commands wait until the world lets it work."""

    def __init__(self, core: TransferCore, world: World) -> None:
        self.core, self._world = core, world
        self._commands: deque[tuple[commands.Command, Event]] = deque()
        self._results: list[Result] = []

    def submit(self, new: Iterable[commands.Command], event: Event = PASSED) -> None:
        self._commands.extend((command, event) for command in new)
        if self._world.rng.random() < 0.5:
            self.work()

    def work(self) -> None:
        if self._commands and self._world.rng.random() < 0.3:
            self.core.poll(self._world.now_s)  # a round that had begun before the commands came
        while self._commands:
            command, event = self._commands.popleft()
            self.core.command(command, self._world.now_s, event)
        self.core.poll(self._world.now_s)
        self._results += self.core.take_results()

    def on_step(self) -> None:
        """Rounds are taken where the test wants them."""

    def take_results(self) -> list[Result]:
        results, self._results = self._results, []
        return results

    def stop(self) -> None: ...


class Rank:
    """One worker: memory, the worker half of the connector, and what a model runner knows of the requests."""

    def __init__(self, engine: Engine, tp_rank: int, num_blocks: int, config: Any, *, integrity: bool) -> None:
        world = engine.world
        self.engine, self.tp_rank = engine, tp_rank
        self.agent = AgentName(f"{engine.host}-{engine.life}-{tp_rank}")
        self.memory = np.zeros((num_blocks, BLOCK, SLOT), np.uint8)
        self.transport = MemoryTransport(world.fabric, self.agent)
        self.base = self.transport.map(self.memory.reshape(-1))
        self.geometry = CacheGeometry((self.base,), BLOCK * SLOT, SLOT, SLOT, SLOT, num_blocks, 1, BLOCK)
        self.transport.register([Region(self.base, self.memory.nbytes)])
        self.connector = KVPushConnector(config, KVConnectorRole.WORKER, kv_cache_config())
        worker = self.connector._worker
        assert worker is not None
        self.worker = worker
        sender = PeerAddress(engine.host, 1000, 0, tp_rank)
        self.core = TransferCore(
            CoreConfig(sender, self.geometry, TIMING, hasher=InlineHasher(self.hash_blocks) if integrity else None),
            self.transport,
            Dialing(world),
            Proving(world),
            worker._fence,
        )
        self.thread = InlineThread(self.core, world)
        worker._core, worker._thread = self.core, self.thread  # type: ignore[assignment]
        self._tables: dict[str, list[int]] = {}

    @property
    def answer(self) -> Answer:
        process = ProcessIdentity(host_id=self.engine.host, pid=1, pid_start=1)
        return Answer(self.engine.engine_id, self.agent, self.transport.metadata(), self.geometry, process)

    def hash_blocks(self, blocks: Sequence[int], cancelled: Cancelled) -> Words:
        return hash_memory([self.memory], blocks, cancelled)

    def step(self, output: SimpleNamespace) -> SimpleNamespace:
        """execute_model and sample_tokens: the hooks in the order of the version, the forward in between."""
        shape, connector = self.engine.scheduler.shape, self.connector
        forward = bool(output.num_scheduled_tokens)
        connector.handle_preemptions(output.kv_connector_metadata)
        connector.bind_connector_metadata(output.kv_connector_metadata)
        if shape == "v2-0.26":
            connector.start_load_kv(None)
        self._forward(output)
        if shape == "v2":
            connector.finish_forward()
        if shape != "v2-0.26":
            connector.start_load_kv(None)
        if forward or shape != "v2-0.26":
            connector.wait_for_save()
        if shape == "v2-0.26":
            sent, received = connector.get_finished(output.finished_req_ids)
            failed: set[str] = set()
        else:
            found = connector.get_transfer_results(output.finished_req_ids)
            sent, received, failed = found.finished_sending, found.finished_recving, found.failed_recving
        result = SimpleNamespace(
            finished_sending=sent,
            finished_recving=received,
            failed_recving=failed,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        self.engine.stats.append(connector.get_kv_connector_stats())
        connector.clear_connector_metadata()
        return result

    def _forward(self, output: SimpleNamespace) -> None:
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
            self._compute(new.req_id, new.num_computed_tokens, output.num_scheduled_tokens[new.req_id])
        cached = output.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = list(blocks[0])
            elif blocks is not None:
                self._tables[request_id] += blocks[0]
            self._compute(request_id, computed, output.num_scheduled_tokens[request_id])

    def _compute(self, request_id: str, start: int, count: int) -> None:
        request, table = self.engine.scheduler.requests[request_id], self._tables[request_id]
        tokens = list(request.prompt_token_ids)
        while len(tokens) < start + count:
            tokens.append(next_token(tokens))
        for place in range(start + count):
            block, slot = table[place // BLOCK], place % BLOCK
            content = kv_of((self.tp_rank, *tokens[: place + 1]))
            if place < start:
                found = self.memory[block, slot].tobytes()
                assert found == content, f"{request_id} would decode from wrong KV at token {place} of {start}"
            else:
                self.memory[block, slot] = np.frombuffer(content, np.uint8)


class Engine:
    """One engine, from its scheduler half to its ranks."""

    def __init__(
        self, world: World, host: str, life: int, *, tp_size: int = 1, num_blocks: int = 64, overlap: bool = False,
        prefix_caching: bool = True, integrity: bool = False, role: str = "kv_both", **options: Any,
    ) -> None:  # fmt: skip
        self.world, self.host, self.life = world, host, life
        self.engine_id = f"{host}-{life}"
        config = vllm_config(
            self.engine_id, role=role, prefix_caching=prefix_caching, tp_size=tp_size,
            side_channel_host=host, side_channel_port=1000, preempt_wait_s=0.0,
        )  # fmt: skip
        self.connector = KVPushConnector(config, KVConnectorRole.SCHEDULER, kv_cache_config())
        self.scheduler = Scheduler(
            self.connector, num_blocks=num_blocks, prefix_caching=prefix_caching, world_size=tp_size, **options
        )
        self.stats: list[Any] = []
        self.ranks = [Rank(self, rank, num_blocks, config, integrity=integrity) for rank in range(tp_size)]
        self._overlap = overlap
        self._in_flight: deque[tuple[SimpleNamespace, list[SimpleNamespace]]] = deque()

    @property
    def running(self) -> bool:
        return all(self.world.fabric.state(rank.agent) == "running" for rank in self.ranks)

    @property
    def idle(self) -> bool:
        half = self.connector._scheduler
        assert half is not None
        return (
            not self.scheduler.busy
            and not self._in_flight
            and half.idle
            and not len(half._book)
            and all(
                rank.core.idle and rank.worker._fence.idle and rank.worker._reports.idle and not rank.thread._commands
                for rank in self.ranks
            )
        )  # fmt: skip

    def step(self) -> None:
        """One engine step; with overlap the output of the step before is processed only now."""
        if not self.scheduler.busy and not self._in_flight:
            return  # an idle engine runs no hook
        output = self.scheduler.schedule()
        self._in_flight.append((output, [rank.step(output) for rank in self.ranks]))
        if not self._overlap or len(self._in_flight) > 1 or not output.num_scheduled_tokens:
            while self._in_flight:
                self.scheduler.update(*self._in_flight.popleft())
                if self._overlap and output.num_scheduled_tokens:
                    break

    def add(self, request_id: str, prompt: list[int], params: dict[str, Any] | None, max_tokens: int) -> Request:
        request = Request(request_id, prompt, params, max_tokens)
        self.scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        self.scheduler.finish(request, Status.FINISHED_ABORTED)


class Dialing:
    """Handshakes with whoever lives at an address."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._open: list[PeerAddress] = []

    def dial(self, address: PeerAddress) -> None:
        self._open.append(address)

    def take(self) -> list[Dialed]:
        dialed, self._open = self._open, []
        return [self._ask(address) for address in dialed]

    def close(self) -> None: ...

    def _ask(self, address: PeerAddress) -> Dialed:
        engine = self._world.engines.get(address.host)
        if engine is None or not engine.running or address.tp_rank >= len(engine.ranks):
            return Dialed(address, None, f"handshake timeout: nobody answers at {address}")
        return Dialed(address, engine.ranks[address.tp_rank].answer)


class Proving:
    """Whose process is gone, of those that were asked for."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._open: list[AgentName] = []

    def ask(self, agent: AgentName, process: ProcessIdentity, address: PeerAddress) -> None:
        self._open.append(agent)

    def take(self) -> list[AgentName]:
        asked, self._open = self._open, []
        return [agent for agent in asked if self._world.fabric.state(agent) == "killed"]

    def close(self) -> None: ...


class World:
    """Engines by host over one fabric, and the time."""

    def __init__(self, rng: Any, seed: int, faults: Faults | None = None) -> None:
        self.rng = rng
        self.fabric = MemoryFabric(seed, faults)
        self.fabric.on_land = self._on_land
        self.engines: dict[str, Engine] = {}
        self.past: list[Engine] = []

    @property
    def now_s(self) -> float:
        return self.fabric.now_s

    def start(self, host: str, **options: Any) -> Engine:
        if host in self.engines:
            self.past.append(self.engines[host])
        life = sum(engine.host == host for engine in self.past)
        self.engines[host] = Engine(self, host, life, **options)
        return self.engines[host]

    def advance(self, duration_s: float) -> None:
        self.fabric.advance(self.now_s + duration_s)
        for engine in self.engines.values():
            for rank in engine.ranks:
                if self.fabric.state(rank.agent) == "running":
                    rank.thread.work()

    def _on_land(self, writer: str, target: str, address: int, length: int) -> None:
        """Bytes of a peer belong into blocks that are held for a load, and not into what it had already."""
        rank = next(r for e in [*self.engines.values(), *self.past] for r in e.ranks if r.agent == target)
        for byte in (address - rank.base, address - rank.base + length - 1):
            block = byte // (BLOCK * SLOT)
            owners = [request for request in rank.engine.scheduler.requests.values() if block in request.blocks]
            assert len(owners) == 1, f"{writer} wrote into block {block} of {target}, which {len(owners)} hold"
            assert owners[0].status is Status.WAITING_FOR_REMOTE_KVS or owners[0].finished, owners[0]
