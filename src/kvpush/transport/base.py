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
    """The transport could not do what was asked.

    peer: the other side, where there is one.
    may_land: the error is of a write, and bytes of it may still land. Without it the write has ended: nothing of it
    lands any more. Whoever promises quiet must not do so on an error with may_land.
    """

    def __init__(self, message: str, peer: str | None = None, *, may_land: bool = False) -> None:
        super().__init__(message)
        self.peer = peer
        self.may_land = may_land


def check_agent_name(name: str) -> None:
    """Raises ValueError if a transport cannot be called that."""
    if not 1 <= len(name.encode()) <= 255:
        raise ValueError(f"an agent name has 1 to 255 bytes, {name!r} has {len(name.encode())}")


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
        """Forgets a peer; unknown peers are ignored.

        From now on writes and messages to it raise. Writes in flight stay valid and must still be polled: forgetting
        the target stops nothing.
        """
        ...

    def connected(self, peer: str) -> bool:
        """False from `disconnect` on, and once the connection has been found dead: then nothing more of the peer lands
        here that it had sent before. Only using a connection finds out; one that is not used seems to live."""
        ...

    def write(
        self, peer: str, runs: Runs, device: int | None, peer_device: int | None, notification: bytes
    ) -> WriteHandle:
        """Posts one WRITE of all runs; `notification` arrives at the peer after its bytes, unless it is empty.

        It leaves when `done` finds the bytes landed, so a handle that nobody polls never notifies.
        Source addresses lie in memory of `device` registered here, target addresses in memory of `peer_device` that the
        peer had registered before its `metadata()`. None is host memory.

        Raises TransportError if it could not be posted; then nothing is in flight for it, except if the error says
        `may_land`. Raises ValueError if there are no runs.
        """
        ...

    def done(self, handle: WriteHandle) -> bool:
        """True once every byte has landed and the notification is on its way.

        Raises TransportError if the write failed, and again at every later call. A write that neither lands nor fails
        (the peer is stopped, the link is cut) stays False for ever: only a time limit of the caller's own ends it.
        """
        ...

    def release(self, handle: WriteHandle) -> None:
        """Gives the handle back; never raises, and a second time does nothing.

        Releasing one that is in flight is no proof that nothing is written any more.
        """
        ...

    def notify(self, peer: str, payload: bytes) -> None:
        """Sends one message. Messages may overtake writes and each other.

        Raises TransportError if the peer is unknown or gone. Success is no proof that the message arrives.
        """
        ...

    def notifications(self) -> list[tuple[str, bytes]]:
        """Messages that arrived since the last call, as (sender's agent name, payload). Never blocks."""
        ...

    def close(self) -> None:
        """Ends the agent: handles are released, peers forgotten, memory deregistered. Idempotent; never raises.

        Every later call but `name`, `release` and `disconnect` raises TransportError. Ending an agent stops neither its
        own writes in flight nor those of peers into its memory.
        """
        ...
