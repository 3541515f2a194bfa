"""The rules of docs/architecture.md ("Rules that nothing may break"), checked at every event that could break them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from kvpush.protocol.ids import AgentName, RequestId
from kvpush.protocol.messages import decode
from kvpush.sim.request import BLOCK
from kvpush.sim.step import Entry
from kvpush.sim.timing import TICK_S, TIMING
from kvpush.sim.transport import Flight
from kvpush.transfer.commands import Fetch
from kvpush.transfer.results import LoadFailed, Received, Result, Sent

if TYPE_CHECKING:
    from kvpush.sim.worker import Worker
    from kvpush.sim.world import World

SILENCE_BOUND_S = TIMING.peer_timeout_s + TIMING.ping_interval_s + 4 * TICK_S + 0.35
"""After so long without its producer a load has failed: the timeout, ticks, and a handshake that times out."""


WRITE_BOUND_S = TIMING.write_timeout_s + 8 * TIMING.ping_interval_s
"""After so long in one write a load has failed: the timeout, and pings until one answer is not lost."""


class Violation(AssertionError):
    """A rule is broken; the text says which, by whom, and when."""


@dataclass(eq=False, slots=True)
class Load:
    """Blocks of a rank that a producer was given.

    dark_s: since when that producer cannot be reached, or None; lit_s: since when it can. tainted: a write into them
    has read a source block that was given away.
    """

    worker: Worker
    fetch: Fetch
    blocks: tuple[int, ...]
    started_s: float
    dark_s: float | None = None
    lit_s: float = 0.0
    failed_s: float | None = None
    tainted: bool = False


class Referee:
    """Watches all engines of a world.

    seen: what has happened, by name, so that tests can ask for it. sure: transfers that nothing can keep from arriving.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.seen: Counter[str] = Counter()
        self.sure: set[str] = set()
        self._loads: dict[tuple[str, RequestId], Load] = {}
        self._owners: dict[str, dict[int, Load]] = {}  # agent -> block -> the load that it is given away for
        self._flights: list[Flight] = []

    # Writes

    def on_post(self, flight: Flight) -> None:
        self._flights.append(flight)
        if self._world.trace is not None:
            owners = self._owners.get(flight.target, {})
            keys = sorted({str(owners[block].fetch.key.transfer_id) for block in flight.targets if block in owners})
            blocks = f"blocks {sorted(flight.sources)} into {sorted(flight.targets)}"
            self._world.note(flight.writer, f"writes {blocks} of {flight.target} for {', '.join(keys)}")
        self._check_targets(flight.writer, flight.target, flight.targets, "posts a write")

    def on_land(self, writer: str, target: str, address: int, length: int) -> None:
        worker = self._world.agents[target]
        if not worker.base <= address < worker.base + worker.memory.nbytes:
            self._on_land_in_slot(worker, writer, address, length)
            return
        first = (address - worker.base) % worker.layer_bytes // (BLOCK * 8)
        last = (address + length - 1 - worker.base) % worker.layer_bytes // (BLOCK * 8)
        self._check_targets(writer, target, range(first, last + 1), "writes")

    def _on_land_in_slot(self, worker: Worker, writer: str, address: int, length: int) -> None:
        area = None if worker.staging is None else worker.staging.receive
        unstager = worker.core._consumer_side._unstager
        if area is None or unstager is None:
            self._break(f"{writer} writes to {worker.agent} where nothing is")
        self.seen["landed in a slot"] += 1
        for byte in (address, address + length - 1):
            slot = (byte - area.address) // area.slot_bytes
            if not unstager.leases.holds(AgentName(writer), slot):
                self._break(f"{writer} writes into slot {slot} of {worker.agent}, which is not its own")

    def _check_targets(self, writer: str, target: str, blocks: Collection[int], what: str) -> None:
        if self._world.fabric.state(target) == "killed":
            return
        owners = self._owners.get(target, {})
        for block in blocks:
            load = owners.get(block)
            if load is None:
                self._break(f"{writer} {what} into block {block} of {target}, which was not given to it")
            if not writer.startswith(load.fetch.peer[0] + "."):
                self._break(f"{writer} {what} into block {block} of {target}, which waits for {load.fetch.peer[0]}")

    def _open_to(self, agent: str, blocks: Collection[int]) -> list[Flight]:
        """Writes in flight into some of these blocks."""
        fabric = self._world.fabric
        self._flights = [flight for flight in self._flights if flight.open(fabric)]
        wanted = frozenset(blocks)
        return [flight for flight in self._flights if flight.target == agent and flight.targets & wanted]

    # Loads at D

    def on_fetch(self, worker: Worker, fetch: Fetch) -> None:
        blocks = fetch.blocks[0][fetch.first_token // BLOCK :]
        load = Load(worker, fetch, blocks, self._world.now_s)
        self._loads[worker.agent, fetch.request_id] = load
        owners = self._owners.setdefault(worker.agent, {})
        for block in blocks:
            if block in owners:
                self._break(f"block {block} of {worker.agent} is given away twice")
            owners[block] = load
        self._note_dark(load)
        self._trace(worker, f"fetches {fetch.key} for {fetch.request_id} from token {fetch.first_token} into {blocks}")

    def on_given(self, worker: Worker, fetch: Fetch, quarantined: int) -> None:
        """The transfer thread has taken up a load: it may ask for writes only while not too much is in quarantine."""
        limit = worker.spec.quarantine_max_blocks
        asked = worker.core._consumer_side._consumer.receive(fetch.request_id) is not None
        if limit and quarantined > limit and asked:
            self._break(f"{worker.agent} gives blocks to a writer while {quarantined} are in quarantine")

    def on_result(self, worker: Worker, result: Result) -> None:
        self.seen[type(result).__name__] += 1
        self._trace(worker, f"-> {result}")
        if isinstance(result, Sent):
            return
        load = self._loads.get((worker.agent, result.request_id))
        if load is None:
            return  # refused: nobody was asked to write
        if isinstance(result, LoadFailed):
            self.seen[f"failed {result.reason}"] += 1
            if load.fetch.key.transfer_id in self.sure or result.reason == "integrity":
                self._break(f"{result.request_id} of {worker.agent} has failed ({result.reason}) for no reason")
            load.failed_s = self._world.now_s
            return
        flights = self._open_to(worker.agent, load.blocks)
        name = type(result).__name__.lower()
        if isinstance(result, Received):
            self._check_received(load)
            self.seen["surely received"] += load.fetch.key.transfer_id in self.sure
        if flights:
            self._break(f"{result.request_id} of {worker.agent} is {name} while {flights[0].writer} writes to it")
        self._end(load)

    def _check_received(self, load: Load) -> None:
        worker, fetch = load.worker, load.fetch
        if load.tainted:
            self._break(f"{fetch.request_id} of {worker.agent} is received although its source was given away")
        request = worker.engine.scheduler.requests.get(fetch.request_id)
        if request is None:
            self._break(f"{fetch.request_id} is received, and {worker.agent} does not hold it")
        table = list(fetch.blocks[0])
        there = worker.memory[:, table].reshape(worker.memory.shape[0], -1)
        tokens = slice(fetch.first_token, fetch.prompt.num_tokens)
        wanted = worker.kv_of(request.content.kv)
        if not np.array_equal(there[:, tokens], wanted[:, tokens]):
            wrong = np.flatnonzero((there[:, tokens] != wanted[:, tokens]).any(0)) + fetch.first_token
            self._break(f"{fetch.request_id} of {worker.agent} is received with wrong KV at tokens {wrong.tolist()}")

    def _end(self, load: Load) -> None:
        owners = self._owners[load.worker.agent]
        for block in load.blocks:
            del owners[block]
        del self._loads[load.worker.agent, load.fetch.request_id]

    # Sources at P, and the pools

    def on_preempted(self, worker: Worker, request_id: RequestId, poisoned: Collection[RequestId]) -> None:
        self.seen["poisoned" if request_id in poisoned else "preempted"] += 1
        if request_id in poisoned:
            params = worker.engine.scheduler.requests[request_id].kv_transfer_params or {}
            for flight in self._open_from(worker.agent, None):
                owners = self._owners.get(flight.target, {})
                keys = {owners[block].fetch.key for block in flight.targets if block in owners}
                flight.excused |= any(key.transfer_id == params["transfer_id"] for key in keys)
        self._trace(worker, f"preempts {request_id}{', poisoned' if request_id in poisoned else ''}")

    def _open_from(self, agent: str, blocks: frozenset[int] | None) -> list[Flight]:
        """Writes in flight of an agent that read some of these blocks, or any."""
        fabric = self._world.fabric
        self._flights = [flight for flight in self._flights if flight.open(fabric)]
        return [
            flight for flight in self._flights if flight.writer == agent and (blocks is None or flight.sources & blocks)
        ]

    def on_reuse(self, worker: Worker, blocks: Collection[int]) -> None:
        """Blocks are overwritten by their next owner: what reads them now must never be committed."""
        for flight in self._open_from(worker.agent, frozenset(blocks)):
            owners = self._owners.get(flight.target, {})
            for load in {owners[block] for block in flight.targets if block in owners}:
                if not load.tainted:
                    self.seen["read after free"] += 1
                    self._trace(worker, f"overwrites blocks that are read for {load.fetch.key}")
                load.tainted = True

    def on_free(self, worker: Worker, blocks: Collection[int], preempted: bool) -> None:
        """Blocks are back in the pool; what still reads them was waited for, or is going to be poisoned."""
        for flight in self._open_from(worker.agent, frozenset(blocks)) if blocks else ():
            flight.excused |= preempted
            if not flight.excused and self._world.now_s - flight.posted_s < TIMING.abort_drain_s:
                self._break(
                    f"{worker.agent} gives back {sorted(flight.sources)} while they are read for {flight.target}"
                )
        owners = self._owners.get(worker.agent, {})
        for block in blocks:
            if block in owners:
                self._break(f"block {block} of {worker.agent} is free while P may write it ({owners[block].fetch.key})")

    def on_wrong_kv(self, worker: Worker, entry: Entry, there: Any, wanted: Any) -> None:
        wrong = np.flatnonzero((there != wanted).any(0)).tolist()
        self._break(f"{worker.agent} computes {entry.request.request_id} from wrong KV at tokens {wrong}")

    # Time

    def note_reachability(self) -> None:
        """Something has stopped, died, come back, been cut or healed."""
        for load in self._loads.values():
            self._note_dark(load)

    def _note_dark(self, load: Load) -> None:
        if self._world.reachable_rank(load.worker.agent, load.fetch.peer[0], load.worker.tp_rank):
            if load.dark_s is not None or not load.lit_s:
                load.lit_s = self._world.now_s
            load.dark_s = None
        elif load.dark_s is None:
            load.dark_s = self._world.now_s

    def on_tick(self, worker: Worker) -> None:
        now_s = self._world.now_s
        for load in self._loads.values():
            if load.worker is not worker or load.dark_s is None or load.failed_s is not None:
                continue
            if self._has_ended(load):
                continue
            since_s = max(load.dark_s, load.started_s, worker.resumed_s)
            if now_s - since_s > SILENCE_BOUND_S:
                self._break(
                    f"{load.fetch.request_id} of {worker.agent} waits for {load.fetch.peer[0]} since {since_s:.3f}"
                )

        self._check_writes(worker)

    def _check_writes(self, worker: Worker) -> None:
        """A load whose producer has waited too long for a write has failed, if the two can hear each other."""
        for flight in self._open_from(worker.agent, None):
            owners = self._owners.get(flight.target, {})
            for load in {owners[block] for block in flight.targets if block in owners}:
                since_s = max(flight.posted_s, load.lit_s, worker.resumed_s, load.worker.resumed_s)
                late = self._world.now_s - since_s > WRITE_BOUND_S and load.dark_s is None and load.worker.running
                if late and load.failed_s is None and not self._has_ended(load):
                    self._break(f"{load.fetch.request_id} of {flight.target} waits for a write since {since_s:.3f} s")

    @staticmethod
    def _has_ended(load: Load) -> bool:
        """Its client has left: nobody waits, the memory is in quarantine."""
        return load.worker.engine.scheduler.requests[load.fetch.request_id].finished

    # The end

    def on_killed(self, agent: str) -> None:
        self._owners.pop(agent, None)
        self._loads = {name: load for name, load in self._loads.items() if load.worker.agent != agent}

    def check_end(self) -> None:
        """After everything has come to rest: no engine holds anything of a request any more."""
        for engine in self._world.engines.values():
            if engine.killed:
                continue
            left = engine.leftovers()
            if left:
                held = [str(load.fetch.key) for load in self._loads.values() if load.worker.engine is engine]
                requests = {name: request.status.name for name, request in engine.scheduler.requests.items()}
                self._break(f"{engine.agent} does not come to rest: {', '.join(left)}; {requests}; loads {held}")
            for worker in engine.workers:
                counters = worker.core.counters
                if counters.total("protocol_errors") + counters.get("messages_dropped", "local"):
                    self._break(f"{worker.agent} has given commands, or taken messages, that made no sense")

    def on_notify(self, writer: str, target: str, payload: bytes) -> None:
        """For the story of a world: what is said, but not what is only asked to see who is there."""
        message = decode(payload)
        key = getattr(message, "key", None) or getattr(message, "transfer_id", None)
        if key is not None:
            more = [
                f"{name} {value}"
                for name in ("attempt", "reason", "quiet")
                if (value := getattr(message, name, None)) is not None
            ]
            self._world.note(writer, f"says {type(message).__name__} {key} to {target} {' '.join(more)}")

    def _break(self, rule: str) -> NoReturn:
        raise Violation(f"at {self._world.now_s:.4f} s: {rule}")

    def _trace(self, worker: Worker, text: str) -> None:
        self._world.note(worker.agent, text)
