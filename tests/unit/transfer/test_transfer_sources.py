"""Where the KV of offered requests lies, and which of it exists."""

from __future__ import annotations

import pytest
from transfer_world import Gate

from kvpush.protocol.ids import RequestId
from kvpush.transfer.commands import Progress
from kvpush.transfer.sources import PASSED, Sources

pytestmark = pytest.mark.unit
R, S = RequestId("r"), RequestId("s")


def test_tables_grow_by_what_a_step_gains() -> None:
    sources = Sources()
    sources.advance(Progress(R, 4, ((1,),), True), PASSED)
    sources.advance(Progress(R, 6, ((),), False), PASSED)
    sources.advance(Progress(R, 9, ((5, 3),), False), PASSED)
    assert sources.table(R) == [[1, 5, 3]]
    assert sources.passed() == [(R, 4), (R, 6), (R, 9)]
    assert sources.passed() == []
    assert not sources.pending


def test_a_replacement_takes_the_place_of_the_table() -> None:
    sources = Sources()
    sources.advance(Progress(R, 4, ((1, 2),), True), PASSED)
    sources.advance(Progress(R, 2, ((7,),), True), PASSED)
    assert sources.table(R) == [[7]]


def test_the_first_step_needs_no_replacement() -> None:
    sources = Sources()
    sources.advance(Progress(R, 4, ((1,), (2,)), False), PASSED)
    assert sources.table(R) == [[1], [2]]


def test_steps_pass_in_order() -> None:
    sources = Sources()
    first, second = Gate(), Gate()
    sources.advance(Progress(R, 4, ((1,),), True), first)
    sources.advance(Progress(S, 4, ((2,),), True), second)
    second.passed = True
    assert sources.passed() == []
    assert sources.pending
    first.passed = True
    assert sources.passed() == [(R, 4), (S, 4)]


def test_a_preemption_forgets_the_table_and_the_open_steps_of_one_request() -> None:
    sources = Sources()
    gate = Gate()
    sources.advance(Progress(R, 4, ((1,),), True), gate)
    sources.advance(Progress(S, 4, ((2,),), True), gate)
    sources.preempt(R)
    gate.passed = True
    assert sources.table(R) == []
    assert sources.table(S) == [[2]]
    assert sources.passed() == [(S, 4)]


def test_settling_returns_what_the_last_open_step_makes_ready() -> None:
    sources = Sources()
    gate = Gate()
    assert sources.settle(R) is None
    sources.advance(Progress(R, 4, ((1,),), True), gate)
    sources.advance(Progress(R, 7, ((2,),), False), gate)
    sources.advance(Progress(S, 3, ((3,),), True), gate)
    assert sources.settle(R) == 7
    assert sources.settle(R) is None
    assert sources.table(R) == [[1, 2]]
    gate.passed = True
    assert sources.passed() == [(S, 3)]


def test_forgetting_leaves_nothing() -> None:
    sources = Sources()
    sources.advance(Progress(R, 4, ((1,),), True), Gate())
    sources.forget(R)
    sources.forget(R)
    assert len(sources) == 0
    assert not sources.pending
