"""One record per transfer: when each thing happened, at this side, on this machine's clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvpush.protocol.ids import RequestId


@dataclass(slots=True)
class Record:
    """The life of one request's transfer at one rank. times_s: moment -> seconds of the thread's clock.

    P books known, matched (with the registration), computed (the last kernel of the prompt is done), first_write and
    last_write (posted), landed, committed (the commit has left) and prefilled (the engine is done with the request).
    D books registered, accepted, commit_seen, verified and received. failure: why it did not arrive.
    """

    request_id: RequestId
    transfer_id: str
    times_s: dict[str, float] = field(default_factory=dict)
    num_tokens: int = 0
    num_bytes: int = 0
    num_writes: int = 0
    num_runs: int = 0
    plan_s: float = 0.0
    post_s: float = 0.0
    outcome: str = ""
    failure: str = ""

    def mark(self, moment: str, now_s: float) -> None:
        """Books a moment; the first time counts."""
        self.times_s.setdefault(moment, now_s)

    def mark_last(self, moment: str, now_s: float) -> None:
        """Books a moment; the last time counts."""
        self.times_s[moment] = now_s

    def between_ms(self, start: str, end: str) -> float | None:
        """Milliseconds between two moments, None unless both are booked."""
        if start not in self.times_s or end not in self.times_s:
            return None
        return (self.times_s[end] - self.times_s[start]) * 1e3

    def cost(self) -> str:
        """What it took to post its pieces, as text for a log line."""
        return f"; {self.num_runs} runs, planned in {self.plan_s * 1e3:.2f} ms, posted in {self.post_s * 1e3:.2f} ms"

    def timing(self, *spans: tuple[str, str, str]) -> str:
        """Spans as text for a log line: (name, start, end), those that have both ends."""
        parts = [
            f"{name} {span:.2f} ms" for name, start, end in spans if (span := self.between_ms(start, end)) is not None
        ]
        return "; " + ", ".join(parts) if parts else ""


class Records:
    """Records of open transfers, and of the last ones that ended.

    clock: reads the time whenever a moment is booked; a round of the thread takes milliseconds if it posts thousands of
    runs. None: the time that the caller gives, which may be virtual.
    """

    def __init__(self, max_ended: int = 1024, max_open: int = 65_536, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock
        self._open: dict[RequestId, Record] = {}
        self._max_open = max_open
        self.ended: deque[Record] = deque(maxlen=max_ended)

    def __len__(self) -> int:
        return len(self._open)

    def now(self, now_s: float) -> float:
        """The time to book: the clock's, else the caller's."""
        return now_s if self._clock is None else self._clock()

    def mark(self, request_id: RequestId, moment: str, now_s: float, *, last: bool = False) -> None:
        """Books a moment of an open transfer; the first time counts, or the last one."""
        record = self._open.get(request_id)
        if record is not None:
            (record.mark_last if last else record.mark)(moment, self.now(now_s))

    def open(self, request_id: RequestId, transfer_id: str) -> Record:
        """The record of a request, made if there is none."""
        record = self._open.get(request_id)
        if record is None:
            record = Record(request_id, transfer_id)
            if len(self._open) < self._max_open:
                self._open[request_id] = record
        return record

    def get(self, request_id: RequestId) -> Record | None:
        return self._open.get(request_id)

    def fail(self, transfer_id: str, reason: str) -> None:
        """Books why the open transfers of this id do not arrive."""
        for record in self._open.values():
            if record.transfer_id == transfer_id:
                record.failure = reason

    def end(self, request_id: RequestId, outcome: str) -> Record | None:
        """Closes a record and returns it; None if there was none. A failure that was booked is its outcome."""
        record = self._open.pop(request_id, None)
        if record is not None:
            record.outcome = f"failed: {record.failure}" if record.failure else outcome
            self.ended.append(record)
        return record

    def take_ended(self) -> list[Record]:
        """Those that have ended since the last call. Another thread may be adding."""
        taken = []
        while self.ended:
            taken.append(self.ended.popleft())
        return taken
