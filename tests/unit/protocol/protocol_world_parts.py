"""What a simulated world is made of: memory, requests, writes, and the processes with their machines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvpush.protocol import actions as act
from kvpush.protocol.consumer import Consumer
from kvpush.protocol.ids import AgentName, PeerAddress, RequestId, TransferId
from kvpush.protocol.producer import Producer
from kvpush.protocol.prompt import PromptIdentity
from kvpush.protocol.timing import Timing

BLOCK_SIZE = 4
TICK_S = 0.25
GHOST_S = 1.0  # how long a dead process's writes may still land
NEVER_S = 1e9
TIMING = Timing(
    rendezvous_timeout_s=3.0,
    unclaimed_timeout_s=5.0,
    announced_timeout_s=10.0,
    admission_timeout_s=6.0,
    peer_timeout_s=2.0,
    ping_interval_s=0.5,
    write_timeout_s=4.0,
    abort_drain_s=0.5,
    tombstone_s=4.0,
)


@dataclass(eq=False)
class Memory:
    """The blocks of one D request at one rank. tokens: per writing address, what each token holds."""

    node: ConsumerNode
    request_id: RequestId
    prompt: PromptIdentity
    first_token: int
    writers: list[PeerAddress]
    tokens: dict[PeerAddress, list[object]] = field(default_factory=dict)
    in_flight: int = 0
    held: bool = True
    wanted: bool = True
    reports: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.tokens = {address: [None] * self.prompt.num_tokens for address in self.writers}


@dataclass(eq=False)
class Source:
    """A request of the P engine. epoch: counts the block tables that it has had; closed: a preemption is under way."""

    request_id: RequestId
    transfer_id: TransferId
    prompt: PromptIdentity
    ready: int = 0
    epoch: int = 0
    closed: bool = False
    finished: bool = False
    sent: set[PeerAddress] = field(default_factory=set)


@dataclass(eq=False)
class Write:
    """A piece on its way. land_s: when its bytes arrive; NEVER_S if only the end of the world frees it."""

    node: ProducerNode
    action: act.WritePiece
    source: Source
    epoch: int
    memory: Memory
    good: bool
    ended: bool = False


@dataclass(eq=False)
class Node:
    agent: AgentName
    address: PeerAddress
    alive: bool = True
    dead_since_s: float = 0.0
    stopped_until_s: float = 0.0


@dataclass(eq=False)
class ProducerNode(Node):
    producer: Producer = field(init=False)

    def __post_init__(self) -> None:
        self.producer = Producer(TIMING, block_size=BLOCK_SIZE, max_tombstones=8)


@dataclass(eq=False)
class ConsumerNode(Node):
    consumer: Consumer = field(init=False)
    memories: dict[RequestId, Memory] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.consumer = Consumer(TIMING, self.address)
