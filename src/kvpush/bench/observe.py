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
RECEIVED = re.compile(r"kvpush: transfer (?P<id>\S+) received: (?P<tokens>\d+) tokens(?P<ok>, integrity ok)?")
FAILED = re.compile(r"kvpush: transfer (?P<id>\S+) (?P<how>failed|cancelled|refused): (?P<reason>.*\S)")
BREAKDOWN = re.compile(r"kvpush: transfer (?P<id>\S+) breakdown: (?P<pairs>\S+=\S+(?: \S+=\S+)*)")
SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{.*\})? (?P<value>\S+)")
# Labels (engine, model) are summed over: each server is one engine.
WANTED = re.compile(r"^(vllm:nixl_|vllm:kvpush_|kvpush_|kvpush:).*_(sum|count|total)$")


class Transfers(msgspec.Struct, kw_only=True):
    """Transfers that our engines logged. integrity_ok: received ones whose bytes were compared.

    breakdown_ms: the logged phases of each transfer in milliseconds, by transfer id, where the engines log them.
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
    breakdown_ms: dict[str, dict[str, float]] = {}


def _pairs(text: str) -> dict[str, float]:
    """`registered_ms=1.5 landed_ms=3` as a map; what is no number is left out."""
    found = {}
    for pair in text.split():
        name, _, value = pair.partition("=")
        try:
            found[name] = float(value.removesuffix("ms"))
        except ValueError:
            continue
    return found


def parse_transfers(lines: Iterable[str]) -> Transfers:
    """Reads the log lines of both engines of a pair; lines of anybody else are skipped."""
    found = Transfers(failures={}, breakdown_ms={})
    failures: Counter[str] = Counter()
    for line in lines:
        if "kvpush: transfer" not in line:
            continue
        if match := COMMITTED.search(line):
            found.committed += 1
            found.committed_tokens += int(match["tokens"])
            found.committed_bytes += int(match["bytes"])
            found.writes += int(match["writes"])
        elif match := RECEIVED.search(line):
            found.received += 1
            found.received_tokens += int(match["tokens"])
            found.integrity_ok += match["ok"] is not None
        elif match := FAILED.search(line):
            failures[f"{match['how']}: {match['reason']}"] += 1
        elif match := BREAKDOWN.search(line):
            found.breakdown_ms.setdefault(match["id"], {}).update(_pairs(match["pairs"]))
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
