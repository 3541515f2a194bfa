"""The guards that `mutants.py` removes, one at a time, and what it puts in their place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """In `path` below src/kvpush, `old` becomes `new`."""

    name: str
    path: str
    old: str
    new: str


MUTATIONS = [
    # The fence at D
    Mutation(
        "release memory without waiting for quiet", "protocol/receive_table.py",
        "if not receive.fenced or receive.exposed:", "if not receive.fenced:",
    ),
    Mutation(
        "release memory when quiet stays away", "protocol/receive_table.py",
        "receive.step(ReceiveEvent.QUIET_TIMEOUT)\n",
        "receive.step(ReceiveEvent.QUIET_TIMEOUT)\n            receive.quiet |= set(receive.may_write)\n"
        "            return [*actions, *self.release_if_quiet(receive)]\n",
    ),
    Mutation(
        "release memory when the peer is lost", "protocol/consumer.py",
        'actions += self._receives.fail(receive, "peer_lost", now_s)',
        "receive.quiet |= set(receive.may_write)\n"
        '                actions += self._receives.fail(receive, "peer_lost", now_s)',
    ),
    Mutation(
        "take a broken connection for the writer's end", "transfer/consumer_side.py",
        "actions = self._consumer.on_disconnected(event.agent, now_s)",
        "actions = self._consumer.on_gone(event.agent, now_s)",
    ),
    Mutation(
        "forget who has got a registration", "protocol/consumer.py",
        "receive.admit(agent, address)\n", "receive.writers[agent] = address\n        receive.quiet.add(agent)\n",
    ),
    Mutation(
        "register although the request was given up", "protocol/consumer.py",
        "if not isinstance(message, Register):\n            return True\n", "return True\n",
    ),
    Mutation(
        "give memory up in the round in which its registration leaves", "transfer/core.py",
        "self._settle(now_s)  # what waited for this sign of life has left\n", "pass\n",
    ),
    Mutation(
        "cancel only once", "protocol/receive_table.py",
        "if now_s - receive.last_cancel_s >= interval_s:", "if False:",
    ),
    Mutation(
        "take no notice of a silent producer", "protocol/consumer.py",
        "return any(self._liveness.silent_s(address, now_s) > limit_s", "return any(False and limit_s",
    ),
    Mutation("never ping", "protocol/consumer.py", "return actions + self._ping(now_s)", "return actions"),
    # The fence at P
    Mutation(
        "commit while pieces are in flight", "protocol/send_table.py",
        "if send.pieces:\n            return []\n        if send.state",
        "if send.pieces and send.terminal:\n            return []\n        if send.state",
    ),
    Mutation(
        "say quiet while pieces are in flight", "protocol/send_table.py",
        "if event is not SendEvent.CANCEL or not send.pieces:", "if True:",
    ),
    Mutation("call a failure quiet", "protocol/send.py", "quiet=not self.pieces", "quiet=True"),
    Mutation(
        "give blocks back while they are read", "protocol/send_table.py",
        "if any(send.reads_blocks or not send.terminal for send", "if any(not send.terminal for send",
    ),
    Mutation(
        "post pieces of requests that are preempted", "transfer/fence.py",
        "if request_id in self._closed:", "if False:",
    ),
    Mutation(
        "do not own up to reads that go on after a preemption", "transfer/fence.py",
        "self._poisoned |= busy\n            return busy", "return set()",
    ),
    Mutation(
        "commit what was poisoned", "transfer/fence.py",
        "yield request_id in self._poisoned", "yield False",
    ),
    Mutation(
        "let poisoned sends go on", "protocol/producer.py",
        "if send.num_reading or local.finished:\n                send.poisoned = True",
        "if local.finished:\n                send.poisoned = True",
    ),
    Mutation(
        "do not count a held piece as owed again", "protocol/producer.py",
        "            send.unpost(ended, now_s)\n", "            pass\n",
    ),
    Mutation(
        "call a lost write ended", "transfer/producer_side.py",
        "if landed.may_land:",
        "if False:",
    ),
    Mutation("take a failed write for landed", "transfer/producer_side.py", "if landed.error:", "if False:"),
    Mutation(
        "go on where the last attempt was", "protocol/send.py",
        "self.attempt = registration.attempt\n        self.posted = registration.first_token\n",
        "self.attempt = registration.attempt\n",
    ),
    # What is ready
    Mutation(
        "keep what was ready before a preemption", "protocol/producer.py",
        'is preempted while its blocks are read")\n        local.ready = 0', 'is preempted while its blocks are read")',
    ),
    Mutation(
        "believe forwards that were launched before a preemption", "transfer/sources.py",
        "self._tables.pop(request_id, None)\n"
        "        self._pending = deque(step for step in self._pending if step.request_id != request_id)",
        "self._tables.pop(request_id, None)",
    ),
    Mutation("do not wait for the forward", "transfer/sources.py", "self._pending[0].event.query()", "True"),
    Mutation(
        "post blocks that are not full", "protocol/send.py",
        "return self.local.ready // block_size * block_size", "return self.local.ready",
    ),
    Mutation(
        "tell nobody of preemptions", "vllm/producer_scheduler.py",
        "preempted.append(Preempt(RequestId(request_id)))", "pass",
    ),
    # Who meets whom
    Mutation(
        "do not compare prompts", "protocol/rendezvous.py",
        "if registration.prompt != self.prompt:", "if False:",
    ),
    Mutation(
        "write from token 0", "protocol/send.py",
        "self.posted = self.registration.first_token\n", "self.posted = 0\n",
    ),
    Mutation(
        "remember no ends", "protocol/tombstones.py",
        "stone = self.get(key, agent)\n        return", "stone = self.get(key, agent)\n        return False and",
    ),
    Mutation(
        "forget a cancellation that comes before its registration", "protocol/answers.py",
        "if stone is None or stone.attempt < attempt:\n            # Also", "if False:\n            # Also",
    ),
    Mutation(
        "serve a consumer twice", "protocol/claims.py",
        "if claim.engine != address.engine or (key.pp_rank, key.tp_rank) in claim.ended:\n"
        '            return "duplicate"\n'
        '        return "" if claim.targets == targets and len(claim.ended) < targets else "contradiction"',
        'return ""',
    ),
    Mutation(
        "give all siblings one index", "vllm/consumer_scheduler.py",
        "load.consumer, self.next_consumer = self.next_consumer, self.next_consumer + 1",
        "load.consumer, self.next_consumer = 0, self.next_consumer + 1",
    ),
    # Reports
    Mutation(
        "name a load's cached blocks as invalid", "transfer/reports.py",
        "return blocks[command.first_token // self._block_size :] or blocks[-1:]", "return blocks",
    ),
    Mutation(
        "forget to name invalid blocks", "transfer/reports.py",
        "self._invalid.update(blocks)", "pass",
    ),
    Mutation(
        "load again after a failure", "vllm/consumer_scheduler.py",
        "if load is None or load.stage is not _Stage.NEW:\n            return 0, False",
        "if load is None:\n            return 0, False",
    ),
    # Bounds
    Mutation(
        "hold a request that nobody claims", "protocol/producer.py",
        "if now_s - local.waiting_since_s > bound_s:", "if False:",
    ),
    Mutation(
        "wait for ever for a write", "protocol/producer.py",
        "if now_s - oldest_s > self._timing.write_timeout_s:", "if False:",
    ),
    Mutation(
        "wait for ever for the scheduler of P", "protocol/producer.py",
        "late = now_s - send.waiting_since_s > self._timing.admission_timeout_s", "late = False",
    ),
]  # fmt: skip
