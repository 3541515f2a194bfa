"""From the records of P and of D to the legs of a hand-off: where the time went between prefill's last kernel and the
first token.

Within a host the clocks are one. Between hosts they are compared by the messages of the transfers themselves: no
registration is seen before it was sent, no commit either, and so every transfer bounds the clocks' difference from both
sides. What is left between the bounds is the error, and it is stated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvpush.transfer.trace import RankTrace, TraceSide, TransferTrace

# Name -> what the leg is, in order; each begins where the one before it ends, the first at the end of the last kernel.
LEGS: dict[str, str] = {
    "register": "P waits for D's registration",
    "post": "P plans and posts the last write",
    "write": "until the last write has landed (staged: is unpacked)",
    "commit": "P notices, and sends the commit",
    "notify": "until D's thread has seen it",
    "collect": "until D's engine step picks it up",
    "report": "until D's scheduler knows",
    "schedule": "until the request is scheduled",
    "first_token": "D computes; until the client has the token",
}
_ENDS: tuple[tuple[str, TraceSide, str], ...] = (
    ("register", "prefill", "matched"),
    ("post", "prefill", "last_write"),
    ("write", "prefill", "landed"),
    ("commit", "prefill", "committed"),
    ("notify", "decode", "commit_seen"),
    ("collect", "decode", "collected"),
    ("report", "decode", "reported"),
    ("schedule", "decode", "scheduled"),
)
_NEEDED = ("committed", "commit_seen")


@dataclass(frozen=True, slots=True)
class Client:
    """When the client of a transfer had the first token, on the clock of host_id.

    unix_offset_s: what to add to that clock for the time since 1970, in case host_id is neither P's nor D's.
    """

    host_id: str
    first_token_s: float
    unix_offset_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Handoff:
    """One transfer. legs_ms: leg -> milliseconds, without `first_token` if no client has said when that was.

    computed_s: the end of P's last kernel on the clock of D's scheduler process. clock_error_ms: how wrong a leg that
    leads from one host to another may be; 0 within a host, None if nothing bounds it.
    """

    transfer_id: str
    legs_ms: dict[str, float]
    computed_s: float
    clock_error_ms: float | None = 0.0

    @property
    def total_ms(self) -> float:
        return sum(self.legs_ms.values())


@dataclass(slots=True)
class _Bounds:
    """Of what the clock of one host shows beyond that of another, in seconds."""

    low_s: float = float("-inf")
    high_s: float = float("inf")

    def estimate(self) -> tuple[float, float] | None:
        """(difference, its error), None unless messages have bounded both sides."""
        if self.low_s == float("-inf") or self.high_s == float("inf"):
            return None
        return (self.low_s + self.high_s) / 2, abs(self.high_s - self.low_s) / 2


@dataclass(slots=True)
class Clocks:
    """What the clock of one host shows beyond that of another, as far as the records tell."""

    _bounds: dict[tuple[str, str], _Bounds] = field(default_factory=dict)
    _unix_offsets_s: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, pairs: Iterable[tuple[TransferTrace, TransferTrace]]) -> Clocks:
        """pairs: P's and D's record of the same transfers."""
        clocks = cls()
        for there, here in pairs:
            for trace in (there, here):
                clocks.know(trace.host_id, trace.unix_offset_s)
            for p, d in _namesakes(there, here):
                _tighten(clocks._bounds.setdefault((p.host_id, d.host_id), _Bounds()), p.times_s, d.times_s)
        return clocks

    def know(self, host: str, unix_offset_s: float) -> None:
        """What a host itself says: add this to its clock for the time since 1970."""
        self._unix_offsets_s[host] = unix_offset_s

    def ahead(self, host: str, of: str) -> tuple[float, float | None]:
        """(seconds that host's clock shows beyond the other's, error of that).

        By the wall clocks, whose error nobody knows (None), where messages have not bounded the difference.
        """
        if host == of:
            return 0.0, 0.0
        for first, second, sign in ((host, of, 1), (of, host, -1)):
            found = self._bounds[first, second].estimate() if (first, second) in self._bounds else None
            if found is not None:
                return sign * found[0], found[1]
        return self._unix_offsets_s.get(of, 0.0) - self._unix_offsets_s.get(host, 0.0), None


def _tighten(bounds: _Bounds, p: Mapping[str, float], d: Mapping[str, float]) -> None:
    if "registered" in d and "matched" in p:
        bounds.high_s = min(bounds.high_s, p["matched"] - d["registered"])
    for sent, seen in (("matched", "accepted"), ("committed", "commit_seen")):
        if sent in p and seen in d:
            bounds.low_s = max(bounds.low_s, p[sent] - d[seen])


def _namesakes(there: TransferTrace, here: TransferTrace) -> list[tuple[RankTrace, RankTrace]]:
    ranks = {(rank.pp_rank, rank.tp_rank): rank for rank in there.ranks}
    return [(ranks[rank.pp_rank, rank.tp_rank], rank) for rank in here.ranks if (rank.pp_rank, rank.tp_rank) in ranks]


def paired(traces: Iterable[TransferTrace]) -> list[tuple[TransferTrace, TransferTrace]]:
    """P's and D's record of every transfer of which both are there and D has received it, in the order of D's.

    With several consumers of one transfer each of D's records is paired with P's one.
    """
    there: dict[str, TransferTrace] = {}
    here: dict[str, list[TransferTrace]] = defaultdict(list)
    for trace in traces:
        if trace.side == "prefill":
            there[trace.transfer_id] = trace
        elif trace.outcome == "received":
            here[trace.transfer_id].append(trace)
    return [(there[name], trace) for name, mine in here.items() if name in there for trace in mine]


def handoffs(
    traces: Iterable[TransferTrace], clients: Mapping[str, Client] | None = None, clocks: Clocks | None = None
) -> list[Handoff]:
    """The legs of every transfer that went well. clients: by transfer id. clocks: default, what these records tell."""
    pairs = paired(traces)
    known = clocks if clocks is not None else Clocks.of(pairs)
    for client in (clients or {}).values():
        known.know(client.host_id, client.unix_offset_s)
    found = (_handoff(there, here, (clients or {}).get(here.transfer_id), known) for there, here in pairs)
    return [each for each in found if each is not None]


def _handoff(there: TransferTrace, here: TransferTrace, client: Client | None, clocks: Clocks) -> Handoff | None:
    errors: list[float | None] = [0.0]
    p = _moments(there, here.host_id, clocks, errors)
    d = _moments(here, here.host_id, clocks, errors)
    if "computed" not in p or "scheduled" not in d or not all(moment in {**p, **d} for moment in _NEEDED):
        return None
    legs: dict[str, float] = {}
    now_s = p["computed"]
    for leg, side, moment in _ENDS:
        # A moment that came before its predecessor, or did not happen (nothing was left to write), costs nothing.
        end_s = max(now_s, (p if side == "prefill" else d).get(moment, now_s))
        legs[leg] = round((end_s - now_s) * 1e3, 3)
        now_s = end_s
    if client is not None:
        ahead_s, error_s = clocks.ahead(client.host_id, here.host_id)
        errors.append(error_s)
        legs["first_token"] = round(max(0.0, client.first_token_s - ahead_s - now_s) * 1e3, 3)
    worst = None if None in errors else round(max(error for error in errors if error is not None) * 1e3, 3)
    return Handoff(here.transfer_id, legs, p["computed"], worst)


def _moments(trace: TransferTrace, host: str, clocks: Clocks, errors: list[float | None]) -> dict[str, float]:
    """When each thing had happened at every rank, on the clock of one host."""
    found: dict[str, float] = {}
    for source, times_s in [(trace.host_id, trace.times_s), *((rank.host_id, rank.times_s) for rank in trace.ranks)]:
        ahead_s, error_s = clocks.ahead(source, host)
        errors.append(error_s)
        for moment, time_s in times_s.items():
            found[moment] = max(found.get(moment, float("-inf")), time_s - ahead_s)
    return found
