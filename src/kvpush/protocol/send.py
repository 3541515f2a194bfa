"""P's record of one (transfer, consumer) at one rank of D, and how it moves through the transition table."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvpush.protocol.ids import AgentName, SendKey
from kvpush.protocol.messages import Commit, Failed, PieceDigest, Quiet
from kvpush.protocol.registration import Registration
from kvpush.protocol.rendezvous import LocalRequest
from kvpush.protocol.transitions import SEND_TERMINAL, SEND_TRANSITIONS, SendEvent, SendState, step

MAX_STREAMED_PIECES = 1000
"""Pieces of one attempt that leave before the prompt is complete: their digests must fit into one commit."""


MAX_DIGESTS = MAX_STREAMED_PIECES + 1


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [first_token, end_token) that were posted for an attempt and have not ended yet.

    read: its bytes stand in staging memory; it does not need the request's blocks any more.
    """

    attempt: int
    first_token: int
    end_token: int
    posted_s: float
    read: bool = False


@dataclass(slots=True)
class Send:
    """A registration that has met its request.

    attempt: the highest that the peer has made or cancelled. posted: tokens up to here were handed to the transport in
    this attempt. pieces: what is in flight, of any attempt. waiting_since_s: since when P has posted nothing for it.
    poisoned: its source blocks were given back while pieces were in flight.
    """

    registration: Registration
    local: LocalRequest
    waiting_since_s: float
    state: SendState = SendState.WAITING
    attempt: int = 0
    posted: int = 0
    pieces: dict[int, Piece] = field(default_factory=dict)
    num_pieces: int = 0
    num_bytes: int = 0
    num_writes: int = 0
    staged_blocks: int = 0
    digests: list[PieceDigest] = field(default_factory=list)
    poisoned: bool = False
    reason: str = ""
    ended_s: float = 0.0

    def __post_init__(self) -> None:
        self.attempt = self.registration.attempt
        self.posted = self.registration.first_token

    @property
    def key(self) -> SendKey:
        return self.registration.key

    @property
    def agent(self) -> AgentName:
        return self.registration.agent

    @property
    def terminal(self) -> bool:
        return self.state in SEND_TERMINAL

    @property
    def num_tokens(self) -> int:
        return self.registration.prompt.num_tokens

    @property
    def reads_blocks(self) -> bool:
        """Pieces in flight read blocks that the request still owns."""
        return bool(self.num_reading) and not self.poisoned

    @property
    def num_reading(self) -> int:
        """Pieces in flight that still read blocks, whoever owns those now."""
        return sum(not piece.read for piece in self.pieces.values())

    def step(self, event: SendEvent, *, peer_fault: bool = False) -> None:
        """Takes a transition. Raises ProtocolError and changes nothing if the table has none."""
        self.state = step(SEND_TRANSITIONS, self.state, event, "peer" if peer_fault else "local")

    def postable(self, block_size: int, stream: bool) -> int:
        """Up to which token pieces can be posted now; whole blocks only, until the prompt is complete."""
        if self.local.complete:
            return self.num_tokens
        if not stream or self.num_pieces >= MAX_STREAMED_PIECES:
            return 0
        return self.local.ready // block_size * block_size

    def post(self, piece: int, limit: int, now_s: float) -> Piece:
        """Books a piece of everything from `posted` up to `limit`."""
        self.step(SendEvent.POST_LAST if limit == self.num_tokens else SendEvent.POST)
        posted = self.pieces[piece] = Piece(self.attempt, self.posted, limit, now_s)
        self.posted = limit
        self.num_pieces += 1
        self.waiting_since_s = now_s
        return posted

    def unpost(self, piece: Piece, now_s: float) -> None:
        """A piece of this attempt was not posted after all; its tokens are owed again."""
        self.step(SendEvent.UNPOST)
        self.posted = min(self.posted, piece.first_token)
        self.num_pieces -= 1
        self.waiting_since_s = now_s

    def cut(self, piece: int, end_token: int, now_s: float) -> None:
        """Only tokens up to `end_token` of a piece were read before its blocks were taken; the rest is owed again."""
        cut = self.pieces[piece]
        if cut.attempt == self.attempt and not self.terminal:
            self.step(SendEvent.UNPOST)
            self.posted = min(self.posted, end_token)
            self.waiting_since_s = now_s
        self.pieces[piece] = replace(cut, end_token=end_token, read=True)

    def restart(self, registration: Registration, now_s: float) -> None:
        """A new attempt: everything is owed again. What is in flight of the old one stays booked until it ends."""
        self.step(SendEvent.RESTART, peer_fault=True)
        self.registration = registration
        self.attempt = registration.attempt
        self.posted = registration.first_token
        self.num_pieces = self.num_bytes = self.num_writes = self.staged_blocks = 0
        self.digests.clear()
        self.waiting_since_s = now_s

    def cover(self, attempt: int) -> None:
        """The peer has gone on to this attempt: what will be said about the end holds for it too."""
        self.attempt = max(self.attempt, attempt)

    def last_word(self) -> Commit | Failed | Quiet:
        """What D is told about the end of a terminal send, as things stand now."""
        if self.state is SendState.COMMITTED:
            # Too many for one message are as good as none: D then says that it could not check.
            digests = list(self.digests) if len(self.digests) <= MAX_DIGESTS else []
            return Commit(
                self.key, self.attempt, self.num_tokens, self.num_bytes, self.num_writes, digests, self.staged_blocks
            )
        if self.state is SendState.FAILED:
            return Failed(self.key, self.attempt, self.reason, quiet=not self.pieces)
        return Quiet(self.key, self.attempt)
