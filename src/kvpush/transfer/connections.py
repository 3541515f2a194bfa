"""Connections to peer ranks: made on demand, reused, and remade when a peer turns out to be gone or another one.

A message to a rank that is not connected waits here until the handshake has ended. A registration waits until the rank
has shown that it can answer: one that cannot (its allow list forbids it, or our host name is nothing to it) could never
say quiet, and the memory would be lost.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvpush.protocol.ids import AgentName, PeerAddress
from kvpush.protocol.messages import Message, Ping, Register, encode
from kvpush.protocol.timing import Timing
from kvpush.transfer.addresses import address_text
from kvpush.transfer.connection_events import Connected, Delivered, Disconnected, Event, Undelivered, Unreachable
from kvpush.transfer.counters import Counters
from kvpush.transfer.dialer import Answer, Dialer
from kvpush.transfer.idle import IdleWatch
from kvpush.transfer.unreachable import Unreachables
from kvpush.transport.base import Transport, TransportError

__all__ = ["Connected", "Connections", "Delivered", "Disconnected", "Event", "Undelivered", "Unreachable"]

_log = logging.getLogger(__name__)

MAX_WAITING = 4096
"""Messages that may wait for one handshake; more are refused, so that a dead address cannot collect memory."""

MAX_KNOWN = 1024
"""Incarnations that are remembered after their connection is gone."""


@dataclass(frozen=True, slots=True)
class _Queued:
    """A message that waits. agent, engine_id: who alone may get it."""

    message: Message
    agent: AgentName | None
    engine_id: str | None


@dataclass(slots=True)
class _Waiting:
    """What waits for the handshake with one address."""

    messages: deque[_Queued] = field(default_factory=deque)
    agents: set[AgentName] = field(default_factory=set)


class Connections:
    """Owned by the transfer thread. Every method returns at once; what happens comes out of `take`.

    wants_sent: asked before a message that had to wait leaves after all. needs: whether an incarnation must be
    remembered, because its end may have to be proven. asks: whether the protocol itself asks an incarnation whether it
    lives. hello: what everybody answers.
    """

    def __init__(
        self,
        transport: Transport,
        dialer: Dialer,
        counters: Counters,
        wants_sent: Callable[[Message], bool],
        needs: Callable[[AgentName], bool],
        asks: Callable[[AgentName], bool],
        hello: Ping,
        timing: Timing,
    ) -> None:
        self._transport = transport
        self._dialer = dialer
        self._counters = counters
        self._wants_sent = wants_sent
        self._needs = needs
        self._asks = asks
        self._hello = hello
        self._first_answer_s = timing.first_answer_timeout_s
        self._unreachable = Unreachables(timing.unreachable_retry_s)
        self._idle = IdleWatch(timing.idle_check_s, timing.first_answer_timeout_s)
        self._heard: set[AgentName] = set()
        self._lingering: set[AgentName] = set()  # dropped, but still connected for the transport
        self._held: dict[AgentName, list[tuple[PeerAddress, Message]]] = {}  # registrations for who was not heard yet
        self._held_s: dict[AgentName, float] = {}
        self._by_address: dict[PeerAddress, Answer] = {}
        self._by_agent: dict[AgentName, Answer] = {}
        self._known: dict[AgentName, tuple[PeerAddress, Answer]] = {}
        self._waiting: dict[PeerAddress, _Waiting] = {}
        self._events: deque[Event] = deque()

    @property
    def dialing(self) -> bool:
        """Something waits for a handshake or for a first sign of life."""
        return bool(self._waiting or self._held)

    def answer(self, agent: AgentName) -> Answer | None:
        """What the handshake said about an incarnation that is connected."""
        return self._by_agent.get(agent)

    def known(self, agent: AgentName) -> tuple[PeerAddress, Answer] | None:
        """Where an incarnation is or was, and what it said: its process is asked for if it must be proven gone."""
        return self._known.get(agent)

    def take(self) -> list[Event]:
        events = list(self._events)
        self._events.clear()
        return events

    def connect(self, address: PeerAddress, agent: AgentName) -> None:
        """Gets ready to write to an incarnation: Connected or Unreachable follows."""
        reason = self._unreachable.reason(address)
        if agent in self._by_agent:
            self._events.append(Connected(agent))
        elif reason is not None:
            self._events.append(Unreachable(agent, reason))
        else:
            self._wait(address).agents.add(agent)

    def send(
        self, address: PeerAddress, message: Message, agent: AgentName | None, engine_id: str | None = None
    ) -> None:
        """Sends, or keeps, a message: Delivered or Undelivered follows.

        agent: the only incarnation that may get it. engine_id: the only engine, as the client says; being wrong about
        that is no reason to give up a connection that others use.
        """
        if agent is not None and agent in self._by_agent:
            self._deliver(address, message, agent)
            return
        queued = _Queued(message, agent, engine_id)
        current = self._by_address.get(address)
        reason = self._unreachable.reason(address)
        if reason is not None and (current is None or isinstance(message, Register)):
            self._events.append(Undelivered(address, message, reason))
        elif current is None or address in self._waiting:
            self._keep(address, queued)
        elif agent is not None and agent in self._known:
            self._events.append(Undelivered(address, message, "peer_restarted"))  # another one has taken its place
        elif agent is not None:
            self._keep(address, queued)  # it has taken the place of the one that we know, which does not answer for it
        elif engine_id not in (None, current.engine_id):
            self._keep(address, queued)  # that engine may have taken the place: ask who is there now
        elif not self._deliver(address, message, AgentName(current.agent), final=False):
            self._keep(address, queued)  # the connection was stale: whoever is there now shall get it

    def poll(self) -> None:
        """Takes up handshakes that have ended."""
        for dialed in self._dialer.take():
            waiting = self._waiting.pop(dialed.address, None) or _Waiting()
            error = dialed.error
            if dialed.answer is not None:
                error = self._join(dialed.address, dialed.answer)
            if error:
                self._refuse(dialed.address, waiting, error)
            else:
                assert dialed.answer is not None
                self._flush(dialed.address, waiting, dialed.answer)

    def heard(self, agent: AgentName) -> None:
        """A message has come from a rank: it can answer."""
        self._idle.heard(agent)
        if agent in self._by_agent and agent not in self._heard:
            self._heard.add(agent)
            for address in self._addresses(agent):
                self._unreachable.forget(address)
            self._send_held(agent)

    def tick(self, now_s: float) -> None:
        """Lets go of what waits for a sign of life and is not wanted any more, or has waited for too long, and of peers
        that are gone and were missed by nobody."""
        self._unreachable.tick(now_s)
        self._held_s = {agent: self._held_s.get(agent, now_s) for agent in self._held}
        for agent, held in list(self._held.items()):
            if now_s - self._held_s[agent] > self._first_answer_s:
                self._give_up(agent)
            elif not all(self._wants_sent(message) for _, message in held):
                self._send_held(agent)
        self._check_idle(now_s)
        for agent in [agent for agent in self._lingering if not self._needs(agent)]:
            self._lingering.discard(agent)
            if agent not in self._by_agent:
                self._transport.disconnect(agent)
        for agent in [agent for agent in self._known if agent not in self._by_agent]:
            if not self._needs(agent):
                del self._known[agent]

    def drop(self, agent: AgentName, reason: str) -> None:
        """Forgets a connection, so that the next use makes a new one."""
        if self._by_agent.pop(agent, None) is None:
            return
        self._idle.forget(agent)
        addresses = self._addresses(agent)
        for address in addresses:
            del self._by_address[address]
        self._heard.discard(agent)
        held = self._unhold(agent)
        self._events += [Undelivered(address, message, "disconnected") for address, message in held]
        if self._needs(agent):
            self._lingering.add(agent)  # it may still write here: whether its connection has ended must be seen
        else:
            self._transport.disconnect(agent)
        self._counters.add("disconnects", reason.split(":")[0])
        where = ", ".join(str(address) for address in addresses)
        _log.warning("kvpush: connection to %s (%s) dropped: %s", where, agent, reason)
        self._events.append(Disconnected(agent, reason))

    def _check_idle(self, now_s: float) -> None:
        """Asks those who have long been silent, and drops who does not answer, unless the protocol asks them anyway."""
        ask, dead = self._idle.tick(self._by_agent, now_s)
        for agent in [agent for agent in (*ask, *dead) if self._asks(agent)]:
            self._idle.heard(agent)
        for agent in ask:
            if not self._asks(agent):
                self._deliver(self._known[agent][0], self._hello, agent)
        for agent in dead:
            if not self._asks(agent):
                self.drop(agent, "idle: it has said nothing for long, and does not answer")

    def _addresses(self, agent: AgentName) -> list[PeerAddress]:
        """Where an incarnation is known; it may have several addresses, as a host has more than one name."""
        return [address for address, answer in self._by_address.items() if answer.agent == agent]

    def _give_up(self, agent: AgentName) -> None:
        """A peer has answered the handshake and says nothing: as a rule its answers do not find the way here."""
        here = address_text(self._hello.sender.host, self._hello.sender.port)
        for address in dict.fromkeys([*self._addresses(agent), *(address for address, _ in self._held[agent])]):
            error = (
                f"unreachable: {address} can be reached, but has said nothing for {self._first_answer_s:g} s. Probably "
                f"it cannot connect to {here}, the side_channel_host and side_channel_port of this engine, or its "
                f"allowed_hosts forbid that; its log tells"
            )
            self._counters.add("handshakes_failed", "unreachable")
            _log.warning("kvpush: %s", error)
            self._unreachable.add(address, error)
        held = self._unhold(agent)
        self._events += [
            Undelivered(address, message, self._unreachable.reason(address) or "unreachable")
            for address, message in held
        ]

    def _wait(self, address: PeerAddress) -> _Waiting:
        waiting = self._waiting.get(address)
        if waiting is None:
            waiting = self._waiting[address] = _Waiting()
            self._dialer.dial(address)
        return waiting

    def _keep(self, address: PeerAddress, queued: _Queued) -> None:
        waiting = self._wait(address)
        if len(waiting.messages) >= MAX_WAITING:
            self._events.append(Undelivered(address, queued.message, "too many messages wait for the handshake"))
        else:
            waiting.messages.append(queued)

    def _join(self, address: PeerAddress, answer: Answer) -> str:
        """Connects to who answered; returns why that was not possible, or ""."""
        agent = AgentName(answer.agent)
        old = self._by_address.get(address)
        if old is not None and old.agent != answer.agent:
            self.drop(AgentName(old.agent), f"peer_restarted: {address} is {answer.agent} now")
        try:
            name = self._transport.connect(answer.metadata)
        except TransportError as error:
            return f"connect failed: {error}"
        if name != agent:
            self._transport.disconnect(name)
            return f"handshake refused: {address} says that it is {agent}, its metadata says {name}"
        self._by_address[address] = self._by_agent[agent] = answer
        self._remember(agent, address, answer)
        _log.info("kvpush: connected to engine %s at %s (%s)", answer.engine_id, address, agent)
        return ""

    def _remember(self, agent: AgentName, address: PeerAddress, answer: Answer) -> None:
        self._known.pop(agent, None)
        self._known[agent] = (address, answer)
        if len(self._known) > MAX_KNOWN:
            spare = (old for old in self._known if old not in self._by_agent and not self._needs(old))
            forgotten = next(spare, None)
            if forgotten is not None:
                del self._known[forgotten]

    def _refuse(self, address: PeerAddress, waiting: _Waiting, error: str) -> None:
        self._counters.add("handshakes_failed", error.split(":")[0])
        _log.warning("kvpush: no connection to %s: %s", address, error)
        if error.startswith("handshake timeout"):
            self._unreachable.add(address, f"{error}; can that side_channel_host be reached from here?")
        self._events += [Unreachable(agent, error) for agent in waiting.agents]
        self._events += [Undelivered(address, queued.message, error) for queued in waiting.messages]

    def _flush(self, address: PeerAddress, waiting: _Waiting, answer: Answer) -> None:
        found = AgentName(answer.agent)
        for wanted in waiting.agents:
            fits = wanted == found
            self._events.append(Connected(wanted) if fits else Unreachable(wanted, "peer_restarted"))
        for queued in waiting.messages:
            message = queued.message
            if not self._wants_sent(message):
                self._events.append(Undelivered(address, message, "given up"))
            elif queued.agent not in (None, found):
                self._events.append(Undelivered(address, message, "peer_restarted"))
            elif queued.engine_id not in (None, answer.engine_id):
                self._counters.add("handshakes_failed", "handshake wrong_engine")
                error = f"{address} is engine {answer.engine_id}, {queued.engine_id} was expected there"
                _log.warning("kvpush: handshake wrong_engine: %s", error)
                self._events.append(Undelivered(address, message, f"handshake wrong_engine: {error}"))
            elif found not in self._by_agent:
                self._events.append(Undelivered(address, message, "disconnected"))  # broke in the middle of the queue
            else:
                self._deliver(address, message, found)

    def _send_held(self, agent: AgentName) -> None:
        """Tries again to send what was held back; what still has to wait is held again."""
        held_s = self._held_s.get(agent)
        for address, message in self._unhold(agent):
            if not self._wants_sent(message):
                self._events.append(Undelivered(address, message, "given up"))
            elif agent not in self._by_agent:
                self._events.append(Undelivered(address, message, "disconnected"))
            elif agent in self._heard:
                self._deliver(address, message, agent)
            else:
                self._held.setdefault(agent, []).append((address, message))
                if held_s is not None:
                    self._held_s[agent] = held_s

    def _unhold(self, agent: AgentName) -> list[tuple[PeerAddress, Message]]:
        """What waited for an incarnation's first sign of life, and waits no more."""
        self._held_s.pop(agent, None)
        return self._held.pop(agent, [])

    def _hold(self, address: PeerAddress, message: Message, agent: AgentName) -> None:
        held = self._held.setdefault(agent, [])
        if len(held) >= MAX_WAITING:
            self._events.append(Undelivered(address, message, "too many messages wait for a sign of life"))
            return
        held.append((address, message))
        if len(held) == 1:
            self._deliver(address, self._hello, agent)

    def _deliver(self, address: PeerAddress, message: Message, agent: AgentName, *, final: bool = True) -> bool:
        """Sends over an existing connection; one that breaks is dropped, and the message is lost if `final`."""
        if isinstance(message, Register) and agent not in self._heard:
            self._hold(address, message, agent)
            return True
        try:
            self._transport.notify(agent, encode(message))
        except ValueError as error:
            self._counters.add("messages_dropped", "too_long")
            _log.error("kvpush: %s", error)
            self._events.append(Undelivered(address, message, "too_long"))
            return True
        except TransportError as error:
            self._counters.add("notify_failed")
            self.drop(agent, f"disconnected: {error}")
            if final:
                self._events.append(Undelivered(address, message, "disconnected"))
            return False
        self._counters.add("messages_sent", type(message).__name__.lower())
        self._events.append(Delivered(address, agent, message))
        return True
