"""One record for each dispatch of a prompt, kept for a while."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class TransferRecord:
    """What became of one dispatch. Times in milliseconds; None where something did not happen or cannot be seen.

    ttft_ms: from the client's request to the first token (streams only).
    prefill_ms: from dispatch to the prefill engine's answer.
    handoff_ms: from that answer to the first token; negative if the token came before the answer.
    """

    transfer_id: str
    request_id: str
    mode: str
    decode_url: str | None = None
    prefill_url: str | None = None
    local_reason: str | None = None
    prompt_tokens: int | None = None
    started_unix_s: float = 0.0
    ttft_ms: float | None = None
    prefill_ms: float | None = None
    handoff_ms: float | None = None
    total_ms: float | None = None
    status: str = "open"

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


class Records:
    """The newest records, oldest first."""

    def __init__(self, limit: int) -> None:
        self._records: deque[TransferRecord] = deque(maxlen=limit)

    def add(self, record: TransferRecord) -> None:
        self._records.append(record)

    def as_list(self) -> list[dict[str, Any]]:
        return [record.as_dict() for record in self._records]
