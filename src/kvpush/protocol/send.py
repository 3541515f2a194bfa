"""P's record of one (transfer, consumer), and how it moves through the transition table."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpush.protocol.ids import SendKey
from kvpush.protocol.messages import PieceDigest
from kvpush.protocol.rendezvous import LocalRequest, Registration
from kvpush.protocol.transitions import SEND_TERMINAL, SEND_TRANSITIONS, SendEvent, SendState, step


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [first_token, end_token) that were posted for an attempt and have not ended yet."""

    attempt: int
    first_token: int
    end_token: int


@dataclass(slots=True)
class Send:
    """A registration that has met its request.

    posted: tokens up to here were handed to the transport in this attempt. pieces: what is in flight, of any attempt.
    waiting_since_s: since when P has computed nothing for it.
    """

    registration: Registration
    local: LocalRequest
    waiting_since_s: float
    state: SendState = SendState.WAITING
    posted: int = 0
    pieces: dict[int, Piece] = field(default_factory=dict)
    num_bytes: int = 0
    num_writes: int = 0
    digests: list[PieceDigest] = field(default_factory=list)
    reason: str = ""

    def __post_init__(self) -> None:
        self.posted = self.registration.first_token

    @property
    def key(self) -> SendKey:
        return self.registration.key

    @property
    def attempt(self) -> int:
        return self.registration.attempt

    @property
    def terminal(self) -> bool:
        return self.state in SEND_TERMINAL

    @property
    def num_tokens(self) -> int:
        return self.registration.prompt.num_tokens

    def step(self, event: SendEvent, *, peer_fault: bool = False) -> None:
        """Takes a transition. Raises ProtocolError and changes nothing if the table has none."""
        self.state = step(SEND_TRANSITIONS, self.state, event, "peer" if peer_fault else "local")

    def postable(self, block_size: int, stream: bool) -> int:
        """Up to which token pieces can be posted now; whole blocks only, until the prompt is complete."""
        if self.local.complete:
            return self.num_tokens
        return self.local.ready // block_size * block_size if stream else 0

    def restart(self, registration: Registration, now_s: float) -> None:
        """A new attempt: everything is owed again. What is in flight of the old one stays booked until it ends."""
        self.step(SendEvent.RESTART, peer_fault=True)
        self.registration = registration
        self.posted = registration.first_token
        self.num_bytes = self.num_writes = 0
        self.digests.clear()
        self.waiting_since_s = now_s
