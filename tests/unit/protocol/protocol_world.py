"""A world of one P engine, one or two D engines and a bad network between their protocol machines, in virtual time.

Everything is drawn from one seed, so a world that breaks a rule can be replayed: `World(seed).run()`.
Messages are delayed, reordered, duplicated and lost; pieces end late, fail or hang; requests are aborted at both sides,
preempted and repeated under a used transfer id; processes stop, go on, die and come back. The world knows what the
machines must not see: which bytes are in flight, what they hold, and who owns the memory that they land in.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

from protocol_fabric import Fabric
from protocol_referee import Referee
from protocol_world_parts import (
    GHOST_S,
    NEVER_S,
    TICK_S,
    ConsumerNode,
    Memory,
    Node,
    ProducerNode,
    Source,
    Write,
)

from kvpush.protocol import actions as act
from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import AgentName, PeerAddress, RequestId, SendKey, TransferId
from kvpush.protocol.producer import Producer
from kvpush.protocol.prompt import PromptIdentity, prompt_identity

T = TypeVar("T")


class World:
    """loss: the share of messages that vanish, and of writes that go wrong."""

    def __init__(self, seed: int, *, traced: bool = False) -> None:
        self.traced = traced
        self.random = random.Random(seed)
        draw = self.random
        self.seed = seed
        self.now_s = 0.0
        self.loss = draw.choice([0.0, 0.0, 0.02, 0.15])
        self.slow = draw.choice([0.0, 0.05, 0.3])
        self.trace: list[str] = []
        self.seen: Counter[str] = Counter()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = self._num_names = 0
        self.sources: dict[RequestId, Source] = {}
        self.writes: list[Write] = []
        self.memories: list[Memory] = []
        self.by_blocks: dict[bytes, Memory] = {}
        self.nodes: dict[AgentName, Node] = {}
        self.p_addresses = [PeerAddress("p", 1, 0, rank) for rank in range(draw.choice([1, 1, 2]))]
        self.d_engines = [
            [PeerAddress(f"d{engine}", 1, 0, rank) for rank in range(draw.choice([1, 1, 2]))]
            for engine in range(draw.choice([1, 1, 2]))
        ]
        self.at: dict[PeerAddress, Node] = {}
        for address in self.p_addresses:
            self.start(address, ProducerNode)
        for engine in self.d_engines:
            for address in engine:
                self.start(address, ConsumerNode)
        self.used: list[TransferId] = []
        self.referee = Referee(self)
        self.fabric = Fabric(self)

    # The course of the world

    def run(self, steps: int = 40) -> None:
        self.dispatch()
        for _ in range(steps):
            self.random.choice(self.happenings())()
            self.advance(self.random.choice([0.01, 0.05, 0.2, 0.5, 1.5]))
        self.heal()
        for _ in range(400):
            if all(self.idle(node) for node in self.live()):
                break
            self.advance(0.5)
        self.referee.at_end()

    def happenings(self) -> list[Callable[[], None]]:
        often = [self.dispatch, self.compute, self.compute, self.compute, self.nothing]
        rare = [self.preempt, self.abort, self.cancel, self.pressure, self.break_connection]
        bad = [self.stop, self.restart_producer, self.restart_consumer] if self.random.random() < 0.2 else []
        return often + rare + bad

    def nothing(self) -> None:
        pass

    def heal(self) -> None:
        self.note("heal")
        self.loss = self.slow = 0.0
        for node in self.live():
            node.stopped_until_s = 0.0
        self.advance(2.0)  # every leg that was dispatched has come
        last = self.random.random()
        if last < 0.1:
            self.bury(self.p_addresses)
            self.sources.clear()
        elif last < 0.2:
            self.bury(self.random.choice(self.d_engines))
        for write in list(self.writes):
            self.later(self.random.random(), lambda write=write: self.fabric.land(write))  # type: ignore[misc]
        for source in list(self.sources.values()):
            self.later(self.random.random() + 0.5, lambda source=source: self.complete(source))  # type: ignore[misc]

    # Time

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._num_events, call))

    def advance(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while True:
            tick_s = (self.now_s // TICK_S + 1) * TICK_S
            event_s = self._events[0][0] if self._events else NEVER_S
            if min(tick_s, event_s) > end_s:
                break
            if event_s <= tick_s:
                self.now_s = event_s
                heapq.heappop(self._events)[2]()
            else:
                self.now_s = tick_s
                self.tick()
        self.now_s = end_s

    def tick(self) -> None:
        for node in self.live():
            if node.stopped_until_s > self.now_s:
                continue
            if isinstance(node, ProducerNode):
                self.fabric.do(node, node.producer.on_tick(self.now_s))
            elif isinstance(node, ConsumerNode):
                self.fabric.do(node, node.consumer.on_tick(self.now_s))
                self.prove(node)

    def prove(self, node: ConsumerNode) -> None:
        """The transfer layer's search for proof that silent writers are gone."""
        for receive in node.consumer.quarantined:
            for agent in receive.may_write:
                peer = self.nodes[agent]
                if not peer.alive and self.now_s - peer.dead_since_s > GHOST_S:
                    self.seen["gone"] += 1
                    self.fabric.do(node, node.consumer.on_gone(agent, self.now_s))

    # What happens

    def dispatch(self) -> None:
        """The router sends both legs of a request, in any order, sometimes wrongly."""
        draw = self.random
        if draw.random() < 0.25 and self.used:
            transfer_id = draw.choice(self.used)
        else:
            transfer_id = TransferId(self.name("t"))
            self.used.append(transfer_id)
        tokens = [draw.randrange(1000) for _ in range(draw.choice([1, 3, 4, 9, 17, 30]))]
        prompt = prompt_identity(tokens)
        consumers = draw.choice([1, 1, 1, 2, 3])
        engine = draw.choice(self.d_engines)
        if draw.random() < 0.95:
            self.later(draw.choice([0.0, 0.1, 1.0]), lambda: self.offer(transfer_id, prompt, consumers))
        for consumer in range(consumers):
            what = draw.random()
            theirs = prompt if draw.random() < 0.95 else prompt_identity([*tokens, 1])
            key = SendKey(transfer_id, consumer)
            delay_s = draw.choice([0.0, 0.1, 1.0])
            if what < 0.8:
                if draw.random() < 0.2:
                    self.announce(engine, key, theirs)
                    delay_s += draw.choice([0.5, 3.0])
                self.later(delay_s, lambda key=key, theirs=theirs: self.register(engine, key, theirs, consumers))  # type: ignore[misc]
            elif what < 0.95:
                everybody = draw.random() < 0.3
                self.later(delay_s, lambda key=key, everybody=everybody: self.release(engine, key, everybody))  # type: ignore[misc]
        self.note(f"dispatch {transfer_id} x{consumers}, {prompt.num_tokens} tokens, to {engine[0].host}")

    def offer(self, transfer_id: TransferId, prompt: PromptIdentity, consumers: int) -> None:
        request_id = RequestId(self.name("p"))
        source = Source(request_id, transfer_id, prompt)
        if any(other.transfer_id == transfer_id and not self.freed(other) for other in self.sources.values()):
            return  # a duplicate; each rank would refuse it unless it has reported the other one already
        self.sources[request_id] = source
        for node in self.p_nodes():
            self.fabric.do(node, node.producer.on_request(request_id, transfer_id, prompt, consumers, self.now_s))

    def announce(self, engine: list[PeerAddress], key: SendKey, prompt: PromptIdentity) -> None:
        for node in self.d_nodes(engine):
            self.fabric.do(node, node.consumer.announce(key.transfer_id, prompt, self.p_addresses, self.now_s))
            self.later(8.0, lambda node=node: node.consumer.withdraw(key.transfer_id))  # type: ignore[misc]

    def register(self, engine: list[PeerAddress], key: SendKey, prompt: PromptIdentity, consumers: int) -> None:
        request_id = RequestId(self.name("r"))
        first_token = self.random.randrange(prompt.num_tokens) if self.random.random() < 0.3 else 0
        for node in self.d_nodes(engine):
            memory = Memory(node, request_id, prompt, first_token, list(self.p_addresses))
            name = f"{request_id}@{node.agent}".encode()
            parts = [[name]] if self.random.random() < 0.8 else [[name[:3]], [name[3:]]]
            targets = dict.fromkeys(self.p_addresses, len(engine))
            try:
                actions = node.consumer.register(
                    request_id, key, prompt, first_token, parts, consumers, self.p_addresses, self.now_s, targets
                )
            except ProtocolError as error:
                self.referee.expect(error.fault == "local", str(error))
                continue  # a live request has this key: a failed load
            self.by_blocks[name] = memory
            self.memories.append(memory)
            node.memories[request_id] = memory
            self.fabric.do(node, actions)

    def release(self, engine: list[PeerAddress], key: SendKey, everybody: bool) -> None:
        for node in self.d_nodes(engine):
            self.fabric.do(node, node.consumer.release(key, self.p_addresses, all_consumers=everybody))

    def compute(self) -> None:
        source = self.pick(source for source in self.sources.values() if not source.finished and not source.closed)
        if source is not None and not self.stopped(self.p_addresses):
            num_tokens = source.prompt.num_tokens
            source.ready = min(num_tokens, source.ready + self.random.choice([1, 3, 8, 40]))
            self.tell(source, lambda producer: producer.on_tokens(source.request_id, source.ready, self.now_s))
            if source.ready == num_tokens and self.random.random() < 0.7:
                self.finish(source)

    def complete(self, source: Source) -> None:
        if source.finished or source.request_id not in self.sources:
            return
        source.closed = False
        source.ready = source.prompt.num_tokens
        self.tell(source, lambda producer: producer.on_tokens(source.request_id, source.ready, self.now_s))
        self.finish(source)

    def finish(self, source: Source) -> None:
        source.finished = True
        self.tell(source, lambda producer: producer.on_finished(source.request_id, self.now_s))

    def abort(self) -> None:
        source = self.pick(source for source in self.sources.values() if not source.finished and not source.closed)
        if source is not None and not self.stopped(self.p_addresses):
            self.note(f"abort {source.request_id}")
            source.finished = True
            self.tell(source, lambda producer: producer.on_aborted(source.request_id, self.now_s))

    def preempt(self) -> None:
        """The engine takes a request's blocks: no piece may begin any more, those in flight have a moment to end."""
        source = self.pick(source for source in self.sources.values() if not source.finished and source.ready)
        if source is not None and not source.closed and not self.stopped(self.p_addresses):
            self.note(f"preempt {source.request_id}")
            source.closed = True
            self.later(self.random.choice([0.0, 0.05, 0.2]), lambda: self.take_blocks(source))

    def take_blocks(self, source: Source) -> None:
        if source.finished or source.request_id not in self.sources or not source.closed:
            return
        patient = self.random.random() < 0.5
        source.ready = 0
        for node in self.p_nodes():
            mine = [write for write in self.writes if write.node is node and write.source is source]
            for write in mine:
                if patient and write.good and write.epoch == source.epoch:
                    self.fabric.land(write, at_once=True)
            if node.producer.in_flight(source.request_id):
                self.seen["poisoned"] += 1
                self.fabric.do(node, node.producer.on_poisoned(source.request_id, self.now_s))
            self.fabric.do(node, node.producer.on_preempted(source.request_id, self.now_s))
        source.epoch += 1
        source.closed = False

    def cancel(self) -> None:
        memory = self.pick(memory for memory in self.memories if memory.held and memory.node.alive)
        if memory is not None:
            self.note(f"cancel {memory.request_id}")
            for node in self.d_nodes(None):
                theirs = node.memories.get(memory.request_id)
                if theirs is not None and theirs.held:
                    theirs.wanted = False
                    self.fabric.do(node, node.consumer.cancel(memory.request_id, self.now_s))

    def pressure(self) -> None:
        for node in self.p_nodes():
            self.fabric.do(node, node.producer.on_pressure(self.now_s))

    def break_connection(self) -> None:
        p, d = self.random.choice(self.p_nodes()), self.random.choice(self.d_nodes(None))
        self.note(f"break {p.agent} {d.agent}")
        if self.random.random() < 0.7:
            self.fabric.do(d, d.consumer.on_disconnected(p.agent, self.now_s))
        if self.random.random() < 0.5:
            self.fabric.do(p, p.producer.on_unreachable(d.agent, "disconnected", self.now_s))

    def stop(self) -> None:
        node = self.random.choice(self.live())
        node.stopped_until_s = self.now_s + self.random.choice([0.5, 3.0, 10.0])
        self.note(f"stop {node.agent}")

    def restart_producer(self) -> None:
        self.note("restart P")
        self.sources.clear()
        old = [node.agent for node in self.p_nodes()]
        for address in self.p_addresses:
            self.kill(self.at[address])
            self.start(address, ProducerNode)

        for node in self.d_nodes(None) if self.random.random() < 0.5 else []:
            for agent in old:
                self.fabric.do(node, node.consumer.on_disconnected(agent, self.now_s))

    def restart_consumer(self) -> None:
        engine = self.random.choice(self.d_engines)
        self.note(f"restart {engine[0].host}")
        for address in engine:
            self.kill(self.at[address])
            self.start(address, ConsumerNode)

    def kill(self, node: Node) -> None:
        node.alive, node.dead_since_s = False, self.now_s
        for write in [write for write in self.writes if write.node is node]:
            # What a dead process had posted lands within a moment, or never.
            self.later(self.random.random() * GHOST_S, lambda write=write: self.fabric.land(write))  # type: ignore[misc]

    def bury(self, addresses: list[PeerAddress]) -> None:
        """An engine dies and does not come back: the others must end without it."""
        self.note("bury", addresses[0])
        for address in addresses:
            self.kill(self.at.pop(address))

    def start(self, address: PeerAddress, kind: type[Node]) -> None:
        node = kind(AgentName(self.name(f"{address.host}-{address.tp_rank}-")), address)
        self.nodes[node.agent] = self.at[address] = node

    # Helpers

    def tell(self, source: Source, call: Callable[[Producer], list[act.Action]]) -> None:
        for node in self.p_nodes():
            if node.address not in source.sent:
                self.fabric.do(node, call(node.producer))

    def freed(self, source: Source) -> bool:
        return len(source.sent) == len(self.p_addresses)

    def idle(self, node: Node) -> bool:
        return node.producer.idle if isinstance(node, ProducerNode) else node.consumer.idle  # type: ignore[attr-defined]

    def live(self) -> list[Node]:
        return list(self.at.values())

    def stopped(self, addresses: list[PeerAddress]) -> bool:
        return any(self.at[address].stopped_until_s > self.now_s for address in addresses)

    def p_nodes(self) -> list[ProducerNode]:
        return [node for address in self.p_addresses if isinstance(node := self.at.get(address), ProducerNode)]

    def d_nodes(self, engine: list[PeerAddress] | None) -> list[ConsumerNode]:
        addresses = [address for ranks in self.d_engines for address in ranks] if engine is None else engine
        return [node for address in addresses if isinstance(node := self.at.get(address), ConsumerNode)]

    def pick(self, candidates: Iterable[T]) -> T | None:
        found = list(candidates)
        return self.random.choice(found) if found else None

    def name(self, prefix: str) -> str:
        self._num_names += 1
        return f"{prefix}{self._num_names}"

    def note(self, *parts: object) -> None:
        if self.traced:
            self.trace.append(" ".join([f"{self.now_s:8.3f}", *map(str, parts)]))
