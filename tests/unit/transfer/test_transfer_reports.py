"""What a worker owes to its engine: each request once, only while it is held, and the blocks that hold nothing."""

from __future__ import annotations

import random

import pytest
from transfer_world import identity

from kvpush.protocol.ids import RequestId, SendKey, TransferId
from kvpush.transfer.commands import Cancel, Command, Fetch, Finish, Offer, Preempt, Refuse, Release
from kvpush.transfer.reports import Reports
from kvpush.transfer.results import LoadFailed, Received, Released, Result, Sent

pytestmark = pytest.mark.unit
R, S = RequestId("r"), RequestId("s")
BLOCK = 4


def _offer(name: RequestId = R) -> Offer:
    return Offer(name, TransferId("t"), identity("p", 8), 1)


def _fetch(name: RequestId = R, first_token: int = 4, blocks: tuple[int, ...] = (7, 8, 9)) -> Fetch:
    return Fetch(name, SendKey(TransferId("t"), 0), 1, identity("p", 12), first_token, (blocks,), ("p", 1))


@pytest.fixture
def reports() -> Reports:
    return Reports(BLOCK)


def _admit(reports: Reports, *commands: Command, poisoned: tuple[RequestId, ...] = ()) -> list[Command]:
    return reports.admit(commands, poisoned)


def _collect(reports: Reports, *results: Result, finished: tuple[str, ...] = ()) -> tuple[set[str], set[str]]:
    sent, received, failed = reports.collect(finished, results)
    assert failed <= received
    reports.take_failures()
    return sent, received


def test_a_failure_is_told_at_once_and_once(reports: Reports) -> None:
    _admit(reports, _fetch(), _fetch(S))
    reports.collect((), [LoadFailed(R, "why"), Received(S)])
    assert reports.take_failures() == {"r"}
    reports.collect((), [Released(R)])
    assert reports.take_failures() == set()


def test_a_load_that_is_released_and_not_received_has_failed(reports: Reports) -> None:
    """A version that asks for it learns of the failure by name as well; without that a lost name would be a success."""
    _admit(reports, _fetch(), _fetch(S), Refuse(RequestId("u"), "duplicate", 0, ((1,),)))
    assert reports.collect((), [LoadFailed(R, "why"), Received(S)]) == (set(), {"s"}, set())
    assert reports.collect((), [Released(R), Released(RequestId("u"))]) == (set(), {"r", "u"}, {"r", "u"})
    assert reports.collect(("r", "s", "u"), [Released(R)]) == (set(), set(), set())
    reports.take_invalid_blocks()
    reports.take_failures()
    assert reports.idle


@pytest.mark.parametrize("first_token", [12, 15, 100])
def test_a_failure_is_never_without_a_block(reports: Reports, first_token: int) -> None:
    """A version that hears of failures by blocks alone would take a failure without any for a success."""
    _admit(reports, _fetch(first_token=first_token, blocks=(7, 8, 9)))
    assert _collect(reports, LoadFailed(R, "why"), Released(R)) == (set(), {"r"})
    assert reports.take_invalid_blocks() == {9}


def test_a_sent_request_is_reported_once_after_the_engine_has_ended_it(reports: Reports) -> None:
    assert _admit(reports, _offer(), Finish(R)) == [_offer(), Finish(R)]
    assert _collect(reports, Sent(R)) == (set(), set())  # vLLM does not know yet that it has finished
    assert _collect(reports) == (set(), set())
    assert not reports.idle
    assert _collect(reports, finished=("r",)) == ({"r"}, set())
    assert _collect(reports, Sent(R), finished=("r",)) == (set(), set())
    assert _collect(reports, Sent(R)) == (set(), set())


def test_sent_and_finished_in_one_step(reports: Reports) -> None:
    _admit(reports, _offer())
    assert _collect(reports, Sent(R), finished=("r",)) == ({"r"}, set())
    assert reports.idle


def test_a_received_request_is_reported_once(reports: Reports) -> None:
    _admit(reports, _fetch())
    assert _collect(reports, Received(R)) == (set(), {"r"})
    assert reports.take_invalid_blocks() == set()
    assert _collect(reports, Received(R), Released(R), LoadFailed(R, "late")) == (set(), set())
    assert reports.take_invalid_blocks() == set()
    assert _collect(reports, finished=("r",)) == (set(), set())
    assert reports.idle


@pytest.mark.parametrize("together", [True, False])
def test_a_failed_load_names_its_blocks_no_later_than_its_report(reports: Reports, together: bool) -> None:
    _admit(reports, _fetch())
    if together:
        assert _collect(reports, LoadFailed(R, "why"), Released(R)) == (set(), {"r"})
        assert reports.take_invalid_blocks() == {8, 9}  # from first_token on: block 7 may be somebody else's too
    else:
        assert _collect(reports, LoadFailed(R, "why")) == (set(), set())
        assert reports.take_invalid_blocks() == {8, 9}
        assert _collect(reports, Released(R)) == (set(), {"r"})
    assert reports.take_invalid_blocks() == set()


