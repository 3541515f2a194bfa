"""Mermaid state diagrams of both transition tables, for the documentation: `python -m kvpush.protocol.diagram`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvpush.protocol.transitions import (
    RECEIVE_TERMINAL,
    RECEIVE_TRANSITIONS,
    SEND_TERMINAL,
    SEND_TRANSITIONS,
    EventT,
    ReceiveState,
    SendState,
    StateT,
)


def mermaid(table: Mapping[tuple[StateT, EventT], StateT], start: StateT, terminal: Collection[StateT]) -> str:
    """The table as a Mermaid `stateDiagram-v2`, events between the same two states on one arrow."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for (source, event), target in table.items():
        arrows.setdefault((source.value, target.value), []).append(event.value)
    lines = ["stateDiagram-v2", f"    [*] --> {start.value}"]
    lines += [f"    {source} --> {target}: {', '.join(events)}" for (source, target), events in arrows.items()]
    lines += [f"    {state.value} --> [*]" for state in sorted(terminal)]
    return "\n".join(lines)


def both() -> str:
    """Both diagrams as they stand in docs/protocol.md."""
    send = mermaid(SEND_TRANSITIONS, SendState.WAITING, SEND_TERMINAL)
    receive = mermaid(RECEIVE_TRANSITIONS, ReceiveState.ANNOUNCED, RECEIVE_TERMINAL)
    titled = (("P, one (transfer, consumer)", send), ("D, one request", receive))
    return "\n".join(f"## {title}\n\n```mermaid\n{diagram}\n```\n" for title, diagram in titled)


if __name__ == "__main__":
    print(both())
