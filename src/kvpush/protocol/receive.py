"""D's record of one request whose KV is to come, and how it moves through the transition table."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpush.protocol.commits import CommitSet
from kvpush.protocol.ids import AgentName, PeerAddress, RequestId, SendKey
from kvpush.protocol.messages import PieceDigest
from kvpush.protocol.prompt import PromptIdentity
from kvpush.protocol.transitions import RECEIVE_TRANSITIONS, ReceiveEvent, ReceiveState, step


@dataclass(slots=True)
class Receive:
    """What D awaits for one request.

    blocks: encoded block tables, as parts of groups. writers: the incarnations that have got a registration, and the
    address that each stands for: who may write; quiet: those of them that never will again. wanted: the client still
    waits (False after an abort). since_s: start of the present wait.
    """

    request_id: RequestId
    key: SendKey
    prompt: PromptIdentity
    first_token: int
    blocks: list[list[bytes]]
    consumers: int
    ranks: CommitSet
    since_s: float
    attempt: int = 0
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

    @property
    def active(self) -> bool:
        """Registered, and neither received nor given up."""
        return self.state in (ReceiveState.REGISTERED, ReceiveState.ACCEPTED, ReceiveState.RECEIVING)

    @property
    def fenced(self) -> bool:
        """Given up, and the memory is still held."""
        return self.state in (ReceiveState.FAILING, ReceiveState.QUARANTINED)

    def step(self, event: ReceiveEvent, *, peer_fault: bool = False) -> None:
        """Takes a transition. Raises ProtocolError and changes nothing if the table has none."""
        self.state = step(RECEIVE_TRANSITIONS, self.state, event, "peer" if peer_fault else "local")

    def hush(self, agent: AgentName) -> None:
        """An incarnation will not write any more; its rank is quiet once all its incarnations are."""
        address = self.writers[agent]
        self.quiet.add(agent)
        if all(other in self.quiet for other, at in self.writers.items() if at == address):
            self.ranks.hush(address)

    def hush_unregistered(self) -> None:
        """Ranks that never got the registration have nothing to write."""
        for address in self.ranks.not_quiet - set(self.writers.values()):
            self.ranks.hush(address)

    def agent_at(self, address: PeerAddress) -> AgentName | None:
        """The incarnation at an address that got our registration, or None if none did."""
        return next((agent for agent, at in self.writers.items() if at == address), None)
