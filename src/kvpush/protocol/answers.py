"""P's answers to D's messages. Nothing here trusts an order: any message may come late, early, twice or never."""

from __future__ import annotations

from kvpush.protocol.actions import Action, SendTo
from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import AgentName, SendKey
from kvpush.protocol.messages import Cancel, Failed, Ping, Pong, Quiet, Register, Release
from kvpush.protocol.peers import Peers
from kvpush.protocol.registration import Assembly
from kvpush.protocol.rendezvous import HeldRelease, Rendezvous
from kvpush.protocol.send_table import SendTable
from kvpush.protocol.tombstones import Tombstone, Tombstones


class Answers:
    """Turns registrations, cancellations, releases and pings into steps of the tables of one P rank."""

    def __init__(
        self, rendezvous: Rendezvous, tombstones: Tombstones, peers: Peers, assembly: Assembly, sends: SendTable
    ) -> None:
        self._rendezvous = rendezvous
        self._tombstones = tombstones
        self._peers = peers
        self._assembly = assembly
        self._sends = sends

    def register(self, agent: AgentName, message: Register, now_s: float) -> list[Action]:
        key, attempt = message.key, message.attempt
        send, held = self._sends.get(key), self._rendezvous.get_held(key)
        # First what is alive: a copy of its registration must never be told that it is over.
        if send is not None and send.agent == agent and attempt <= send.attempt:
            return self._sends.status(send) if attempt == send.attempt else []
        if held is not None and held.agent == agent and attempt <= held.attempt:
            return []
        if self._tombstones.covers(key, agent, attempt):
            return self._over(agent, message)
        registration = self._assembly.add(agent, message, now_s)
        if registration is None:
            return []
        self._peers.watch(agent, now_s)
        if send is not None and send.agent == agent:
            return self._sends.register_again(send, registration, now_s)
        local = self._rendezvous.local(key.transfer_id)
        if send is not None and (local is None or send.local is not local):
            # What is left of another incarnation's send, of a request that is gone, still has the key.
            return self._sends.refuse(registration, "duplicate", now_s)
        if local is not None:
            return self._sends.match(local, registration, now_s)
        closed = self._tombstones.closed(key.transfer_id)
        if closed:
            return self._sends.refuse(registration, closed, now_s)
        reason = self._rendezvous.hold(registration)
        if reason:
            return self._sends.refuse(registration, reason, now_s)
        return self._peers.connect(registration, now_s)

    def cancel(self, agent: AgentName, message: Cancel, now_s: float) -> list[Action]:
        key, attempt = message.key, message.attempt
        self._assembly.drop(agent, key, attempt)
        send = self._sends.get(key)
        if send is not None and send.agent == agent:
            if attempt < send.attempt:
                return []  # D has registered again since
            send.cover(attempt)
            return self._sends.cancel(send, now_s)
        held = self._rendezvous.get_held(key)
        if held is not None and held.agent == agent:
            if attempt < held.attempt:
                return []
            self._rendezvous.drop_held(key)
            self._hold_release(HeldRelease(key, attempt, all_consumers=False, since_s=now_s, cancelled=held))
        quiet = Quiet(key, attempt)
        stone = self._tombstones.get(key, agent)
        if stone is None or stone.attempt < attempt:
            # Also for what we never heard of: the registration may still be on its way.
            self._tombstones.put(Tombstone(key, attempt, agent, message.sender, "cancelled", quiet, now_s))
        return [SendTo(message.sender, quiet, agent)]

    def release(self, agent: AgentName, message: Release, now_s: float) -> list[Action]:
        key = message.key
        if self._tombstones.covers(key, agent, message.attempt):
            return []  # a copy, or of an earlier use of the transfer id
        if self._rendezvous.get_held(key) is not None:
            raise ProtocolError("peer", f"release of {key}, which is registered")
        local = self._rendezvous.local(key.transfer_id)
        if local is not None:
            local.claims.release(key.consumer)
            if message.all_consumers:
                local.claims.release_others(but=set())
        elif not self._tombstones.closed(key.transfer_id):
            self._rendezvous.hold_release(HeldRelease(key, message.attempt, message.all_consumers, now_s))
        stone = Tombstone(key, message.attempt, agent, message.sender, "released", None, now_s)
        self._tombstones.put(stone)
        return [] if local is None else self._sends.settle(local)

    def ping(self, agent: AgentName, message: Ping, now_s: float) -> list[Action]:
        known: list[SendKey] = []
        actions: list[Action] = []
        for lease in message.registered:
            key = lease.key
            send, held = self._sends.get(key), self._rendezvous.get_held(key)
            stone = self._tombstones.get(key, agent)
            if send is not None and send.agent == agent and lease.attempt <= send.attempt:
                actions += self._sends.status(send)
            elif held is not None and held.agent == agent and lease.attempt <= held.attempt:
                pass
            elif stone is not None and lease.attempt <= stone.attempt:
                actions += self._repeat(stone)
            else:
                continue
            known.append(key)
        for transfer_id in message.announced:
            self._rendezvous.announce(transfer_id, agent, now_s)  # a full table is no reason to fall silent
        return [*actions, SendTo(message.sender, Pong(message.seq, known), agent)]

    def _over(self, agent: AgentName, message: Register) -> list[Action]:
        """A registration whose attempt has ended before it came, or a copy of one."""
        stone = self._tombstones.get(message.key, agent)
        if stone is None or stone.attempt < message.attempt:
            return [SendTo(message.sender, Failed(message.key, message.attempt, "stale", quiet=True), agent)]
        actions = self._repeat(stone)
        local = self._rendezvous.local(message.key.transfer_id)
        # Cancelled while its request was here and before it came itself: that consumer needs nothing any more.
        if local is None or stone.reason != "cancelled" or stone.since_s < local.known_s:
            return actions
        local.take_back(message.key, message.prompt, message.sender, message.targets)
        return actions + self._sends.settle(local)

    def _hold_release(self, release: HeldRelease) -> None:
        try:
            self._rendezvous.hold_release(release)
        except ProtocolError:
            pass  # the request will have to wait for its bound

    @staticmethod
    def _repeat(stone: Tombstone) -> list[Action]:
        return [] if stone.last is None else [SendTo(stone.address, stone.last, stone.agent)]
