"""D's record of one request whose KV is to come, and how it moves through the transition table."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpush.protocol.commits import CommitSet
from kvpush.protocol.ids import AgentName, PeerAddress, RequestId, SendKey
from kvpush.protocol.messages import PieceDigest, Register
from kvpush.protocol.prompt import PromptIdentity
from kvpush.protocol.transitions import RECEIVE_TRANSITIONS, ReceiveEvent, ReceiveState, step


@dataclass(slots=True)
class Receive:
    """What D awaits for one request.

    blocks: encoded block tables, as parts of groups. attempts: the number of the present registration at each rank that
    must write; first_attempt: that of the first one. writers: the incarnations that have got a registration, and the
    address that each stands for: who may write; quiet: those of them that never will again. wanted: the client still
    waits (False after an abort). since_s: start of the present wait; quarantined_s: of the quarantine. direct: the
    writers may write into the blocks themselves, not only into staging slots.
    """

    request_id: RequestId
    key: SendKey
    prompt: PromptIdentity
    first_token: int
    blocks: list[list[bytes]]
    consumers: int
    ranks: CommitSet
    since_s: float
    first_attempt: int
    targets: dict[PeerAddress, int] = field(default_factory=dict)
    attempts: dict[PeerAddress, int] = field(init=False)
    state: ReceiveState = ReceiveState.ANNOUNCED
    writers: dict[AgentName, PeerAddress] = field(default_factory=dict)
    quiet: set[AgentName] = field(default_factory=set)
    accepted: set[PeerAddress] = field(default_factory=set)
    digests: list[tuple[PeerAddress, PieceDigest]] = field(default_factory=list)
    num_bytes: int = 0
    restarts: int = 0
    wanted: bool = True
    reason: str = ""
    last_cancel_s: float = 0.0
    direct: bool = True
    quarantined_s: float = 0.0

    def __post_init__(self) -> None:
        self.attempts = dict.fromkeys(self.ranks.expected, self.first_attempt)

    @property
    def attempt(self) -> int:
        """The latest number among all ranks."""
        return max(self.attempts.values())

    @property
    def active(self) -> bool:
        """Registered, and neither received nor given up."""
        return self.state in (ReceiveState.REGISTERED, ReceiveState.ACCEPTED, ReceiveState.RECEIVING)

    @property
    def fenced(self) -> bool:
        """Given up, and the memory is still held."""
        return self.state in (ReceiveState.FAILING, ReceiveState.QUARANTINED)

    @property
    def may_write(self) -> dict[AgentName, PeerAddress]:
        """The incarnations that have got a registration and have not said quiet since."""
        return {agent: address for agent, address in self.writers.items() if agent not in self.quiet}

    @property
    def exposed(self) -> bool:
        """Somebody may write into the blocks. What comes by way of staging slots is unpacked here, or not at all."""
        return self.direct and bool(self.may_write)

    @property
    def all_accepted(self) -> bool:
        return self.accepted == self.ranks.expected

    def step(self, event: ReceiveEvent, *, peer_fault: bool = False) -> None:
        """Takes a transition. Raises ProtocolError and changes nothing if the table has none."""
        self.state = step(RECEIVE_TRANSITIONS, self.state, event, "peer" if peer_fault else "local")

    def admit(self, agent: AgentName, address: PeerAddress) -> None:
        """An incarnation has got a registration: from now on it may write."""
        self.writers[agent] = address
        self.quiet.discard(agent)

    def others_at(self, address: PeerAddress, agent: AgentName) -> bool:
        """Another incarnation has got our registration at this address."""
        return any(at == address and other != agent for other, at in self.writers.items())

    def restart(self, address: PeerAddress, attempt: int, now_s: float) -> None:
        """One rank is to be registered again; what the others have done stays."""
        self.step(ReceiveEvent.RESTART)
        self.attempts[address] = attempt
        self.accepted.discard(address)
        self.restarts += 1
        self.since_s = now_s

    def registration(self, address: PeerAddress, sender: PeerAddress) -> list[Register]:
        """The messages that register with one rank. Raises ValueError if a value is out of range."""
        return [
            Register(
                key=self.key,
                attempt=self.attempts[address],
                prompt=self.prompt,
                first_token=self.first_token,
                blocks=groups,
                sender=sender,
                consumers=self.consumers,
                targets=self.targets.get(address, 1),
                part=part,
                parts=len(self.blocks),
                direct=self.direct,
            )
            for part, groups in enumerate(self.blocks)
        ]
