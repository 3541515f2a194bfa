"""What the side channel server has seen: every message that arrives raises exactly one counter of messages."""

from __future__ import annotations

from dataclasses import dataclass, fields

_OF_CONNECTIONS = frozenset({"silent", "unread", "evicted"})


@dataclass(slots=True)
class SideChannelCounters:
    """Written by the server's thread only; others may read at any time.

    Messages:

    answered, proofs, traces: questions answered with what was asked for.
    challenged: authenticated questions that first needed a fresh challenge (once per connection with a secret).
    not_ready, unknown_rank, wrong_engine, bad_mac, bad_request, version: questions answered with that error.
    dropped: what is no question at all (wrong magic, too long, or not whole when its connection or its time ended). It
    gets no answer, and its connection is closed.
    internal: defects of ours while answering; the question gets no answer, the server goes on.

    Connections:

    silent: ended without a single byte.
    unread: ended before the peer had taken the answer.
    evicted: closed to make room for newer ones.
    """

    answered: int = 0
    proofs: int = 0
    traces: int = 0
    challenged: int = 0
    not_ready: int = 0
    unknown_rank: int = 0
    wrong_engine: int = 0
    bad_mac: int = 0
    bad_request: int = 0
    version: int = 0
    dropped: int = 0
    internal: int = 0
    silent: int = 0
    unread: int = 0
    evicted: int = 0

    def count(self, name: str) -> None:
        """Adds one to the counter `name`; AttributeError if there is none."""
        setattr(self, name, getattr(self, name) + 1)

    def total(self) -> int:
        """Messages seen so far."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name not in _OF_CONNECTIONS)

    def as_dict(self) -> dict[str, int]:
        """Name -> count, for metrics."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
