"""P: where the KV of each offered request lies, and which of it exists already."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from kvpush.protocol.ids import RequestId
from kvpush.transfer.commands import BlockTable, Progress


class Event(Protocol):
    """Passes when the forward of a step is done; a CUDA event, or `PASSED` where the step is done when it returns."""

    def query(self) -> bool: ...


class _Passed:
    def query(self) -> bool:
        return True


PASSED: Event = _Passed()


@dataclass(slots=True)
class _Pending:
    event: Event
    request_id: RequestId
    ready: int


class Sources:
    """Block tables by request, and the steps whose forward has not finished yet, in order."""

    def __init__(self) -> None:
        self._tables: dict[RequestId, list[list[int]]] = {}
        self._pending: deque[_Pending] = deque()

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def pending(self) -> bool:
        """A forward has been launched whose blocks are not complete yet."""
        return bool(self._pending)

    def advance(self, progress: Progress, event: Event) -> None:
        """Books what a step computes; it may be read as soon as `event` has passed."""
        table = self._tables.get(progress.request_id)
        if table is None or progress.replace:
            self._tables[progress.request_id] = [list(group) for group in progress.blocks]
        else:
            self._extend(table, progress.blocks)
        self._pending.append(_Pending(event, progress.request_id, progress.ready))

    def passed(self) -> list[tuple[RequestId, int]]:
        """(request, ready tokens) of the steps whose event has passed since the last call."""
        done = []
        while self._pending and self._pending[0].event.query():
            step = self._pending.popleft()
            done.append((step.request_id, step.ready))
        return done

    def settle(self, request_id: RequestId) -> int | None:
        """Takes a request's open steps out of the queue; returns what the last of them was to make ready.

        For a request that has finished: its last step's output exists, so its forward is over.
        """
        last = max((step.ready for step in self._pending if step.request_id == request_id), default=None)
        self._pending = deque(step for step in self._pending if step.request_id != request_id)
        return last

    def table(self, request_id: RequestId) -> list[list[int]]:
        """Block ids per KV cache group; empty for a request that has none."""
        return self._tables.get(request_id, [])

    def preempt(self, request_id: RequestId) -> None:
        """The blocks are gone, and with them what open steps were to make ready."""
        self._tables.pop(request_id, None)
        self._pending = deque(step for step in self._pending if step.request_id != request_id)

    def forget(self, request_id: RequestId) -> None:
        self.preempt(request_id)

    @staticmethod
    def _extend(table: list[list[int]], blocks: BlockTable) -> None:
        for group, gained in zip(table, blocks, strict=True):
            group.extend(gained)
