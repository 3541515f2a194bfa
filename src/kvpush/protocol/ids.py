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


class SendKey(msgspec.Struct, frozen=True, array_like=True):
    """One consumer of one transfer: the unit that is registered, committed, failed or cancelled."""

    transfer_id: TransferId
    consumer: int


class PeerAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank's side channel answers for it: host, TCP port, and which rank of that engine."""

    host: str
    port: int
    pp_rank: int = 0
    tp_rank: int = 0

    def __str__(self) -> str:
        return f"{self.host}:{self.port}/pp{self.pp_rank}tp{self.tp_rank}"


def check_id(value: str, name: str) -> None:
    """Raises ValueError, naming `name`, unless value is a printable identifier of 1 to 256 bytes."""
    if not value:
        raise ValueError(f"{name} is empty")
    if len(value.encode("utf-8", "surrogatepass")) > MAX_ID_BYTES:
        raise ValueError(f"{name} is longer than {MAX_ID_BYTES} bytes")
    if not value.isprintable():
        raise ValueError(f"{name} contains unprintable characters")
