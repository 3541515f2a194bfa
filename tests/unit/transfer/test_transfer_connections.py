"""Connections: dialled on demand, reused, remade, and what becomes of the messages that wait for them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from transfer_world import identity

from kvpush.plan.geometry import CacheGeometry
from kvpush.protocol.ids import AgentName, PeerAddress, SendKey, TransferId
from kvpush.protocol.messages import Announce, Cancel, Message, Ping, Register, encode
from kvpush.protocol.timing import Timing
from kvpush.transfer import connections as module
from kvpush.transfer import unreachable as unreachable_module
from kvpush.transfer.connections import Connected, Connections, Delivered, Disconnected, Undelivered, Unreachable
from kvpush.transfer.counters import Counters
from kvpush.transfer.dialer import Answer, Dialed
from kvpush.transfer.sidechannel import ProcessIdentity
from kvpush.transport.base import TransportError

pytestmark = pytest.mark.unit

HERE, THERE, OTHER = PeerAddress("here", 1), PeerAddress("there", 1), PeerAddress("other", 1)
A, B = AgentName("a"), AgentName("b")
GEOMETRY = CacheGeometry((4096,), 64, 64, 16, 16, 8, 1, 4)
HELLO = Ping(0, HERE)


class Wire:
    """A transport of which only connections and messages are used."""

    def __init__(self) -> None:
        self.connected: set[str] = set()
        self.sent: list[tuple[str, bytes]] = []
        self.broken: set[str] = set()
        self.refused: set[str] = set()
        self.break_after = -1

    def connect(self, metadata: bytes) -> str:
        name = metadata.decode()
        if name in self.refused:
            raise TransportError(f"{name} is refused", name)
        self.connected.add(name)
        return name

    def disconnect(self, peer: str) -> None:
        self.connected.discard(peer)

    def notify(self, peer: str, payload: bytes) -> None:
        if self.break_after == len(self.sent):
            self.broken.add(peer)
        if peer not in self.connected or peer in self.broken:
            raise TransportError(f"lost {peer}", peer)
        self.sent.append((peer, payload))


class Phone:
    """A dialer that answers when the test says so."""

    def __init__(self) -> None:
        self.dialed: list[PeerAddress] = []
        self.ended: list[Dialed] = []

    def dial(self, address: PeerAddress) -> None:
        self.dialed.append(address)

    def take(self) -> list[Dialed]:
        ended, self.ended = self.ended, []
        return ended

    def close(self) -> None: ...


class Case:
    def __init__(self) -> None:
        self.wire, self.phone, self.counters = Wire(), Phone(), Counters()
        self.unwanted: list[Message] = []
        self.needed: set[AgentName] = set()
        self.asked: set[AgentName] = set()
        self.connections = Connections(
            self.wire,  # type: ignore[arg-type]
            self.phone,
            self.counters,
            lambda message: message not in self.unwanted,
            lambda agent: agent in self.needed,
            lambda agent: agent in self.asked,
            HELLO,
            Timing(),
        )

    def answer(
        self, address: PeerAddress, agent: str, engine_id: str = "engine", metadata: str | None = None
    ) -> list[object]:
        """The handshake with an address ends well; returns the events."""
        process = ProcessIdentity(host_id="h", pid=1, pid_start=1)
        answer = Answer(engine_id, agent, (metadata or agent).encode(), GEOMETRY, process)
        self.phone.ended.append(Dialed(address, answer))
        self.connections.poll()
        return self.take()

    def refuse(self, address: PeerAddress, error: str = "handshake timeout: nobody") -> list[object]:
        self.phone.ended.append(Dialed(address, None, error))
        self.connections.poll()
        return self.take()

    def take(self) -> list[object]:
        return list(self.connections.take())

    def sent(self, agent: str) -> list[bytes]:
        return [payload for to, payload in self.wire.sent if to == agent]


@pytest.fixture
def case() -> Case:
    return Case()


def _message(name: str = "t") -> Announce:
    return Announce(TransferId(name), identity("p", 4), HERE)


def _cancel() -> Cancel:
    return Cancel(SendKey(TransferId("t"), 0), 1, HERE)


def _register(name: str = "t", blocks: Sequence[bytes] = (b"\x00",)) -> Register:
    return Register(SendKey(TransferId(name), 0), 1, identity("p", 4), 0, list(blocks), HERE)


def test_a_message_waits_for_the_handshake_and_leaves_after_it(case: Case) -> None:
    case.connections.send(THERE, _message("1"), None)
    case.connections.send(THERE, _message("2"), None)
    assert case.take() == []
    assert case.phone.dialed == [THERE]
    assert case.connections.dialing
    assert case.answer(THERE, A) == [Delivered(THERE, A, _message("1")), Delivered(THERE, A, _message("2"))]
    assert case.sent(A) == [encode(_message("1")), encode(_message("2"))]
    assert not case.connections.dialing
    assert case.counters.get("messages_sent", "announce") == 2


def test_a_connection_is_reused(case: Case) -> None:
    case.connections.send(THERE, _message("1"), None)
    case.answer(THERE, A)
    case.connections.send(THERE, _message("2"), None)
    case.connections.connect(THERE, A)
    assert case.take() == [Delivered(THERE, A, _message("2")), Connected(A)]
    assert case.phone.dialed == [THERE]
    answer = case.connections.answer(A)
    assert answer is not None
    assert answer.geometry == GEOMETRY
    assert case.connections.answer(B) is None


def test_a_refused_handshake_tells_all_who_waited_and_the_next_use_dials_again(case: Case) -> None:
    case.connections.connect(THERE, A)
    case.connections.send(THERE, _message(), None)
    error = "handshake refused: nobody"
    assert case.refuse(THERE, error) == [Unreachable(A, error), Undelivered(THERE, _message(), error)]
    assert case.counters.get("handshakes_failed", "handshake refused") == 1
    case.connections.send(THERE, _message(), None)
    assert case.phone.dialed == [THERE, THERE]


def test_a_peer_that_the_transport_refuses_is_unreachable(case: Case) -> None:
    case.wire.refused.add(A)
    case.connections.connect(THERE, A)
    [event] = case.answer(THERE, A)
    assert isinstance(event, Unreachable)
    assert event.reason.startswith("connect failed")


def test_metadata_of_another_agent_than_was_named_is_refused(case: Case) -> None:
    case.connections.send(THERE, _message(), None)
    [event] = case.answer(THERE, A, metadata=B)
    assert isinstance(event, Undelivered)
    assert "its metadata says b" in event.reason
    assert case.wire.connected == set()


def test_only_the_incarnation_that_was_meant_gets_a_message(case: Case) -> None:
    case.connections.connect(THERE, A)
    case.connections.send(THERE, _cancel(), A)
    assert case.answer(THERE, B) == [
        Unreachable(A, "peer_restarted"),
        Undelivered(THERE, _cancel(), "peer_restarted"),
    ]
    case.connections.send(THERE, _cancel(), A)
    assert case.take() == []  # A may have come back: who is there is asked again
    assert case.answer(THERE, B) == [Undelivered(THERE, _cancel(), "peer_restarted")]
    assert case.sent(B) == []


def test_who_has_taken_the_place_of_an_idle_peer_gets_its_answers(case: Case) -> None:
    """A restarted peer asks, and we still hold the connection to its predecessor: nothing has told us of its end."""
    case.connections.send(THERE, _message(), None)
    case.answer(THERE, A)
    case.connections.send(THERE, _cancel(), B)
    assert case.phone.dialed == [THERE, THERE]
    events = case.answer(THERE, B)
    assert Disconnected(A, f"peer_restarted: {THERE} is {B} now") in events
    assert Delivered(THERE, B, _cancel()) in events
    assert len(case.sent(B)) == 1
    # What is meant for the old one is not delivered, and costs no handshake: it has been replaced.
    case.connections.send(THERE, _cancel(), A)
    assert case.take() == [Undelivered(THERE, _cancel(), "peer_restarted")]
    assert case.phone.dialed == [THERE, THERE]


def test_a_peer_that_restarted_under_its_address_takes_the_place_of_the_old_one(case: Case) -> None:
    case.connections.send(THERE, _message(), None)
    case.answer(THERE, A)
    case.connections.connect(THERE, B)
    events = case.answer(THERE, B)
    assert [type(event) for event in events] == [Disconnected, Connected]
    assert case.wire.connected == {B}
    assert case.counters.get("disconnects", "peer_restarted") == 1
    case.connections.send(THERE, _message("2"), None)
    assert case.take() == [Delivered(THERE, B, _message("2"))]


def test_a_stale_connection_is_found_by_its_first_message_which_is_not_lost(case: Case) -> None:
    case.connections.send(THERE, _message("1"), None)
    case.answer(THERE, A)
    case.wire.broken.add(A)
    case.connections.send(THERE, _message("2"), None)
    [event] = case.take()
    assert isinstance(event, Disconnected)
    assert case.answer(THERE, B) == [Delivered(THERE, B, _message("2"))]


def test_a_connection_that_breaks_in_the_middle_of_the_queue_loses_the_rest_visibly(case: Case) -> None:
    for name in ("1", "2", "3"):
        case.connections.send(THERE, _message(name), None)
    case.wire.break_after = 1
    events = case.answer(THERE, A)
    assert events[0] == Delivered(THERE, A, _message("1"))
    assert isinstance(events[1], Disconnected)
    assert events[2:] == [
        Undelivered(THERE, _message("2"), "disconnected"),
        Undelivered(THERE, _message("3"), "disconnected"),
    ]


def test_a_message_that_is_not_wanted_any_more_does_not_leave(case: Case) -> None:
    case.connections.send(THERE, _message("1"), None)
    case.connections.send(THERE, _message("2"), None)
    case.unwanted.append(_message("1"))
    assert case.answer(THERE, A) == [
        Undelivered(THERE, _message("1"), "given up"),
        Delivered(THERE, A, _message("2")),
    ]
    assert len(case.wire.sent) == 1


def test_a_dead_address_cannot_collect_memory(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    for i in range(5):
        case.connections.send(THERE, _message(str(i)), None)
    assert [type(event) for event in case.take()] == [Undelivered, Undelivered]
    assert len(case.refuse(THERE)) == 3


def test_a_message_that_cannot_be_encoded_is_dropped_and_nothing_else(case: Case) -> None:
    case.connections.send(THERE, _message("1"), None)
    case.answer(THERE, A)
    case.connections.heard(A)
    too_long = _register(blocks=[b"x" * 70_000])
    case.connections.send(THERE, too_long, None)
    assert case.take() == [Undelivered(THERE, too_long, "too_long")]
    case.connections.send(THERE, _message("2"), None)
    assert case.take() == [Delivered(THERE, A, _message("2"))]


def test_a_connected_incarnation_is_reached_while_its_address_is_being_dialled(case: Case) -> None:
    case.connections.send(THERE, _message(), None)
    case.answer(THERE, A)
    case.connections.connect(THERE, B)
    case.connections.send(THERE, _cancel(), A)
    assert case.take() == [Delivered(THERE, A, _cancel())]
    case.connections.send(THERE, _message("2"), None)
    assert case.take() == []  # who is there now will be known soon


def test_one_peer_under_two_addresses_is_one_connection(case: Case) -> None:
    for address in (THERE, OTHER):
        case.connections.send(address, _message(), None)
        case.answer(address, A)
    case.connections.drop(A, "gone: for good")
    [event] = case.take()
    assert event == Disconnected(A, "gone: for good")
    for address in (THERE, OTHER):
        case.connections.send(address, _message("2"), None)
    assert case.phone.dialed == [THERE, OTHER, THERE, OTHER]
    assert case.counters.get("notify_failed") == 0


def test_dropping_what_is_not_connected_does_nothing(case: Case) -> None:
    case.connections.drop(A, "gone")
    assert case.take() == []
    assert case.counters.total("disconnects") == 0


# Engine ids


def test_a_message_for_another_engine_asks_again_who_is_there(case: Case) -> None:
    case.connections.send(THERE, _message("1"), None)
    case.answer(THERE, A, "one")
    case.connections.send(THERE, _message("2"), None, "two")
    assert case.phone.dialed == [THERE, THERE]
    [event] = case.answer(THERE, A, "one")
    assert isinstance(event, Undelivered)
    assert event.reason == f"handshake wrong_engine: {THERE} is engine one, two was expected there"
    assert case.wire.connected == {A}  # who uses the connection rightly keeps it
    assert case.connections.answer(A) is not None


def test_a_message_for_the_engine_that_has_come_since_is_delivered(case: Case) -> None:
    case.connections.send(THERE, _message("1"), None)
    case.answer(THERE, A, "one")
    case.connections.send(THERE, _message("2"), None, "two")
    events = case.answer(THERE, B, "two")
    assert isinstance(events[0], Disconnected)
    assert events[1] == Delivered(THERE, B, _message("2"))


def test_an_engine_id_concerns_its_own_message_only(case: Case) -> None:
    case.connections.send(THERE, _message("1"), None, "two")
    case.connections.send(THERE, _message("2"), None, "one")
    case.connections.send(THERE, _message("3"), None)
    wrong, right, any_of_them = case.answer(THERE, A, "one")
    assert isinstance(wrong, Undelivered)
    assert right == Delivered(THERE, A, _message("2"))
    assert any_of_them == Delivered(THERE, A, _message("3"))
    case.connections.send(THERE, _message("4"), None, "one")
    assert case.take() == [Delivered(THERE, A, _message("4"))]


# Registrations


def test_a_registration_waits_until_its_peer_has_said_something(case: Case) -> None:
    case.connections.send(THERE, _register("1"), None)
    assert case.answer(THERE, A) == [Delivered(THERE, A, HELLO)]
    case.connections.send(THERE, _register("2"), None)
    assert case.sent(A) == [encode(HELLO)]
    assert case.connections.dialing
    case.connections.heard(B)
    assert case.take() == []
    case.connections.heard(A)
    assert case.take() == [Delivered(THERE, A, _register("1")), Delivered(THERE, A, _register("2"))]
    assert not case.connections.dialing
    case.connections.send(THERE, _register("3"), None)
    assert case.take() == [Delivered(THERE, A, _register("3"))]


def test_a_registration_that_is_given_up_meanwhile_never_leaves(case: Case) -> None:
    case.connections.send(THERE, _register("1"), None)
    case.connections.send(THERE, _register("2"), None)
    case.answer(THERE, A)
    case.connections.tick(0.0)
    assert case.take() == []
    case.unwanted.append(_register("1"))
    case.connections.tick(0.0)
    assert case.take() == [Undelivered(THERE, _register("1"), "given up")]
    case.unwanted.append(_register("2"))
    case.connections.heard(A)
    assert case.take() == [Undelivered(THERE, _register("2"), "given up")]
    assert case.sent(A) == [encode(HELLO)]
    assert not case.connections.dialing


def test_held_registrations_do_not_outlive_the_connection(case: Case) -> None:
    case.connections.send(THERE, _register(), None)
    case.answer(THERE, A)
    case.connections.drop(A, "disconnected")
    events = case.take()
    assert Undelivered(THERE, _register(), "disconnected") in events
    assert not case.connections.dialing
    case.connections.heard(A)  # late
    case.connections.send(THERE, _register(), None)
    assert case.answer(THERE, A) == [Delivered(THERE, A, HELLO)]  # a new connection must show itself again


def test_a_new_connection_to_a_peer_that_was_heard_must_show_itself_again(case: Case) -> None:
    case.connections.send(THERE, _message(), None)
    case.answer(THERE, A)
    case.connections.heard(A)
    case.connections.drop(A, "disconnected")
    case.take()
    case.connections.send(THERE, _register(), None)
    assert case.answer(THERE, A) == [Delivered(THERE, A, HELLO)]


def test_a_silent_peer_cannot_collect_memory(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.connections.send(THERE, _message(), None)
    case.answer(THERE, A)
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    for i in range(5):
        case.connections.send(THERE, _register(str(i)), None)
    assert [type(event) for event in case.take()] == [Delivered, Undelivered, Undelivered]


def test_a_hello_that_breaks_the_connection_loses_the_registration_visibly(case: Case) -> None:
    case.connections.send(THERE, _message(), None)
    case.answer(THERE, A)
    case.wire.broken.add(A)
    case.connections.send(THERE, _register(), None)
    events = case.take()
    assert Undelivered(THERE, _register(), "disconnected") in events
    assert any(isinstance(event, Disconnected) for event in events)


# Memory of incarnations


def test_incarnations_are_remembered_after_their_connection(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KNOWN", 4)
    case.needed.add(AgentName("agent0"))
    for i in range(20):
        address = PeerAddress(f"host{i}", 1)
        case.connections.send(address, _message(), None)
        case.answer(address, f"agent{i}")
        if i != 1:
            case.connections.drop(AgentName(f"agent{i}"), "disconnected")
    remembered = [i for i in range(20) if case.connections.known(AgentName(f"agent{i}")) is not None]
    assert remembered == [0, 1, 18, 19]  # needed, connected, and the last ones
    known = case.connections.known(AgentName("agent0"))
    assert known is not None
    assert known[0] == PeerAddress("host0", 1)


# Who cannot answer


def _registration(transfer: str = "t") -> Register:
    return Register(SendKey(TransferId(transfer), 0), 1, identity("p", 4), 0, [b""], HERE, 1, 1, 0, 1)


def test_a_peer_that_says_nothing_is_given_up_soon_and_the_reason_names_both_addresses(case: Case) -> None:
    case.connections.send(THERE, _registration(), None)
    assert case.answer(THERE, "a") == [Delivered(THERE, A, HELLO)]
    case.connections.tick(100.0)
    case.connections.tick(105.0)
    assert case.take() == []
    case.connections.tick(105.2)
    [event] = case.take()
    assert isinstance(event, Undelivered)
    assert event.message == _registration()
    assert event.reason.startswith("unreachable: there:1/pp0tp0 can be reached, but has said nothing for 5 s")
    assert "cannot connect to here:1, the side_channel_host" in event.reason
    assert case.counters.get("handshakes_failed", "unreachable") == 1
    assert not case.connections.dialing
    assert case.wire.connected == {"a"}  # a late answer still counts


def test_the_next_requests_fail_at_once_until_it_is_tried_again(case: Case) -> None:
    case.connections.send(THERE, _registration(), None)
    case.answer(THERE, "a")
    case.connections.tick(0.0)
    case.connections.tick(5.1)
    case.take()
    case.connections.tick(15.0)
    case.connections.send(THERE, _registration("u"), None)
    [event] = case.take()
    assert isinstance(event, Undelivered)
    assert event.reason.startswith("unreachable: ")
    ping = Ping(1, HERE, [], [])
    case.connections.send(THERE, ping, None)  # by an answer to this it would be found
    assert case.take() == [Delivered(THERE, A, ping)]
    case.connections.tick(15.2)
    case.connections.send(THERE, _registration("v"), None)
    assert case.take() == [Delivered(THERE, A, HELLO)]
    case.connections.tick(15.3)
    case.connections.tick(20.0)
    assert case.take() == []  # its time begins anew
    case.connections.heard(A)
    assert case.take() == [Delivered(THERE, A, _registration("v"))]


def test_whoever_says_something_after_all_is_reachable(case: Case) -> None:
    case.connections.send(THERE, _registration(), None)
    case.answer(THERE, "a")
    case.connections.tick(0.0)
    case.connections.tick(5.1)
    case.take()
    case.connections.heard(A)
    case.connections.send(THERE, _registration("u"), None)
    assert case.take() == [Delivered(THERE, A, _registration("u"))]


def test_an_address_where_nobody_answers_the_handshake_is_remembered_for_a_while(case: Case) -> None:
    case.connections.tick(0.0)
    case.connections.send(THERE, _registration(), None)
    [event] = case.refuse(THERE)
    assert event == Undelivered(THERE, _registration(), "handshake timeout: nobody")
    case.connections.send(THERE, HELLO, None)
    case.connections.connect(THERE, B)
    undelivered, unreachable = case.take()
    assert isinstance(undelivered, Undelivered)
    assert isinstance(unreachable, Unreachable)
    assert "can that side_channel_host be reached from here?" in undelivered.reason
    assert case.phone.dialed == [THERE]
    case.connections.tick(10.1)
    case.connections.connect(THERE, B)
    assert case.take() == []
    assert case.phone.dialed == [THERE, THERE]


def test_a_refused_handshake_costs_no_time_and_is_not_remembered(case: Case) -> None:
    case.connections.send(THERE, HELLO, None)
    case.refuse(THERE, "handshake refused: nobody listens")
    case.connections.send(THERE, HELLO, None)
    assert case.phone.dialed == [THERE, THERE]


def test_a_connection_that_breaks_meanwhile_begins_to_wait_anew(case: Case) -> None:
    case.connections.send(THERE, _registration(), None)
    case.answer(THERE, "a")
    case.connections.tick(0.0)
    case.connections.tick(4.9)
    case.connections.drop(A, "disconnected: x")
    case.connections.send(THERE, _registration(), None)
    case.answer(THERE, "a")
    case.take()
    case.connections.tick(5.1)
    case.connections.tick(10.0)
    assert case.take() == []


def test_not_more_addresses_are_remembered_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unreachable_module, "MAX_ADDRESSES", 3)
    unreachables = unreachable_module.Unreachables(10.0)
    for port in range(1, 6):
        unreachables.add(PeerAddress("x", port), f"why {port}")
    reasons = [unreachables.reason(PeerAddress("x", port)) for port in range(1, 6)]
    assert reasons == [None, None, "why 3", "why 4", "why 5"]
    unreachables.tick(10.0)
    assert unreachables.reason(PeerAddress("x", 5)) is None


# Peers that nobody misses


def _connect(case: Case, address: PeerAddress = THERE, agent: str = "a") -> None:
    case.connections.send(address, Cancel(SendKey(TransferId("t"), 0), 1, HERE), None)
    case.answer(address, agent)
    case.connections.heard(AgentName(agent))
    case.wire.sent.clear()


def test_a_peer_that_has_long_been_silent_is_asked_and_stays_if_it_answers(case: Case) -> None:
    _connect(case)
    for now_s in (0.0, 30.0):
        case.connections.tick(now_s)
    assert case.wire.sent == []
    case.connections.tick(30.1)
    assert case.sent("a") == [encode(HELLO)]
    case.connections.tick(30.2)
    case.connections.heard(A)
    case.connections.tick(60.0)
    assert case.wire.connected == {"a"}
    assert case.sent("a") == [encode(HELLO)]  # once
    case.connections.tick(60.3)
    assert case.sent("a") == [encode(HELLO)] * 2


def test_one_that_does_not_answer_is_dropped_and_nothing_is_left_of_it(case: Case) -> None:
    _connect(case)
    for now_s in (0.0, 30.1, 35.0):
        case.connections.tick(now_s)
    assert case.wire.connected == {"a"}
    case.take()
    case.connections.tick(35.2)
    assert case.wire.connected == set()
    [event] = case.take()
    assert isinstance(event, Disconnected)
    assert case.counters.get("disconnects", "idle") == 1
    case.connections.tick(35.3)
    assert case.connections.known(A) is None
    assert not case.connections._idle._heard_s
    assert not case.connections._idle._asked_s
    case.connections.send(THERE, HELLO, None)  # and it is found again if it comes back
    assert case.answer(THERE, "a") == [Delivered(THERE, A, HELLO)]


def test_one_that_is_gone_is_found_out_by_asking_it(case: Case) -> None:
    """On one machine the transport knows at once."""
    _connect(case)
    case.connections.tick(0.0)
    case.wire.broken.add("a")
    case.connections.tick(30.1)
    assert case.wire.connected == set()
    assert [type(event) for event in case.take()] == [Disconnected, Undelivered]
    case.connections.tick(36.0)
    assert case.take() == []


def test_one_that_the_protocol_asks_is_not_asked_here(case: Case) -> None:
    """It may be stopped, with memory in quarantine: its bounds are others."""
    _connect(case)
    case.asked.add(A)
    for now_s in (0.0, 31.0, 40.0, 80.0):
        case.connections.tick(now_s)
    assert case.wire.connected == {"a"}
    assert case.wire.sent == []
    case.asked.clear()
    case.connections.tick(111.0)
    assert case.sent("a") == [encode(HELLO)]


def test_one_whose_end_may_have_to_be_proven_is_remembered(case: Case) -> None:
    _connect(case)
    case.needed.add(A)
    for now_s in (0.0, 30.1, 35.2, 90.0):
        case.connections.tick(now_s)
    assert case.connections.answer(A) is None
    assert case.wire.connected == {"a"}  # whether it has ended must be seen
    assert case.connections.known(A) is not None
    case.needed.clear()
    case.connections.tick(90.1)
    assert case.wire.connected == set()
    assert case.connections.known(A) is None


def test_crash_looping_peers_leave_nothing_behind(case: Case) -> None:
    """A new incarnation every ten seconds, each at another address and each missed by nobody."""
    case.connections.tick(0.0)
    for life in range(200):
        _connect(case, PeerAddress("pod", life + 1), f"life {life}")
        case.wire.broken.add(f"life {life}")
        case.connections.tick(10.0 * (life + 1))
        case.take()
        assert len(case.wire.connected) <= 5
        assert len(case.connections._known) <= 5
