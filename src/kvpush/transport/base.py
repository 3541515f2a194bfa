"""The interface between the transfer thread and what moves bytes and notifications.

One owner thread calls everything here (NIXL's default synchronisation mode promises nothing for two).
Errors of a peer or of the fabric are `TransportError`; anything else that escapes is a defect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpush.plan.runs import Runs


class TransportError(Exception):
    """The transport could not do what was asked; `peer` names the other side where there is one."""

    def __init__(self, message: str, peer: str | None = None) -> None:
        super().__init__(message)
        self.peer = peer


@dataclass(frozen=True, slots=True)
class Region:
    """Contiguous memory that peers may be allowed to write.

    address, length in bytes; device is the CUDA ordinal, or None for host memory.
    """

    address: int
    length_bytes: int
    device: int | None = None


class WriteHandle(Protocol):
    """One posted write. Poll it until it is done, then release it."""

    @property
    def peer(self) -> str: ...


class Transport(Protocol):
    """What the transfer thread needs. Peers are named by their agent name, which is new for each incarnation."""

    @property
    def name(self) -> str:
        """This side's agent name: unique per process life, at most 255 bytes."""
        ...

    def register(self, regions: Sequence[Region]) -> None:
        """Makes memory usable as the source of writes and, for peers that hold `metadata()`, as their target."""
        ...

    def metadata(self) -> bytes:
        """What a peer needs to write here and to send here. Taken after `register`."""
        ...

    def connect(self, metadata: bytes) -> str:
        """Returns the peer's agent name. Connecting twice to the same peer returns the same name.

        Raises TransportError if the metadata is of another transport, malformed or refused.
        """
        ...

    def disconnect(self, peer: str) -> None:
        """Forgets a peer; unknown peers are ignored."""
        ...

    def write(self, peer: str, runs: Runs, device: int | None, peer_device: int | None, notification: bytes) -> WriteHandle:
        """Posts one WRITE of all runs; `notification` (may be empty) arrives at the peer after its bytes.

        Raises TransportError if it could not be posted; then nothing is in flight for it.
        """
        ...

    def done(self, handle: WriteHandle) -> bool:
        """True once every byte has landed. Raises TransportError if the write failed."""
        ...

    def release(self, handle: WriteHandle) -> None:
        """Gives the handle back. Releasing one that is in flight is no proof that nothing is written any more."""
        ...

    def notify(self, peer: str, payload: bytes) -> None:
        """Sends one message. Messages may overtake writes and each other. Raises TransportError."""
        ...

    def notifications(self) -> list[tuple[str, bytes]]:
        """Messages that arrived since the last call, as (sender's agent name, payload). Never blocks."""
        ...

    def close(self) -> None:
        """Ends the agent. Idempotent."""
        ...
