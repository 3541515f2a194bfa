"""What the engines' logs and the router tell about each hand-over."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

COMMITTED = re.compile(r"kvpush: transfer (\S+) committed: (\d+) tokens, (\d+) bytes, (\d+) writes")
RECEIVED = re.compile(r"kvpush: transfer (\S+) received: (\d+) tokens")


@dataclass(slots=True)
class Handover:
    """One transfer as its two engines logged it; summed over the ranks of the prefill engine.

    sent_tokens: the largest count that a rank committed; sent_bytes and writes: of all ranks. received_tokens: None
    until the decode engine has reported it.
    """

    sent_tokens: int = 0
    sent_bytes: int = 0
    writes: int = 0
    received_tokens: int | None = None

    @property
    def complete(self) -> bool:
        return self.sent_bytes > 0 and self.received_tokens is not None


def handovers(prefill_log: str, decode_log: str) -> dict[str, Handover]:
    """By transfer id."""
    found: dict[str, Handover] = {}
    for transfer_id, tokens, size, writes in COMMITTED.findall(prefill_log):
        one = found.setdefault(transfer_id, Handover())
        one.sent_tokens = max(one.sent_tokens, int(tokens))
        one.sent_bytes += int(size)
        one.writes += int(writes)
    for transfer_id, tokens in RECEIVED.findall(decode_log):
        found.setdefault(transfer_id, Handover()).received_tokens = int(tokens)
    return found


def handoff_ms(status: Mapping[str, Any], transfer_id: str) -> float | None:
    """From the prefill engine's answer to the first token, as the router's `/kvpush/status` has it."""
    recent: Iterable[Mapping[str, Any]] = status.get("recent", [])
    for record in recent:
        if record.get("transfer_id") == transfer_id:
            value = record.get("handoff_ms")
            return None if value is None else float(value)
    return None
