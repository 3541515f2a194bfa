"""The transition tables: complete, closed, and the only way in which a state changes; their diagrams."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from protocol_cases import PROMPT, T, address

from kvpush.protocol import diagram
from kvpush.protocol.commits import CommitSet
from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import AgentName, RequestId, SendKey
from kvpush.protocol.receive import Receive
from kvpush.protocol.registration import Registration
from kvpush.protocol.rendezvous import LocalRequest
from kvpush.protocol.send import Send
from kvpush.protocol.transitions import (
    RECEIVE_TERMINAL,
    RECEIVE_TRANSITIONS,
    SEND_TERMINAL,
    SEND_TRANSITIONS,
    ReceiveEvent,
    ReceiveState,
    SendEvent,
    SendState,
    step,
)

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
SEND_PAIRS = [(state, event) for state in SendState for event in SendEvent]
RECEIVE_PAIRS = [(state, event) for state in ReceiveState for event in ReceiveEvent]


def send(state: SendState) -> Send:
    registration = Registration(SendKey(T, 0), 1, PROMPT, 0, ((b"x",),), 1, 1, AgentName("d"), address(), 0.0)
    return Send(registration, LocalRequest(RequestId("r"), T, PROMPT, 1, 0.0), 0.0, state=state)


def receive(state: ReceiveState) -> Receive:
    ranks = CommitSet([address(0, "p")])
    return Receive(RequestId("r"), SendKey(T, 0), PROMPT, 0, [[b"x"]], 1, ranks, 0.0, 1, state=state)


def everything(record: Any) -> dict[str, object]:
    return {field.name: repr(getattr(record, field.name)) for field in fields(record)}


@pytest.mark.parametrize(("state", "event"), SEND_PAIRS)
def test_a_send_moves_as_the_table_says_or_not_at_all(state: SendState, event: SendEvent) -> None:
    record = send(state)
    before = everything(record)
    if (state, event) in SEND_TRANSITIONS:
        record.step(event)
        assert record.state is SEND_TRANSITIONS[state, event]
        return
    for peer_fault, fault in ((False, "local"), (True, "peer")):
        with pytest.raises(ProtocolError, match=f"{event.value} is not possible in state {state.value}") as caught:
            record.step(event, peer_fault=peer_fault)
        assert caught.value.fault == fault
    assert everything(record) == before


@pytest.mark.parametrize(("state", "event"), RECEIVE_PAIRS)
def test_a_receive_moves_as_the_table_says_or_not_at_all(state: ReceiveState, event: ReceiveEvent) -> None:
    record = receive(state)
    before = everything(record)
    if (state, event) in RECEIVE_TRANSITIONS:
        record.step(event)
        assert record.state is RECEIVE_TRANSITIONS[state, event]
        return
    for peer_fault, fault in ((False, "local"), (True, "peer")):
        with pytest.raises(ProtocolError, match=f"{event.value} is not possible in state {state.value}") as caught:
            record.step(event, peer_fault=peer_fault)
        assert caught.value.fault == fault
    assert everything(record) == before


def reachable(table: Any, start: Any) -> set[Any]:
    found, new = set(), {start}
    while new:
        found |= new
        new = {target for (source, _), target in table.items() if source in found} - found
    return found


def test_every_state_is_reached_and_every_state_can_end() -> None:
    assert reachable(SEND_TRANSITIONS, SendState.WAITING) == set(SendState)
    assert reachable(RECEIVE_TRANSITIONS, ReceiveState.ANNOUNCED) == set(ReceiveState)
    for state in SendState:
        assert reachable(SEND_TRANSITIONS, state) & SEND_TERMINAL
    for state in ReceiveState:
        assert reachable(RECEIVE_TRANSITIONS, state) & RECEIVE_TERMINAL


def test_nothing_leaves_a_terminal_state() -> None:
    assert not {state for state, _ in SEND_TRANSITIONS} & SEND_TERMINAL
    assert not {state for state, _ in RECEIVE_TRANSITIONS} & RECEIVE_TERMINAL
    assert {state for state in SendState if send(state).terminal} == SEND_TERMINAL


def test_every_open_send_can_be_ended_by_either_side() -> None:
    for state in set(SendState) - SEND_TERMINAL:
        assert SEND_TRANSITIONS[state, SendEvent.CANCEL] is SendState.CANCELLED
        assert SEND_TRANSITIONS[state, SendEvent.FAIL] is SendState.FAILED


def test_only_what_has_posted_everything_commits() -> None:
    assert [pair for pair, target in SEND_TRANSITIONS.items() if target is SendState.COMMITTED] == [
        (SendState.DRAINING, SendEvent.DRAINED)
    ]
    into = {(source, event) for (source, event), target in SEND_TRANSITIONS.items() if target is SendState.DRAINING}
    assert {event for source, event in into if source is not SendState.DRAINING} == {SendEvent.POST_LAST}


def test_memory_is_freed_only_when_received_or_quiet() -> None:
    ways = {(event, target) for (_, event), target in RECEIVE_TRANSITIONS.items() if target in RECEIVE_TERMINAL}
    assert ways == {
        (ReceiveEvent.COMPLETE, ReceiveState.RECEIVED),
        (ReceiveEvent.QUIET, ReceiveState.FAILED),
        (ReceiveEvent.EXPIRE, ReceiveState.FAILED),  # off by default: see quarantine_release_after_s
    }


@pytest.mark.parametrize("state", list(ReceiveState))
def test_a_receive_is_either_active_or_fenced_or_neither(state: ReceiveState) -> None:
    record = receive(state)
    failable = (state, ReceiveEvent.FAIL) in RECEIVE_TRANSITIONS
    assert record.active == failable
    assert record.fenced == ((state, ReceiveEvent.QUIET) in RECEIVE_TRANSITIONS)


def test_states_are_changed_in_one_place_only() -> None:
    """Assignments to a state outside `step` would go round the tables."""
    source = ROOT / "src" / "kvpush" / "protocol"
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted(source.glob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(r"\.state\s*=[^=]", line)
    ]
    assert len(found) == 2
    assert all("self.state = step(" in line for line in found)


def test_step_names_the_fault() -> None:
    with pytest.raises(ProtocolError, match=r"^peer fault: drained is not possible in state waiting$"):
        step(SEND_TRANSITIONS, SendState.WAITING, SendEvent.DRAINED, "peer")


# Diagrams


def arrows(text: str) -> set[tuple[str, str, str]]:
    found = set()
    for line in text.splitlines():
        match = re.fullmatch(r"    (\w+) --> (\w+): (.+)", line)
        if match:
            found |= {(match[1], event, match[2]) for event in match[3].split(", ")}
    return found


@pytest.mark.parametrize(
    ("table", "start", "terminal"),
    [
        (SEND_TRANSITIONS, SendState.WAITING, SEND_TERMINAL),
        (RECEIVE_TRANSITIONS, ReceiveState.ANNOUNCED, RECEIVE_TERMINAL),
    ],
    ids=["send", "receive"],
)
def test_the_diagram_shows_the_whole_table_and_nothing_else(table: Any, start: Any, terminal: Any) -> None:
    text = diagram.mermaid(table, start, terminal)
    assert arrows(text) == {(source.value, event.value, target.value) for (source, event), target in table.items()}
    lines = text.splitlines()
    assert lines[0] == "stateDiagram-v2"
    assert lines[1] == f"    [*] --> {start.value}"
    assert sorted(line for line in lines if line.endswith("--> [*]")) == sorted(
        f"    {state.value} --> [*]" for state in terminal
    )


def test_the_documentation_holds_the_diagrams_as_they_are_generated() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    assert diagram.both() in text
    assert text.count("```mermaid") == 2


def test_the_module_prints_both(capsys: pytest.CaptureFixture[str]) -> None:
    import runpy
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # it is imported above already
        runpy.run_module("kvpush.protocol.diagram", run_name="__main__")
    assert capsys.readouterr().out.strip() == diagram.both().strip()
