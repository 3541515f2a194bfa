"""The background thread: it starts, works, wakes, ends, and says so when it has died."""

from __future__ import annotations

import logging
import threading
import time

import pytest
from transfer_world import Gate

from kvpush.protocol.ids import RequestId
from kvpush.transfer import commands
from kvpush.transfer import thread as module
from kvpush.transfer.results import Received, Result
from kvpush.transfer.sources import PASSED, Event
from kvpush.transfer.thread import TransferThread

pytestmark = pytest.mark.unit


class Core:
    """What the thread needs of a core: books every call, answers each command with a result."""

    def __init__(self) -> None:
        self.idle, self.writing, self.unpacking = True, False, False
        self.commands: list[tuple[commands.Command, Event]] = []
        self.times_s: list[float] = []
        self.threads: set[str] = set()
        self.closed = 0
        self.polls = 0
        self.fail: BaseException | None = None
        self._results: list[Result] = []

    def command(self, command: commands.Command, now_s: float, event: Event) -> None:
        self.threads.add(threading.current_thread().name)
        self.commands.append((command, event))
        self.times_s.append(time.monotonic())
        self._results.append(Received(command.request_id))  # type: ignore[union-attr]

    def poll(self, now_s: float) -> None:
        self.polls += 1
        if self.fail is not None:
            raise self.fail

    def take_results(self) -> list[Result]:
        results, self._results = self._results, []
        return results

    def close(self) -> None:
        self.closed += 1


def _thread(core: Core, **options: object) -> TransferThread:
    return TransferThread(core, **options)  # type: ignore[arg-type]


def _until(met: object, limit_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not met():  # type: ignore[operator]
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def _cancel(i: int) -> commands.Cancel:
    return commands.Cancel(RequestId(str(i)))


def test_commands_arrive_in_order_with_their_events_and_results_come_back() -> None:
    core, gate = Core(), Gate()
    thread = _thread(core)
    thread.start()
    try:
        thread.submit([_cancel(0), _cancel(1)])
        thread.submit([_cancel(2)], gate)
        thread.submit([])
        results: list[Result] = []
        deadline_s = time.monotonic() + 5
        while len(results) < 3:
            assert time.monotonic() < deadline_s
            results += thread.take_results()
        assert [result.request_id for result in results] == ["0", "1", "2"]
        assert core.commands == [(_cancel(0), PASSED), (_cancel(1), PASSED), (_cancel(2), gate)]
        assert core.threads == {"kvpush-transfer"}
        assert thread.take_results() == []
    finally:
        thread.stop()
    assert core.closed == 1


def test_an_idle_thread_takes_a_command_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_PAUSE_S", 1.0)
    core = Core()
    thread = _thread(core)
    thread.start()
    late_s = []
    try:
        for i in range(30):
            time.sleep(0.004)
            submitted_s = time.monotonic()
            thread.submit([_cancel(i)])
            _until(lambda i=i: len(core.times_s) > i)
            late_s.append(core.times_s[i] - submitted_s)
    finally:
        thread.stop()
    assert sorted(late_s)[15] < 0.01  # the median: the machine is shared


def test_no_command_is_lost_or_late_while_the_thread_is_taking_others() -> None:
    core = Core()
    thread = _thread(core)
    thread.start()
    try:
        for i in range(5000):
            thread.submit([_cancel(i)])
        _until(lambda: len(core.commands) == 5000)
        assert [command for command, _ in core.commands] == [_cancel(i) for i in range(5000)]
    finally:
        thread.stop()


def test_it_polls_often_only_while_something_is_written() -> None:
    core = Core()
    thread = _thread(core)
    thread.start()
    try:
        counts = []
        for writing in (False, True):
            core.writing, core.idle = writing, not writing
            time.sleep(0.01)
            before = core.polls
            time.sleep(0.3)
            counts.append(core.polls - before)
        assert counts[0] <= 400  # a pause of 1 ms
        assert counts[1] > counts[0]
    finally:
        thread.stop()


def test_while_the_engine_steps_it_looks_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPPING_PAUSE_S", 60.0)
    monkeypatch.setattr(module, "STEPPING_S", 60.0)
    core = Core()
    core.idle = False
    thread = _thread(core)
    thread.start()
    try:
        thread.on_step()
        time.sleep(0.05)
        for _ in range(20):
            polls = core.polls
            time.sleep(0.005)
            assert core.polls == polls
            thread.on_step()
            _until(lambda polls=polls: core.polls > polls)
    finally:
        thread.stop()


def test_without_steps_it_looks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPPING_PAUSE_S", 60.0)
    monkeypatch.setattr(module, "STEPPING_S", 0.0)
    core = Core()
    for core.idle in (True, False):
        thread = _thread(core)
        thread.start()
        try:
            thread.on_step()
            polls = core.polls
            _until(lambda polls=polls: core.polls > polls + 20)
        finally:
            thread.stop()


def test_it_runs_its_start_hook_first_and_in_the_thread() -> None:
    core = Core()
    seen: list[str] = []
    thread = _thread(core, on_start=lambda: seen.append(threading.current_thread().name))
    thread.start()
    try:
        _until(lambda: core.polls > 0)
        assert seen == ["kvpush-transfer"]
    finally:
        thread.stop()


@pytest.mark.parametrize("where", ["poll", "start"])
def test_its_death_is_raised_into_the_engine_and_never_hangs(where: str, caplog: pytest.LogCaptureFixture) -> None:
    core = Core()
    error = KeyError("a defect")

    def broken() -> None:
        raise error

    thread = _thread(core, on_start=broken) if where == "start" else _thread(core)
    core.fail = error
    thread.start()
    _until(lambda: thread.failure is not None and core.closed == 1)
    thread.submit([_cancel(0)])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="transfer thread has died") as raised:
            thread.take_results()
        assert raised.value.__cause__ is error
    start_s = time.monotonic()
    thread.stop()
    assert time.monotonic() - start_s < 1
    assert "has died" in caplog.text


def test_what_had_ended_before_its_death_does_not_hide_it() -> None:
    core = Core()
    thread = _thread(core)
    thread.start()
    thread.submit([_cancel(0)])
    _until(lambda: len(core.commands) == 1)
    core.fail = KeyError("a defect")
    _until(lambda: thread.failure is not None)
    with pytest.raises(RuntimeError, match="has died"):
        thread.take_results()


def test_stopping_is_idempotent_and_closes_the_core_once() -> None:
    core = Core()
    thread = _thread(core)
    thread.start()
    thread.stop()
    thread.stop()
    assert core.closed == 1
    assert thread.failure is None
    assert thread.take_results() == []


def test_stopping_before_it_was_started_closes_the_core() -> None:
    core = Core()
    thread = _thread(core)
    thread.stop()
    assert core.closed == 1


def test_a_thread_that_hangs_is_left_behind_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    core, leave = Core(), threading.Event()
    core.poll = lambda now_s: leave.wait(5)  # type: ignore[method-assign, assignment, return-value]
    thread = _thread(core)
    thread.start()
    with caplog.at_level(logging.ERROR):
        start_s = time.monotonic()
        thread.stop(timeout_s=0.1)
        assert time.monotonic() - start_s < 2
    assert "does not end" in caplog.text
    leave.set()
    _until(lambda: core.closed == 1)
