"""What connections have to tell."""

from __future__ import annotations

from dataclasses import dataclass

from kvpush.protocol.ids import AgentName, PeerAddress
from kvpush.protocol.messages import Message


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message has left for an incarnation."""

    address: PeerAddress
    agent: AgentName
    message: Message


@dataclass(frozen=True, slots=True)
class Undelivered:
    """A message did not and will not leave."""

    address: PeerAddress
    message: Message
    reason: str


@dataclass(frozen=True, slots=True)
class Connected:
    """Pieces can be written to this incarnation."""

    agent: AgentName


@dataclass(frozen=True, slots=True)
class Unreachable:
    """Somebody waited to write to this incarnation, and it cannot be reached."""

    agent: AgentName
    reason: str


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection to an incarnation broke."""

    agent: AgentName
    reason: str


Event = Delivered | Undelivered | Connected | Unreachable | Disconnected
