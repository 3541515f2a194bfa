"""Carries out what the machines of a simulated world ask for: messages over a bad network, writes, connections."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from protocol_world_parts import ConsumerNode, Node, ProducerNode, Write

from kvpush.protocol import actions as act
from kvpush.protocol.errors import ProtocolError
from kvpush.protocol.ids import RequestId
from kvpush.protocol.messages import Message, PieceDigest, decode, encode

if TYPE_CHECKING:
    from protocol_world import World


class Fabric:
    """What a transfer thread and its transport do, with the faults that the world draws."""

    def __init__(self, world: World) -> None:
        self.world = world

    def do(self, node: Node, wanted: Iterable[act.Action]) -> None:
        queue = deque(wanted)
        while queue:
            action = queue.popleft()
            self.world.note(" ", node.agent, action)
            match action:
                case act.SendTo():
                    connect_s = self.world.random.choice([0.0, 0.0, 0.0, 0.3]) if self.world.slow else 0.0
                    self.world.later(connect_s, lambda action=action: self.leave(node, action))  # type: ignore[misc]
                case act.Connect():
                    self.world.later(
                        self.world.random.choice([0.0, 0.05, 0.5]), lambda action=action: self.connect(node, action)
                    )  # type: ignore[misc]
                case act.WritePiece():
                    assert isinstance(node, ProducerNode)
                    queue.extendleft(reversed(self.post(node, action)))
                case act.Verify():
                    self.world.seen["verified"] += 1
                    request_id = action.request_id
                    self.world.later(self.world.random.choice([0.0, 0.3]), lambda r=request_id: self.verified(node, r))  # type: ignore[misc]
                case act.ReportSent():
                    self.world.referee.on_sent(node, action)
                case act.SendEnded():
                    self.world.referee.on_ended(node, action)
                case act.ReportReceived() | act.ReportFailed() | act.ReportReleased():
                    self.world.referee.on_report(node, action)
                case act.Quarantined():
                    self.world.seen["quarantined"] += 1
                case act.TransferUnknown():
                    self.world.seen[action.reason] += 1

    def leave(self, node: Node, action: act.SendTo) -> None:
        if not node.alive:
            return
        peer = self.world.at.get(action.address)
        consumer = node.consumer if isinstance(node, ConsumerNode) else None
        reason = ""
        if consumer is not None and not consumer.wants_sent(action.message):
            reason = "given up"
        elif peer is None or action.agent not in (None, peer.agent):
            reason = "peer_restarted"
        elif self.world.random.random() < self.world.loss / 4:
            reason = "handshake failed"
        if reason:
            if consumer is not None:
                self.do(node, consumer.on_undelivered(action.address, action.message, reason, self.world.now_s))
            return
        assert peer is not None
        payload = encode(action.message)
        if consumer is not None:
            self.do(node, consumer.on_delivered(action.address, peer.agent, action.message, self.world.now_s))
        for _ in range(self.world.random.choice([1, 1, 1, 2])):
            if self.world.random.random() >= self.world.loss:
                delay_s = (
                    self.world.random.choice([2.0, 5.0]) if self.world.random.random() < self.world.slow / 3 else 0.0
                )
                delay_s += self.world.random.choice([0.001, 0.01, 0.1])
                self.world.later(delay_s, lambda peer=peer: self.arrive(node, peer, payload))  # type: ignore[misc]

    def arrive(self, sender: Node, node: Node, payload: bytes) -> None:
        if not node.alive:
            return
        if node.stopped_until_s > self.world.now_s:
            self.world.later(
                node.stopped_until_s - self.world.now_s + 0.001, lambda: self.arrive(sender, node, payload)
            )
            return
        message: Message = decode(payload)
        machine = node.producer if isinstance(node, ProducerNode) else node.consumer  # type: ignore[attr-defined]
        self.world.note(" ", node.agent, "<-", sender.agent, message)
        try:
            self.do(node, machine.on_message(sender.agent, message, self.world.now_s))
        except ProtocolError as error:
            self.world.referee.expect(error.fault == "peer", str(error))
            self.world.seen["dropped"] += 1

    def connect(self, node: Node, action: act.Connect) -> None:
        if node.alive and isinstance(node, ProducerNode):
            peer = self.world.at.get(action.address)
            if peer is None or peer.agent != action.agent or self.world.random.random() < self.world.loss / 4:
                self.do(node, node.producer.on_unreachable(action.agent, "unreachable", self.world.now_s))
            else:
                self.do(node, node.producer.on_connected(action.agent, self.world.now_s))

    def post(self, node: ProducerNode, action: act.WritePiece) -> list[act.Action]:
        source = self.world.sources[action.request_id]
        if source.closed:
            return node.producer.on_not_posted(action.key, action.piece, self.world.now_s)
        if self.world.random.random() < self.world.loss / 4:
            return node.producer.on_write_failed(action.key, action.piece, "post_failed", self.world.now_s)
        send = node.producer.send(action.key)
        assert send is not None
        self.world.referee.expect(action.end_token <= source.ready, f"{action} is posted, {source.ready} tokens exist")
        self.world.referee.expect(node.address not in source.sent, f"{action} reads blocks that were given back")
        memory = self.world.by_blocks[b"".join(send.registration.blocks[0])]
        self.world.referee.expect(memory.node.agent == action.agent, f"{action} goes to {memory.node.agent}")
        if memory.node.alive:
            self.world.referee.expect(memory.held, f"{action} is posted into memory that D has given away")
        memory.in_flight += 1
        write = Write(node, action, source, source.epoch, memory, good=self.world.random.random() >= self.world.loss)
        self.world.writes.append(write)
        if self.world.random.random() >= self.world.loss / 3:  # or it hangs
            self.world.later(self.world.random.choice([0.0, 0.005, 0.1, 1.0, 1.0]), lambda: self.land(write))
        return []

    def land(self, write: Write, *, at_once: bool = False) -> None:
        """The bytes of a piece arrive; its writer hears of it a moment later."""
        if write.ended:
            return
        write.ended = True
        self.world.writes.remove(write)
        memory, action = write.memory, write.action
        memory.in_flight -= 1
        if memory.node.alive:
            self.world.referee.expect(memory.held, f"{action} lands in memory that D has given away")
        source = write.source
        intact = write.epoch == source.epoch and write.node.address not in source.sent and write.node.alive
        tokens = memory.tokens[write.node.address]
        for token in range(action.first_token, action.end_token):
            if write.good or self.world.random.random() < 0.5:
                tokens[token] = source.prompt if intact else "garbage"
        if at_once:
            self.written(write)
        else:
            self.world.later(self.world.random.choice([0.0, 0.01]), lambda: self.written(write))

    def written(self, write: Write) -> None:
        node, action = write.node, write.action
        if not node.alive:
            return
        if node.stopped_until_s > self.world.now_s:
            self.world.later(node.stopped_until_s - self.world.now_s + 0.001, lambda: self.written(write))
        elif write.good:
            digests = []
            if int(action.key.transfer_id[1:]) % 2:
                digests.append(PieceDigest(action.first_token, action.end_token, b"d" * 16))
            size = 10 * (action.end_token - action.first_token)
            self.do(
                node,
                node.producer.on_written(action.key, action.piece, size, digests, self.world.now_s),
            )
        else:
            self.do(node, node.producer.on_write_failed(action.key, action.piece, "write_failed", self.world.now_s))

    def verified(self, node: Node, request_id: RequestId) -> None:
        if node.alive and isinstance(node, ConsumerNode):
            self.do(
                node,
                node.consumer.on_verified(
                    request_id, self.world.random.random() >= self.world.loss / 4, self.world.now_s
                ),
            )
