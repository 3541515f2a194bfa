"""The fence at P: source blocks are not given away while a transfer reads them, or no commit follows.

The one thing that the engine's main thread and the transfer thread share. The transfer thread books each piece before
it posts it. The main thread, when blocks are preempted, lets no further piece begin, waits a bounded time for those
that have begun, and otherwise poisons the request: what its pieces read from then on can never be committed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from kvpush.protocol.ids import RequestId


class Fence:
    """Thread-safe. All waits are bounded by the caller's timeout."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reading: dict[RequestId, int] = {}
        self._closed: set[RequestId] = set()
        self._poisoned: set[RequestId] = set()

    def begin(self, request_id: RequestId) -> bool:
        """Books one read of the request's blocks. False if they are being preempted: the piece must not be posted."""
        with self._changed:
            if request_id in self._closed:
                return False
            self._reading[request_id] = self._reading.get(request_id, 0) + 1
            return True

    def end(self, request_id: RequestId) -> None:
        """A read that had begun is over."""
        with self._changed:
            left = self._reading[request_id] - 1
            if left:
                self._reading[request_id] = left
            else:
                del self._reading[request_id]
                self._changed.notify_all()

    def preempt(self, request_ids: Collection[RequestId], timeout_s: float) -> set[RequestId]:
        """Closes the requests, waits until nothing reads them, and returns those that had to be poisoned.

        From the return on the engine may overwrite the blocks. The requests stay closed until `reopen`.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self.close(request_ids)
            while self.busy(request_ids):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            return self.poison(request_ids)

    # The steps of `preempt`, for whoever waits in another way

    def close(self, request_ids: Collection[RequestId]) -> None:
        """Lets no further read of these requests begin."""
        with self._changed:
            self._closed.update(request_ids)

    def busy(self, request_ids: Collection[RequestId]) -> set[RequestId]:
        """Those of them that are being read."""
        with self._changed:
            return {request_id for request_id in request_ids if request_id in self._reading}

    def poison(self, request_ids: Collection[RequestId]) -> set[RequestId]:
        """Poisons those that are being read still, and returns them."""
        with self._changed:
            busy = self.busy(request_ids)
            self._poisoned |= busy
            return busy

    def reopen(self, request_id: RequestId) -> None:
        """The transfer thread has taken note of the preemption (and of the poison, if there was one)."""
        with self._changed:
            self._closed.discard(request_id)
            self._poisoned.discard(request_id)

    def closed(self, request_id: RequestId) -> bool:
        """Its blocks are about to be taken: no further read begins."""
        with self._changed:
            return request_id in self._closed

    @contextmanager
    def committing(self, request_id: RequestId) -> Iterator[bool]:
        """Holds the fence while a commit is decided and sent; yields True if the request is poisoned."""
        with self._changed:
            yield request_id in self._poisoned

    @property
    def idle(self) -> bool:
        """Nothing is read, closed or poisoned."""
        with self._changed:
            return not (self._reading or self._closed or self._poisoned)
