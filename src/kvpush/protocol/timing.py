"""The bounds that keep every transfer from waiting for ever, in one validated struct."""

from __future__ import annotations

import msgspec

OPTIONAL = frozenset({"quarantine_release_after_s"})
"""Bounds that are off if they are None."""


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every bound in seconds; together they leave no state in which P waits for D and D for P for ever.

    rendezvous_timeout_s: a registration whose request P does not know ends after it, and so does the attempt to connect
    to a consumer. unclaimed_timeout_s: a complete request that nobody registers for is dropped after it;
    announced_timeout_s while D announces it. admission_timeout_s: accepted, but P does not begin to compute.
    peer_timeout_s: silence after which a peer is lost. ping_interval_s: how often a peer with transfers is asked.
    write_timeout_s: a piece in flight that takes longer fails its transfer. abort_drain_s: how long the blocks of a
    failed or aborted request may wait for its writes in flight before they are given back all the same (the attempt is
    poisoned). tombstone_s: how long the end of a transfer is remembered. first_answer_timeout_s: how long a peer that
    was just connected to may take to say anything at all. unreachable_retry_s: how long requests fail at once after
    that, or after a handshake that nobody answered. idle_check_s: how long a connection may be unused before the peer
    is asked whether it lives. quarantine_release_after_s: None, or how long memory stays in quarantine before it is
    given back without proof. That gives the fence up: a writer that was only stopped then writes into memory of another
    request.
    """

    rendezvous_timeout_s: float = 30.0
    unclaimed_timeout_s: float = 60.0
    announced_timeout_s: float = 300.0
    admission_timeout_s: float = 300.0
    peer_timeout_s: float = 10.0
    ping_interval_s: float = 2.0
    write_timeout_s: float = 60.0
    abort_drain_s: float = 2.0
    tombstone_s: float = 120.0
    first_answer_timeout_s: float = 5.0
    unreachable_retry_s: float = 10.0
    idle_check_s: float = 30.0
    quarantine_release_after_s: float | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is None and name in OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} must be a number of seconds, got {value!r}")
            if not 0 < value <= 86_400:
                raise ValueError(f"{name} must be above 0 and at most 86400 seconds, got {value}")
        if self.ping_interval_s >= self.peer_timeout_s:
            raise ValueError(
                f"ping_interval_s ({self.ping_interval_s}) must be below peer_timeout_s ({self.peer_timeout_s})"
            )
        if self.idle_check_s <= self.peer_timeout_s:
            raise ValueError(
                f"idle_check_s ({self.idle_check_s}) must be above peer_timeout_s ({self.peer_timeout_s}): only who is "
                "needed for nothing is idle"
            )
        if self.announced_timeout_s < self.unclaimed_timeout_s:
            raise ValueError(
                f"announced_timeout_s ({self.announced_timeout_s}) must not be below unclaimed_timeout_s "
                f"({self.unclaimed_timeout_s})"
            )
