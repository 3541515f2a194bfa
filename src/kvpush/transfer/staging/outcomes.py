"""P: what becomes of a staged piece, in the terms of the protocol."""

from __future__ import annotations

from dataclasses import dataclass

from kvpush.protocol.actions import WritePiece
from kvpush.protocol.messages import PieceDigest


@dataclass(frozen=True, slots=True)
class Read:
    """Nothing of the piece reads the request's blocks any more."""

    piece: WritePiece


@dataclass(frozen=True, slots=True)
class Cut:
    """Like Read, but only the tokens up to `end_token` were packed before the blocks were taken."""

    piece: WritePiece
    end_token: int


@dataclass(frozen=True, slots=True)
class NotPosted:
    """Nothing of the piece was packed before the blocks were taken; it is over."""

    piece: WritePiece


@dataclass(frozen=True, slots=True)
class Ended:
    """The piece is over: every byte stands in D's blocks, or (error) nothing more of it is going to get there."""

    piece: WritePiece
    num_bytes: int
    num_blocks: int
    num_parts: int
    digests: tuple[PieceDigest, ...]
    error: str
    took_s: float


Outcome = Read | Cut | NotPosted | Ended
