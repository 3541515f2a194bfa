"""The background thread of one worker: the only user of the transport."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from kvpush.transfer.commands import Command
from kvpush.transfer.core import TransferCore
from kvpush.transfer.results import Result
from kvpush.transfer.sources import PASSED, Event

_log = logging.getLogger(__name__)

# Every round takes the interpreter from the engine (on CUDA with TP 1 from its scheduler too), and spinning starves
# the threads of UCX. Only who has pieces under way is in a hurry; a decode engine less so, because a round of its
# thread may hold up everything that it decodes. An engine that steps looks for results once a step, so the thread looks
# once a step too: when it begins, because then the engine soon waits for the device. A round that ran by a clock would
# fall anywhere, also where the step's output has just come and every running request waits for it.
WRITING_PAUSE_S = 100e-6
UNPACKING_PAUSE_S = 500e-6
STEPPING_PAUSE_S = 5e-3
WAITING_PAUSE_S = 1e-3
IDLE_PAUSE_S = 2e-3

STEPPING_S = 0.02
"""An engine that has begun no step for so long does not step."""


class TransferThread:
    """Runs a core. `submit` and `take_results` are for the engine's main thread and never wait.

    on_start: called first in the new thread (selects the CUDA device).
    """

    def __init__(self, core: TransferCore, on_start: Callable[[], None] = lambda: None) -> None:
        self._core = core
        self._on_start = on_start
        self._commands: deque[tuple[Command, Event]] = deque()
        self._results: deque[Result] = deque()
        self._wake = threading.Event()
        self._stepped_s = float("-inf")
        self._stop = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvpush-transfer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, commands: Iterable[Command], event: Event = PASSED) -> None:
        """Hands over commands, in order. event: when the forward of their step is done."""
        items = [(command, event) for command in commands]
        if items:
            self._commands.extend(items)
            self._wake.set()

    def on_step(self) -> None:
        """The engine begins a step."""
        self._stepped_s = time.monotonic()
        self._wake.set()

    def take_results(self) -> list[Result]:
        """What has ended since the last call. Raises RuntimeError if the thread has died: nothing would end then."""
        if self.failure is not None:
            raise RuntimeError("the kvpush transfer thread has died") from self.failure
        results = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the thread and closes the core. Idempotent; a thread that does not end in time is left behind."""
        self._stop.set()
        self._wake.set()
        if self._thread.ident is None:
            self._core.close()  # it was never started
        elif self._thread.is_alive():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                _log.error("kvpush: the transfer thread does not end within %.0f s", timeout_s)

    def _run(self) -> None:
        try:
            self._on_start()
            while not self._stop.is_set():
                self._round()
        except BaseException as error:
            _log.exception("kvpush: the transfer thread has died")
            self.failure = error
        finally:
            self._core.close()

    def _round(self) -> None:
        core = self._core
        while self._commands:
            command, event = self._commands.popleft()
            core.command(command, time.monotonic(), event)
        core.poll(time.monotonic())
        self._results.extend(core.take_results())
        if core.writing:
            time.sleep(WRITING_PAUSE_S)
        else:
            # A command or a step ends the pause; a notification does not, so without steps the thread looks often.
            self._wake.wait(self._pause_s())
            self._wake.clear()

    def _pause_s(self) -> float:
        if self._core.unpacking:
            return UNPACKING_PAUSE_S
        if time.monotonic() - self._stepped_s < STEPPING_S:
            return STEPPING_PAUSE_S
        return IDLE_PAUSE_S if self._core.idle else WAITING_PAUSE_S