def test_a_release_without_a_failure_is_no_success(reports: Reports) -> None:
    _admit(reports, _fetch())
    assert _collect(reports, Released(R)) == (set(), {"r"})
    assert reports.take_invalid_blocks() == {8, 9}


def test_a_refused_load_names_its_blocks(reports: Reports) -> None:
    """Without them the engine would take the load for received, and decode from nothing."""
    _admit(reports, Refuse(R, "duplicate", 0, ((7, 8),)))
    assert _collect(reports, LoadFailed(R, "duplicate"), Released(R)) == (set(), {"r"})
    assert reports.take_invalid_blocks() == {7, 8}


@pytest.mark.parametrize("results", [[LoadFailed(R, "x"), Released(R)], [Released(R)], [Received(R)]])
def test_blocks_of_a_request_that_has_ended_are_named_to_nobody(reports: Reports, results: list[Result]) -> None:
    """Aborted while it loads: its blocks are held until the report, which is owed all the same."""
    _admit(reports, _fetch())
    assert _collect(reports, finished=("r",)) == (set(), set())
    assert _admit(reports, Cancel(R)) == [Cancel(R)]
    assert _collect(reports, *results) == (set(), {"r"})
    assert reports.take_invalid_blocks() == set()
    assert reports.idle


def test_a_cancellation_behind_the_report_goes_nowhere(reports: Reports) -> None:
    """Under policy fail the scheduler half ends the request before it hears of the report."""
    _admit(reports, _fetch())
    _collect(reports, LoadFailed(R, "x"), Released(R))
    reports.take_invalid_blocks()
    assert _admit(reports, Cancel(R), Cancel(S)) == []
    assert _collect(reports, finished=("r",)) == (set(), set())
    assert reports.idle


def test_only_those_that_the_fence_has_poisoned_are_told_so(reports: Reports) -> None:
    release = Release(SendKey(TransferId("t"), 0), ("p", 1))
    commands = [Preempt(R), Preempt(S), release]
    assert _admit(reports, *commands, poisoned=(S,)) == [Preempt(R), Preempt(S, poisoned=True), release]


def test_results_of_strangers_are_nothing(reports: Reports) -> None:
    """Phantoms, and whatever else was never booked."""
    assert _collect(reports, Received(S), LoadFailed(S, "x"), Released(S), finished=("s",)) == (set(), set())
    assert reports.take_invalid_blocks() == set()
    assert reports.idle


@pytest.mark.parametrize("seed", range(20))
def test_in_any_order_each_is_reported_once_and_nothing_is_left(seed: int) -> None:
    rng = random.Random(seed)
    reports = Reports(BLOCK)
    todo: dict[str, list[str]] = {}
    sent, received, failed, failures, released = [], [], [], [], set()
    invalid: set[int] = set()
    expected_invalid: set[int] = set()
    for i in range(30):
        name = f"r{i}"
        kind = rng.choice(["sent", "received", "failed", "aborted"])
        if kind == "sent":
            _admit(reports, _offer(RequestId(name)))
            todo[name] = rng.choice([["finish", "sent"], ["sent", "finish"]])
        else:
            _admit(reports, _fetch(RequestId(name), 4, (3 * i, 3 * i + 1, 3 * i + 2)))
            todo[name] = {
                "received": ["received", "finish"],
                "failed": ["failed", "released", "finish"],
                "aborted": ["finish", rng.choice(["released", "received"])],
            }[kind]
            if kind == "failed":
                expected_invalid |= {3 * i + 1, 3 * i + 2}
    while todo:
        results: list[Result] = []
        finished = []
        for name in rng.sample(sorted(todo), rng.randint(1, len(todo))):
            step = todo[name].pop(0)
            request_id = RequestId(name)
            match step:
                case "finish":
                    finished.append(name)
                case "sent":
                    results.append(Sent(request_id))
                case "received":
                    results.append(Received(request_id))
                case "released":
                    results.append(Released(request_id))
                    released.add(name)
                case "failed":
                    results.append(LoadFailed(request_id, "x"))
            if not todo[name]:
                del todo[name]
        now_sent, now_received, now_failed = reports.collect(finished, results)
        assert now_failed <= now_received
        failed += now_failed
        failures += reports.take_failures()
        sent += now_sent
        received += now_received
        invalid |= reports.take_invalid_blocks()
    assert len(set(sent)) == len(sent)
    assert len(set(received)) == len(received)
    assert len(sent) + len(received) == 30
    assert sorted(failed) == sorted(released)
    assert len(set(failures)) == len(failures)
    assert set(failures) <= released
    assert invalid == expected_invalid
    assert reports.idle
