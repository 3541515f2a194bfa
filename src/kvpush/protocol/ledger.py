"""The report ledger: each request is reported to the engine exactly once for each direction.

A second report ends vLLM's engine, a missing one keeps the request's blocks for ever.
"""

from __future__ import annotations

from enum import StrEnum

from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import RequestId


class Direction(StrEnum):
    SENDING = "sending"
    RECEIVING = "receiving"


class ReportLedger:
    """Entries go open -> reported -> closed; what is late, phantom or duplicate on a reported entry does nothing."""

    def __init__(self) -> None:
        self._reported: dict[tuple[RequestId, Direction], bool] = {}

    def __len__(self) -> int:
        return len(self._reported)

    def open(self, request_id: RequestId, direction: Direction) -> None:
        """A report is owed from now on. Raises ProtocolError if an entry exists."""
        entry = (request_id, direction)
        if entry in self._reported:
            raise ProtocolError("local", f"a {direction} report for {request_id} is already booked")
        self._reported[entry] = False

    def owes(self, request_id: RequestId, direction: Direction) -> bool:
        """True while the entry is open."""
        return self._reported.get((request_id, direction)) is False

    def report(self, request_id: RequestId, direction: Direction) -> bool:
        """True exactly once for an open entry: the caller must then tell the engine. False otherwise."""
        if not self.owes(request_id, direction):
            return False
        self._reported[request_id, direction] = True
        return True

    def close(self, request_id: RequestId) -> None:
        """The engine has forgotten the request: reported entries are dropped, open ones stay owed."""
        for direction in Direction:
            if self._reported.get((request_id, direction)):
                del self._reported[request_id, direction]

    def outstanding(self) -> list[tuple[RequestId, Direction]]:
        """The entries that are still owed."""
        return [entry for entry, reported in self._reported.items() if not reported]
