"""Puts together what an engine's scheduler half and its ranks know of each transfer. The time is an argument."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Container, Iterable

from kvpush.transfer.trace import RankTrace, TraceSide, TransferTrace

MAX_OPEN = 16_384
MAX_ENDED = 1024


class TraceBook:
    """For the engine's scheduler thread; `last` may be called from another.

    engine_id, host_id: of the scheduler process. Both tables are bounded: the oldest open record ends as `lost`.
    """

    def __init__(self, engine_id: str, host_id: str, max_open: int = MAX_OPEN, max_ended: int = MAX_ENDED) -> None:
        self._engine_id = engine_id
        self._host_id = host_id
        self._max_open = max_open
        self._open: OrderedDict[str, TransferTrace] = OrderedDict()
        self._unscheduled: set[str] = set()
        self._ended: deque[TransferTrace] = deque(maxlen=max_ended)
        self._new: list[TransferTrace] = []
        self._count = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def arrived(self, request_id: str, transfer_id: str, side: TraceSide, num_tokens: int, now_s: float) -> None:
        """A request whose KV is handed over (prefill) or comes from elsewhere (decode)."""
        trace = TransferTrace(
            transfer_id=transfer_id,
            request_id=request_id,
            side=side,
            engine_id=self._engine_id,
            host_id=self._host_id,
            num_tokens=num_tokens,
        )
        _mark(trace, "arrived", now_s)
        self._open[request_id] = trace
        if side == "prefill":
            self._unscheduled.add(request_id)
        if len(self._open) > self._max_open:
            oldest = next(iter(self._open.values()))
            oldest.outcome = "lost"
            self._end(oldest)

    def allocated(self, request_id: str, num_external_tokens: int, now_s: float) -> None:
        """D: the request has blocks; the first call decides whether anything has to come."""
        trace = self._open.get(request_id)
        if trace is None or trace.side != "decode" or "allocated" in trace.times_s:
            return
        _mark(trace, "allocated", now_s)
        if num_external_tokens == 0:
            trace.outcome = "not_needed"
            self._end(trace)

    def told(self, ranks: Iterable[RankTrace]) -> None:
        """What ranks say of requests that they report in this step, or have reported before the others."""
        for rank in ranks:
            trace = self._open.get(rank.request_id)
            if trace is not None:
                trace.ranks.append(rank)

    def reported(self, request_ids: Iterable[str], now_s: float) -> None:
        """Every rank has reported these requests as sent or received, or as given up."""
        for request_id in request_ids:
            trace = self._open.get(request_id)
            if trace is None:
                continue
            _mark(trace, "reported", now_s)
            if trace.side == "prefill" or "finished" in trace.times_s:
                self._end(trace)
            else:
                self._unscheduled.add(request_id)

    def step(self, scheduled: Container[str], now_s: float) -> None:
        """A step of the engine in which these requests compute."""
        if not self._unscheduled:
            return
        for request_id in [name for name in self._unscheduled if name in scheduled]:
            self._unscheduled.discard(request_id)
            trace = self._open[request_id]
            _mark(trace, "scheduled", now_s)
            if trace.side == "decode":
                self._end(trace)

    def finished(self, request_id: str, now_s: float) -> None:
        """The engine is done with the request; blocks may be held on."""
        trace = self._open.get(request_id)
        if trace is None:
            return
        _mark(trace, "finished", now_s)
        if trace.side == "decode":
            if "allocated" not in trace.times_s:
                trace.outcome = "cancelled"
            if "allocated" not in trace.times_s or "reported" in trace.times_s:
                self._end(trace)

    def take(self, unix_offset_s: float) -> list[TransferTrace]:
        """The records that have ended since the last call. unix_offset_s: see `TransferTrace`."""
        if not self._new:
            return []
        new, self._new = self._new, []
        for trace in new:
            trace.unix_offset_s = round(unix_offset_s, 6)
        with self._lock:
            self._ended.extend(new)
        return new

    def last(self, count: int) -> list[TransferTrace]:
        """The newest records that were taken, oldest first."""
        with self._lock:
            ended = list(self._ended)
        return ended[max(0, len(ended) - count) :]

    def _end(self, trace: TransferTrace) -> None:
        self._open.pop(trace.request_id, None)
        self._unscheduled.discard(trace.request_id)
        if not trace.outcome:
            bad = [rank.outcome for rank in trace.ranks if rank.outcome.startswith("failed")]
            known = [rank.outcome for rank in trace.ranks if rank.outcome]
            trace.outcome = (bad or known or ["lost"])[0]
        self._count += 1
        trace.number = self._count
        self._new.append(trace)


def _mark(trace: TransferTrace, moment: str, now_s: float) -> None:
    trace.times_s.setdefault(moment, round(now_s, 6))
