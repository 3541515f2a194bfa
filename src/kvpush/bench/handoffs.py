"""The hand-off of each request in legs, from the engines' own records and the client's first token."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from kvpush.bench.record import RequestRecord, median, p99
from kvpush.transfer.handoff import LEGS, Client, Clocks, handoffs, paired
from kvpush.transfer.sidechannel import HandshakeError, host_id, query_traces, secret_from_environment
from kvpush.transfer.trace import TraceError, TransferTrace, from_lines

ASK_TIMEOUT_S = 5.0
MOST_ASKED = 1024


class HandoffRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One transfer. legs_ms: in the order of `LEGS`, from the end of P's last kernel to the client's first token.

    answer_ms: from the same moment until the client had P's answer; the hand-off of the tables begins there.
    clock_error_ms: how wrong legs between hosts may be: 0 within a host, None if unknown.
    """

    transfer_id: str
    legs_ms: dict[str, float]
    answer_ms: float | None = None
    clock_error_ms: float | None = 0.0

    @property
    def total_ms(self) -> float:
        return sum(self.legs_ms.values())


class Traces(Protocol):
    """Where the records of a pair's transfers come from."""

    def new(self) -> list[TransferTrace]:
        """Those since the last call."""
        ...


class NoTraces:
    """A connector that keeps none."""

    def new(self) -> list[TransferTrace]:
        return []


class TraceTail:
    """Of a file that both engines of a pair write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[TransferTrace]:
        """Whole lines only. What is no record is an error of ours: raises TraceError."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return list(from_lines(whole.splitlines(), str(self._path)))


class AskedTraces:
    """Of engines elsewhere, asked at their side channels, (host, port) each. One that does not answer tells nothing."""

    def __init__(self, side_channels: Sequence[tuple[str, int]]) -> None:
        self._side_channels = side_channels
        self._seen: dict[str, int] = {}

    def new(self) -> list[TransferTrace]:
        found = []
        for host, port in self._side_channels:
            try:
                answer = query_traces(host, port, MOST_ASKED, secret_from_environment(), ASK_TIMEOUT_S)
                traces = list(from_lines(answer.traces, f"{host}:{port}"))
            except (HandshakeError, TraceError):
                continue
            # An engine that has been restarted counts from 1 again, under another incarnation.
            life = f"{answer.engine.engine_id} {answer.engine.incarnation}"
            found += [trace for trace in traces if trace.number > self._seen.get(life, 0)]
            self._seen[life] = max([trace.number for trace in traces], default=self._seen.get(life, 0))
        return found


def handoff_records(
    traces: Iterable[TransferTrace], requests: Sequence[RequestRecord], started_s: float, host: str | None = None
) -> list[HandoffRecord]:
    """The legs of every request that was answered and whose records of both sides are there, in order of arrival.

    started_s: when the cell began, on the monotonic clock of `host` (default: this one).
    """
    traces = list(traces)
    host = host_id() if host is None else host
    unix_offset_s = time.time() - time.monotonic()
    clients = {
        request.transfer_id: Client(host, started_s + request.arrival_s + request.ttft_ms / 1e3, unix_offset_s)
        for request in requests
        if request.error is None and request.ttft_ms is not None
    }
    clocks = Clocks.of(paired(traces))
    hosts = {trace.transfer_id: trace.host_id for trace in traces if trace.side == "decode"}
    by_id = {request.transfer_id: request for request in requests}
    found = {}
    for each in handoffs(traces, clients, clocks):
        if each.transfer_id not in clients or list(each.legs_ms) != list(LEGS):
            continue
        found[each.transfer_id] = HandoffRecord(
            transfer_id=each.transfer_id, legs_ms=each.legs_ms, clock_error_ms=each.clock_error_ms
        )
        request = by_id[each.transfer_id]
        if request.prefill_response_ms is not None:
            ahead_s, _ = clocks.ahead(host, hosts[each.transfer_id])
            answered_s = started_s + request.arrival_s + request.prefill_response_ms / 1e3 - ahead_s
            found[each.transfer_id].answer_ms = round((answered_s - each.computed_s) * 1e3, 3)
    return [found[request.transfer_id] for request in requests if request.transfer_id in found]


def leg_figures(records: Sequence[HandoffRecord]) -> dict[str, float]:
    """`leg_<leg>_p50_ms`, `leg_<leg>_p99_ms` and the same for `kernel_to_token`, the whole; empty without records."""
    if not records:
        return {}
    columns = {leg: [record.legs_ms[leg] for record in records] for leg in LEGS}
    found = {}
    for leg, values in columns.items():
        found[f"leg_{leg}_p50_ms"], found[f"leg_{leg}_p99_ms"] = median(values), p99(values)
    whole = [record.total_ms for record in records]
    return {**found, "kernel_to_token_p50_ms": median(whole), "kernel_to_token_p99_ms": p99(whole)}


def legs_table(rows: Mapping[str, Sequence[HandoffRecord]]) -> str:
    """Medians and 99th percentiles of each leg, for the terminal. rows: name of a cell -> its hand-offs."""
    shown = {name: leg_figures(records) for name, records in rows.items() if records}
    if not shown:
        return ""
    names = [*(f"leg_{leg}" for leg in LEGS), "kernel_to_token"]
    head = ["p50 / p99 ms", *LEGS, "sum"]
    body = [
        [name, *(f"{figures[f'{leg}_p50_ms']:.2f} / {figures[f'{leg}_p99_ms']:.2f}" for leg in names)]
        for name, figures in shown.items()
    ]
    widths = [max(len(row[place]) for row in [head, *body]) for place in range(len(head))]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in [head, *body]]
    errors = [record.clock_error_ms for records in rows.values() for record in records]
    if None in errors:
        lines.append("the hosts' clocks were compared by wall clock only; legs between them have an unknown error")
    elif worst := max(error for error in errors if error is not None):
        lines.append(f"several hosts: legs between them are off by up to {worst:.3f} ms")
    return "\n".join(lines)
