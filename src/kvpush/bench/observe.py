"""What the engines themselves say about transfers: our connector's log lines, and Prometheus counters of both kinds."""

from __future__ import annotations

import re
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

COMMITTED = re.compile(
    r"kvpush: transfer (?P<id>\S+) committed: (?P<tokens>\d+) tokens, (?P<bytes>\d+) bytes, (?P<writes>\d+) writes"
)
RECEIVED = re.compile(r"kvpush: transfer (?P<id>\S+) received: (?P<tokens>\d+) tokens")
INTEGRITY_OK = ", integrity ok"
# Everything else that the connector says about one transfer is trouble: `failed: reason`, `is in use; ...`.
TROUBLE = re.compile(r"kvpush: transfer (?P<id>\S+) (?P<how>[a-z_][a-z_ ]*)[:;] (?P<why>\S.*)")
REFUSED = re.compile(r"kvpush: registration of transfer (?P<id>\S+) (?P<how>refused): (?P<why>\S.*)")
# `; prefill to commit 1.25 ms, first write to landed 0.50 ms` behind either of the first two.
SPAN = re.compile(r"[;,] (?P<name>[a-z][a-z_ ]*[a-z]) (?P<ms>\d+(?:\.\d+)?) ms")
SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{.*\})? (?P<value>\S+)")
# Labels (engine, model) are summed over: each server is one engine.
WANTED = re.compile(r"^(vllm:nixl_|vllm:kvpush_|kvpush_|kvpush:).*_(sum|count|total)$")


class Transfers(msgspec.Struct, kw_only=True):
    """Transfers that our engines logged. integrity_ok: received ones whose bytes were compared.

    failures: what else was said about transfers -> how often. spans_ms: transfer id -> name of a span -> milliseconds,
    each taken on one side's own clock.
    """

    committed: int = 0
    committed_tokens: int = 0
    committed_bytes: int = 0
    writes: int = 0
    received: int = 0
    received_tokens: int = 0
    integrity_ok: int = 0
    failed: int = 0
    failures: dict[str, int] = {}
    spans_ms: dict[str, dict[str, float]] = {}


def parse_transfers(lines: Iterable[str]) -> Transfers:
    """Reads the log lines of both engines of a pair; lines of anybody else are skipped."""
    found = Transfers(failures={}, spans_ms={})
    failures: Counter[str] = Counter()
    for line in lines:
        if "kvpush: " not in line:
            continue
        if match := COMMITTED.search(line):
            found.committed += 1
            found.committed_tokens += int(match["tokens"])
            found.committed_bytes += int(match["bytes"])
            found.writes += int(match["writes"])
        elif match := RECEIVED.search(line):
            found.received += 1
            found.received_tokens += int(match["tokens"])
            found.integrity_ok += INTEGRITY_OK in line
        elif match := TROUBLE.search(line) or REFUSED.search(line):
            failures[f"{match['how']}: {match['why'].rstrip()}"] += 1
            continue
        else:
            continue
        spans = {span["name"]: float(span["ms"]) for span in SPAN.finditer(line, match.end())}
        if spans:
            found.spans_ms.setdefault(match["id"], {}).update(spans)
    found.failed = sum(failures.values())
    found.failures = dict(failures)
    return found


class LogTail:
    """Gives the lines that were added to some logs since the last call."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._offsets = dict.fromkeys(paths, 0)

    def new_lines(self) -> list[str]:
        """Whole lines only: an unfinished last line is left for the next call."""
        lines: list[str] = []
        for path, offset in self._offsets.items():
            with path.open("rb") as log:
                log.seek(offset)
                text = log.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._offsets[path] = offset + len(whole)
            lines += whole.decode(errors="replace").splitlines()
        return lines


def parse_counters(text: str) -> dict[str, float]:
    """Transfer counters and histogram sums in a Prometheus text page, summed over their labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = SAMPLE.match(line)
        if match and WANTED.match(match["name"]):
            found[match["name"]] = found.get(match["name"], 0.0) + float(match["value"])
    return found


def read_counters(url: str) -> dict[str, float]:
    """The counters of one engine. Raises OSError if it does not answer."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        return parse_counters(response.read().decode())


def increase(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What was added between two readings; counters that stood still are left out."""
    return {name: value - before.get(name, 0.0) for name, value in after.items() if value != before.get(name, 0.0)}
