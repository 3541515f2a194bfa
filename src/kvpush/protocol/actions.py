"""What the state machines ask for. The transfer layer carries it out in production, the simulator in tests."""

from __future__ import annotations

from dataclasses import dataclass

from kvpush.protocol.ids import AgentName, PeerAddress, RequestId, SendKey, TransferId
from kvpush.protocol.messages import Message, PieceDigest


@dataclass(frozen=True, slots=True)
class SendTo:
    """Send a message to the rank at an address; connect first if need be.

    agent: if set, only that incarnation may get it (the rank behind the address may have restarted).
    """

    address: PeerAddress
    message: Message
    agent: AgentName | None = None


@dataclass(frozen=True, slots=True)
class Connect:
    """P: get ready to write to this incarnation, then call `Producer.on_connected` or `on_unreachable`."""

    address: PeerAddress
    agent: AgentName


@dataclass(frozen=True, slots=True)
class WritePiece:
    """P: write tokens [first_token, end_token) of a request into the consumer's blocks; tell the machine when done."""

    key: SendKey
    attempt: int
    piece: int
    request_id: RequestId
    agent: AgentName
    first_token: int
    end_token: int


@dataclass(frozen=True, slots=True)
class ReportSent:
    """P: the engine may free the request's blocks, as far as this rank is concerned."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class SendEnded:
    """P: a (transfer, consumer) reached a terminal state (for records and metrics)."""

    key: SendKey
    request_id: RequestId | None
    state: str
    reason: str
    num_tokens: int
    num_bytes: int
    num_writes: int


@dataclass(frozen=True, slots=True)
class Verify:
    """D: all ranks have committed; check the digests, then call `Consumer.on_verified`."""

    request_id: RequestId
    digests: tuple[tuple[PeerAddress, PieceDigest], ...]


@dataclass(frozen=True, slots=True)
class ReportReceived:
    """D: the request's KV is complete."""

    request_id: RequestId
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ReportFailed:
    """D: the KV will not come; the engine may answer its client. The blocks are still held."""

    request_id: RequestId
    reason: str


@dataclass(frozen=True, slots=True)
class ReportReleased:
    """D: nobody can write to the request's blocks any more; the engine may free them.

    unproven: the writers of whom that is only hoped, because the configuration bounds a quarantine by time.
    """

    request_id: RequestId
    unproven: tuple[PeerAddress, ...] = ()


@dataclass(frozen=True, slots=True)
class Quarantined:
    """D: the writers at these addresses do not answer; look for proof that they are gone."""

    request_id: RequestId
    writers: tuple[PeerAddress, ...]


@dataclass(frozen=True, slots=True)
class TransferUnknown:
    """A registration that P never got a request for, or a request that nobody claimed (for metrics)."""

    transfer_id: TransferId
    reason: str


Action = (
    SendTo
    | Connect
    | WritePiece
    | ReportSent
    | SendEnded
    | Verify
    | ReportReceived
    | ReportFailed
    | ReportReleased
    | Quarantined
    | TransferUnknown
)
