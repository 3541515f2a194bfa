"""What an engine tells of a transfer that has ended: one record, a JSON line, the same at P and at D.

Times are seconds of CLOCK_MONOTONIC, which all processes of a host share. `host_id` says whose clock that is: times of
two records may be subtracted if it is equal in both; `kvpush.transfer.handoff` compares those of different hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from kvpush.transfer.records import Record

TraceSide = Literal["prefill", "decode"]


class RankTrace(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One rank's share. times_s: moment -> seconds of the clock of host_id; the moments are those of `Record`, and
    `collected`: the engine's main thread has taken the result. plan_s, post_s: sums over the writes."""

    request_id: str
    pp_rank: int = 0
    tp_rank: int = 0
    host_id: str
    times_s: dict[str, float]
    num_bytes: int = 0
    num_writes: int = 0
    num_runs: int = 0
    plan_s: float = 0.0
    post_s: float = 0.0
    outcome: str = ""

    @classmethod
    def of(cls, record: Record, pp_rank: int, tp_rank: int, host_id: str, collected_s: float) -> RankTrace:
        times = {**record.times_s, "collected": collected_s}
        return cls(
            request_id=str(record.request_id),
            pp_rank=pp_rank,
            tp_rank=tp_rank,
            host_id=host_id,
            times_s={moment: round(time_s, 6) for moment, time_s in times.items()},
            num_bytes=record.num_bytes,
            num_writes=record.num_writes,
            num_runs=record.num_runs,
            plan_s=round(record.plan_s, 6),
            post_s=round(record.post_s, 6),
            outcome=record.outcome,
        )


class TransferTrace(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request of one engine whose KV was handed over, or was to be.

    number: counts the records of this life of the engine, from 1. times_s: of the scheduler process, whose clock is
    that of host_id. `arrived`; `allocated` (D: it has blocks); `reported` (every rank has); `scheduled` (P: its first
    chunk; D: after the KV has come); `finished`. unix_offset_s: what to add to them for the time since 1970.
    outcome: P: sent, released (D needed nothing); D: received, not_needed (too little was missing), cancelled; both:
    "failed: reason", or lost, if a rank has not told.
    """

    transfer_id: str
    request_id: str
    side: TraceSide
    engine_id: str
    host_id: str
    number: int = 0
    unix_offset_s: float = 0.0
    num_tokens: int = 0
    outcome: str = ""
    times_s: dict[str, float] = {}
    ranks: list[RankTrace] = []

    @property
    def num_bytes(self) -> int:
        return sum(rank.num_bytes for rank in self.ranks)

    @property
    def num_writes(self) -> int:
        return sum(rank.num_writes for rank in self.ranks)


class TraceError(ValueError):
    """A file that holds no records; the text names the file and the line."""


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(TransferTrace)


def to_line(trace: TransferTrace) -> bytes:
    """One line of JSON, with its end."""
    return _ENCODER.encode(trace) + b"\n"


def from_lines(lines: Iterable[bytes], name: str) -> Iterator[TransferTrace]:
    """The records of whole lines. Raises TraceError naming the line; name: of the file."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _DECODER.decode(line)
            except msgspec.DecodeError as error:
                raise TraceError(f"{name}: line {number} is no transfer record: {error}") from None


def read_traces(path: Path) -> list[TransferTrace]:
    """The records of a file; an unfinished last line (the engine is writing) is left out.

    Raises TraceError naming the line, OSError if the file cannot be read.
    """
    text = path.read_bytes()
    return list(from_lines(text[: text.rfind(b"\n") + 1].splitlines(), str(path)))
