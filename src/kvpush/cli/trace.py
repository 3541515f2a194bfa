"""`kvpush trace`: the records of the last transfers, of running engines or of files."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from kvpush.launch import LaunchError
from kvpush.transfer.handoff import LEGS, Handoff, handoffs
from kvpush.transfer.sidechannel import HandshakeError, query_traces, secret_from_environment
from kvpush.transfer.sidechannel.errors import printable
from kvpush.transfer.trace import TraceError, TransferTrace, from_lines, read_traces

ASK_TIMEOUT_S = 5.0
# A side's own durations: name -> (from, to).
PHASES = {
    "prefill": (
        ("queue", "arrived", "scheduled"),
        ("compute", "scheduled", "computed"),
        ("to commit", "computed", "committed"),
        ("freed", "committed", "reported"),
    ),
    "decode": (
        ("for blocks", "arrived", "allocated"),
        ("for KV", "allocated", "commit_seen"),
        ("report", "commit_seen", "reported"),
        ("schedule", "reported", "scheduled"),
    ),
}


def run_trace(sources: Sequence[str], last: int, as_json: bool) -> int:
    """Prints the newest `last` transfers of the sources. Raises LaunchError naming the source that cannot be read."""
    traces = [trace for source in sources for trace in _read(source, last)]
    traces.sort(key=_ended_unix_s)
    names = list(dict.fromkeys(trace.transfer_id for trace in reversed(traces)))[:last]
    shown = [trace for trace in traces if trace.transfer_id in set(names)]
    legs = handoffs(shown)
    if as_json:
        print(json.dumps({"transfers": msgspec.to_builtins(shown), "handoffs": [asdict(each) for each in legs]}))
    else:
        print(page(shown, legs), end="")
    return 0


def _read(source: str, count: int) -> list[TransferTrace]:
    """source: a file, or HOST:PORT of a side channel."""
    path = Path(source)
    host, colon, port = source.rpartition(":")
    try:
        if path.exists() or not (colon and port.isdecimal()):
            return read_traces(path)
        answer = query_traces(
            host.strip("[]"), int(port), max(1, min(count, 1024)), secret_from_environment(), ASK_TIMEOUT_S
        )
        return list(from_lines(answer.traces, source))
    except OSError as error:
        raise LaunchError(f"{source}: {error.strerror}", "give a trace_file, or HOST:PORT of a side channel") from None
    except (TraceError, ValueError) as error:
        raise LaunchError(str(error)) from None
    except HandshakeError as error:
        raise LaunchError(str(error), "HOST:PORT is that of an engine's side channel (side_channel_port)") from None


def _ended_unix_s(trace: TransferTrace) -> float:
    return max(trace.times_s.values(), default=0.0) + trace.unix_offset_s


def page(traces: Sequence[TransferTrace], legs: Sequence[Handoff]) -> str:
    """The records as text: both sides of each transfer, then where hand-offs spent their time."""
    if not traces:
        return "no transfers\n"
    lines = []
    for side, phases in PHASES.items():
        rows = [_row(trace, phases) for trace in traces if trace.side == side]
        if rows:
            head = ["ended", "transfer", "tokens", "MB", "writes", "runs", *(name for name, _, _ in phases), "outcome"]
            lines += [f"{side} (ms)", *_columns([head, *rows]), ""]
    if legs:
        rows = [[_short(each.transfer_id), *(_ms(each.legs_ms.get(leg)) for leg in LEGS)] for each in legs]
        errors = [each.clock_error_ms for each in legs]
        lines += ["hand-off, from the end of the last kernel (ms)", *_columns([["transfer", *LEGS], *rows])]
        if None in errors:
            lines.append("the engines' clocks were compared by wall clock only, with an unknown error")
        elif worst := max(error for error in errors if error is not None):
            lines.append(f"the engines run on different hosts: legs between them are off by up to {worst:.3f} ms")
        lines.append("")
    return "\n".join(lines)


def _row(trace: TransferTrace, phases: Iterable[tuple[str, str, str]]) -> list[str]:
    times = dict(trace.times_s)
    for rank in trace.ranks:
        for moment, time_s in rank.times_s.items():
            if rank.host_id == trace.host_id:  # else the clocks differ, and a difference would mean nothing
                times[moment] = max(times.get(moment, time_s), time_s)
    spans = [_ms(_between_ms(times, start, end)) for _, start, end in phases]
    ended = time.strftime("%H:%M:%S", time.localtime(_ended_unix_s(trace)))
    runs = sum(rank.num_runs for rank in trace.ranks)
    numbers = [str(trace.num_tokens), f"{trace.num_bytes / 1e6:.1f}", str(trace.num_writes or "-"), str(runs or "-")]
    return [ended, _short(trace.transfer_id), *numbers, *spans, printable(trace.outcome or "-", 40)]


def _between_ms(times: Mapping[str, float], start: str, end: str) -> float | None:
    return (times[end] - times[start]) * 1e3 if start in times and end in times else None


def _short(transfer_id: str) -> str:
    return printable(transfer_id, 16)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _columns(rows: Sequence[Sequence[Any]]) -> list[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
