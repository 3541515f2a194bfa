"""The report ledger: one report for each entry, whatever comes late, twice or out of nowhere."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import RequestId
from kvpush.protocol.ledger import Direction, ReportLedger

pytestmark = pytest.mark.unit

A, B = RequestId("a"), RequestId("b")
SENDING, RECEIVING = Direction.SENDING, Direction.RECEIVING


def test_a_report_is_made_once() -> None:
    ledger = ReportLedger()
    ledger.open(A, SENDING)
    assert ledger.owes(A, SENDING)
    assert ledger.report(A, SENDING)
    assert not ledger.owes(A, SENDING)
    assert not ledger.report(A, SENDING)
    assert not ledger.report(A, SENDING)


def test_a_phantom_is_never_reported() -> None:
    ledger = ReportLedger()
    ledger.open(A, SENDING)
    assert not ledger.report(B, SENDING)
    assert not ledger.report(A, RECEIVING)
    assert ledger.outstanding() == [(A, SENDING)]


def test_directions_are_entries_of_their_own() -> None:
    ledger = ReportLedger()
    ledger.open(A, SENDING)
    ledger.open(A, RECEIVING)
    assert ledger.report(A, RECEIVING)
    assert ledger.owes(A, SENDING)
    assert len(ledger) == 2


def test_opening_twice_is_a_defect_and_changes_nothing() -> None:
    ledger = ReportLedger()
    ledger.open(A, SENDING)
    ledger.report(A, SENDING)
    with pytest.raises(ProtocolError, match="already booked") as caught:
        ledger.open(A, SENDING)
    assert caught.value.fault == "local"
    assert not ledger.owes(A, SENDING)


def test_closing_forgets_what_was_reported_and_keeps_what_is_owed() -> None:
    ledger = ReportLedger()
    ledger.open(A, SENDING)
    ledger.open(A, RECEIVING)
    ledger.report(A, SENDING)
    ledger.close(A)
    assert ledger.outstanding() == [(A, RECEIVING)]
    assert ledger.report(A, RECEIVING)
    ledger.close(A)
    ledger.close(A)
    assert len(ledger) == 0
    ledger.open(A, SENDING)  # the name may be used again
    assert ledger.owes(A, SENDING)


calls = st.tuples(
    st.sampled_from(["open", "report", "close"]), st.sampled_from([A, B]), st.sampled_from(list(Direction))
)


@given(st.lists(calls, max_size=40))
@settings(deadline=None)
def test_any_course_reports_each_opened_entry_at_most_once(course: list[tuple[str, RequestId, Direction]]) -> None:
    ledger = ReportLedger()
    opened: dict[tuple[RequestId, Direction], int] = {}
    reported: dict[tuple[RequestId, Direction], int] = {}
    for call, request_id, direction in course:
        entry = (request_id, direction)
        if call == "open":
            try:
                ledger.open(request_id, direction)
            except ProtocolError:
                continue
            opened[entry] = opened.get(entry, 0) + 1
        elif call == "report":
            reported[entry] = reported.get(entry, 0) + ledger.report(request_id, direction)
        else:
            ledger.close(request_id)
        assert reported.get(entry, 0) <= opened.get(entry, 0) <= reported.get(entry, 0) + 1
    owed = [entry for entry, times in opened.items() if times > reported.get(entry, 0)]
    assert sorted(ledger.outstanding()) == sorted(owed)
