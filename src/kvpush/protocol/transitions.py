"""All legal transitions of both sides, in one table each.

The state machines look up every change here and never assign a state by hand; the documentation's diagrams are
generated from these tables (`kvpush.protocol.diagram`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal, TypeVar

from kvpush.protocol.errors import ProtocolError


class SendState(StrEnum):
    """P's side of one (transfer, consumer)."""

    WAITING = "waiting"  # for the registration, or for blocks
    STREAMING = "streaming"  # some pieces are posted, more will come
    DRAINING = "draining"  # all pieces are posted, not all have landed
    COMMITTED = "committed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class SendEvent(StrEnum):
    POST = "post"  # a piece that is not the last was posted
    POST_LAST = "post_last"  # the last piece was posted
    DRAINED = "drained"  # every posted piece has landed
    PREEMPT = "preempt"  # the source blocks are gone while nothing reads them; what has landed stays landed
    UNPOST = "unpost"  # a piece was not posted after all: its blocks had been preempted
    RESTART = "restart"  # D registered again with a higher attempt
    CANCEL = "cancel"
    FAIL = "fail"


class ReceiveState(StrEnum):
    """D's side of one request."""

    ANNOUNCED = "announced"  # no blocks yet
    REGISTERED = "registered"
    ACCEPTED = "accepted"
    RECEIVING = "receiving"  # at least one of the ranks has committed
    RECEIVED = "received"
    FAILING = "failing"  # the engine knows, the memory is held
    QUARANTINED = "quarantined"  # the writer does not answer and may still write
    FAILED = "failed"  # the memory is free


class ReceiveEvent(StrEnum):
    REGISTER = "register"
    ACCEPT = "accept"
    COMMIT = "commit"  # one rank committed
    COMPLETE = "complete"  # every rank has committed and every check passed
    RESTART = "restart"
    FAIL = "fail"  # will not arrive: failed at P, timed out, or cancelled here
    QUIET_TIMEOUT = "quiet_timeout"
    QUIET = "quiet"  # every rank is quiet, or proven gone
    EXPIRE = "expire"  # given back without proof, because the configuration says so


_S, _E = SendState, SendEvent
SEND_TRANSITIONS: Mapping[tuple[SendState, SendEvent], SendState] = {
    (_S.WAITING, _E.POST): _S.STREAMING,
    (_S.WAITING, _E.POST_LAST): _S.DRAINING,
    (_S.WAITING, _E.PREEMPT): _S.WAITING,
    (_S.WAITING, _E.UNPOST): _S.WAITING,
    (_S.WAITING, _E.RESTART): _S.WAITING,
    (_S.WAITING, _E.CANCEL): _S.CANCELLED,
    (_S.WAITING, _E.FAIL): _S.FAILED,
    (_S.STREAMING, _E.POST): _S.STREAMING,
    (_S.STREAMING, _E.POST_LAST): _S.DRAINING,
    (_S.STREAMING, _E.PREEMPT): _S.WAITING,
    (_S.STREAMING, _E.UNPOST): _S.WAITING,
    (_S.STREAMING, _E.RESTART): _S.WAITING,
    (_S.STREAMING, _E.CANCEL): _S.CANCELLED,
    (_S.STREAMING, _E.FAIL): _S.FAILED,
    (_S.DRAINING, _E.DRAINED): _S.COMMITTED,
    (_S.DRAINING, _E.PREEMPT): _S.DRAINING,  # all that is owed stands in staging memory
    (_S.DRAINING, _E.UNPOST): _S.WAITING,
    (_S.DRAINING, _E.RESTART): _S.WAITING,
    (_S.DRAINING, _E.CANCEL): _S.CANCELLED,
    (_S.DRAINING, _E.FAIL): _S.FAILED,
}

_R, _V = ReceiveState, ReceiveEvent
RECEIVE_TRANSITIONS: Mapping[tuple[ReceiveState, ReceiveEvent], ReceiveState] = {
    (_R.ANNOUNCED, _V.REGISTER): _R.REGISTERED,
    (_R.REGISTERED, _V.ACCEPT): _R.ACCEPTED,
    (_R.REGISTERED, _V.COMMIT): _R.RECEIVING,  # messages may overtake each other
    (_R.REGISTERED, _V.RESTART): _R.REGISTERED,
    (_R.REGISTERED, _V.FAIL): _R.FAILING,
    (_R.ACCEPTED, _V.COMMIT): _R.RECEIVING,
    (_R.ACCEPTED, _V.RESTART): _R.REGISTERED,
    (_R.ACCEPTED, _V.FAIL): _R.FAILING,
    (_R.RECEIVING, _V.COMMIT): _R.RECEIVING,
    (_R.RECEIVING, _V.COMPLETE): _R.RECEIVED,
    (_R.RECEIVING, _V.RESTART): _R.REGISTERED,
    (_R.RECEIVING, _V.FAIL): _R.FAILING,
    (_R.FAILING, _V.QUIET_TIMEOUT): _R.QUARANTINED,
    (_R.FAILING, _V.QUIET): _R.FAILED,
    (_R.QUARANTINED, _V.QUIET): _R.FAILED,
    (_R.QUARANTINED, _V.EXPIRE): _R.FAILED,
}

SEND_TERMINAL = frozenset({_S.COMMITTED, _S.FAILED, _S.CANCELLED})
RECEIVE_TERMINAL = frozenset({_R.RECEIVED, _R.FAILED})

StateT = TypeVar("StateT", SendState, ReceiveState)
EventT = TypeVar("EventT", SendEvent, ReceiveEvent)


def step(
    table: Mapping[tuple[StateT, EventT], StateT], state: StateT, event: EventT, fault: Literal["peer", "local"]
) -> StateT:
    """The state after `event`. Raises ProtocolError, naming whose fault it is, if the table has no such transition."""
    try:
        return table[state, event]
    except KeyError:
        raise ProtocolError(fault, f"{event.value} is not possible in state {state.value}") from None
