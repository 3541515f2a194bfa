"""Judges a simulated world: what the protocol promises, checked against what really lies in memory and in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol_world_parts import ConsumerNode, Node, ProducerNode

from kvpush.protocol import actions as act

if TYPE_CHECKING:
    from protocol_world import World


class Referee:
    """Raises AssertionError, naming the world's seed and its time, as soon as a rule is broken."""

    def __init__(self, world: World) -> None:
        self.world = world

    def expect(self, holds: bool, rule: str) -> None:
        if not holds:
            raise AssertionError(f"world {self.world.seed} at {self.world.now_s:.3f} s: {rule}")

    def on_sent(self, node: Node, action: act.ReportSent) -> None:
        source = self.world.sources[action.request_id]
        self.expect(source.finished, f"{action.request_id} is reported sent before it has finished")
        self.expect(node.address not in source.sent, f"{action.request_id} is reported sent twice")
        assert isinstance(node, ProducerNode)
        for write in self.world.writes:
            if write.node is node and write.source is source and write.epoch == source.epoch:
                send = node.producer.send(write.action.key)
                poisoned = send is not None and send.poisoned
                self.expect(poisoned, f"{action.request_id} is given back while {write.action} reads it")
                self.world.seen["read after free"] += 1
        source.sent.add(node.address)
        self.world.seen["sent"] += 1

    def on_ended(self, node: Node, action: act.SendEnded) -> None:
        self.world.seen[f"send {action.state}"] += 1
        self.world.seen[f"send {action.reason}"] += 1
        if action.state == "committed":
            assert isinstance(node, ProducerNode)
            send = node.producer.send(action.key)
            self.expect(send is None or not send.poisoned, f"{action.key} is committed although it is poisoned")

    def on_report(self, node: Node, action: act.ReportReceived | act.ReportFailed | act.ReportReleased) -> None:
        assert isinstance(node, ConsumerNode)
        memory = node.memories[action.request_id]
        reports = memory.reports
        kind = type(action).__name__.removeprefix("Report").lower()
        name = f"{action.request_id} at {node.agent}"
        reports[kind] += 1
        self.world.seen[kind] += 1
        self.expect(reports[kind] == 1, f"{name} is reported {kind} twice")
        self.expect(not (reports["received"] and reports["released"]), f"{name}: received and released")
        self.expect(not (reports["received"] and reports["failed"]), f"{name}: received and failed")
        if kind == "failed":
            self.world.seen[f"failed {action.reason}"] += 1  # type: ignore[union-attr]
            self.expect(not reports["released"], f"{name}: failed after it was released")
            self.expect(memory.wanted, f"{name}: failed, though nobody waits")
            return
        self.expect(memory.in_flight == 0, f"{name} is {kind} while {memory.in_flight} pieces are in flight to it")
        memory.held = False
        if kind == "released":
            self.expect(bool(reports["failed"]) == memory.wanted or not memory.wanted, f"{name}: released, not failed")
        else:
            for address, tokens in memory.tokens.items():
                self.expect(
                    all(token == memory.prompt for token in tokens[memory.first_token :]),
                    f"{name} is received, but {address} wrote {tokens} from {memory.first_token} on",
                )

    def at_end(self) -> None:
        for node in self.world.live():
            self.expect(self.world.idle(node), f"{node.agent} is not idle at the end")
        for source in self.world.sources.values():
            self.expect(
                len(source.sent) == len(self.world.p_addresses), f"{source.request_id} was not sent by every rank"
            )
        for memory in self.world.memories:
            if memory.node.alive:
                self.expect(not memory.held, f"{memory.request_id} never ended at {memory.node.address}")
