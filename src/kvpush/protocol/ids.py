"""Names of the things that the protocol speaks of."""

from __future__ import annotations

from typing import NewType

import msgspec

TransferId = NewType("TransferId", str)
"""The hand-over of one request's KV; chosen by the router, unique per dispatch."""

RequestId = NewType("RequestId", str)
"""An engine's own name for a request."""

AgentName = NewType("AgentName", str)
"""One incarnation of a rank: a restarted rank has another one."""

MAX_ID_BYTES = 256
MAX_RANK = 65_535


class PeerAddress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a rank's side channel answers for it: host, TCP port, and which rank of that engine."""

    host: str
    port: int
    pp_rank: int = 0
    tp_rank: int = 0

    @property
    def engine(self) -> tuple[str, int]:
        """The side channel alone: equal for all ranks of one engine."""
        return (self.host, self.port)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}/pp{self.pp_rank}tp{self.tp_rank}"


class SendKey(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One consumer of one transfer, at one rank of D: the unit that is registered, committed, failed or cancelled.

    The engines speak of (transfer, consumer); D's state machine fills in its own rank, because one rank of P may have
    to write to several ranks of D.
    """

    transfer_id: TransferId
    consumer: int
    pp_rank: int = 0
    tp_rank: int = 0

    def at(self, rank: PeerAddress) -> SendKey:
        """The same consumer at another rank."""
        return SendKey(self.transfer_id, self.consumer, rank.pp_rank, rank.tp_rank)

    def __str__(self) -> str:
        return f"{self.transfer_id}#{self.consumer}/pp{self.pp_rank}tp{self.tp_rank}"


def check_id(value: str, name: str) -> None:
    """Raises ValueError, naming `name`, unless value is a printable identifier of 1 to 256 bytes."""
    if not value:
        raise ValueError(f"{name} is empty")
    if len(value) > MAX_ID_BYTES or len(value.encode("utf-8", "surrogatepass")) > MAX_ID_BYTES:
        raise ValueError(f"{name} is longer than {MAX_ID_BYTES} bytes")
    if not value.isprintable():
        raise ValueError(f"{name} contains unprintable characters")


def check_address(value: PeerAddress, name: str) -> None:
    """Raises ValueError, naming `name`, unless value can be the address of a rank."""
    check_id(value.host, f"the host of {name}")
    if not 1 <= value.port <= 65_535:
        raise ValueError(f"the port of {name} must be 1 to 65535, got {value.port}")
    for rank in (value.pp_rank, value.tp_rank):
        if not 0 <= rank <= MAX_RANK:
            raise ValueError(f"the ranks of {name} must be 0 to {MAX_RANK}, got {rank}")
