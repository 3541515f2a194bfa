"""What a transfer thread tells its engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvpush.protocol.ids import RequestId


@dataclass(frozen=True, slots=True)
class Sent:
    """P: nothing reads the request's blocks for a transfer any more."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Received:
    """D: the request's KV is complete."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """D: the KV will not come. The request's blocks are still held."""

    request_id: RequestId
    reason: str


@dataclass(frozen=True, slots=True)
class Released:
    """D: nobody can write into the request's blocks any more."""

    request_id: RequestId


Result = Sent | Received | LoadFailed | Released
